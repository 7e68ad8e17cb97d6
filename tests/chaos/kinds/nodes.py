"""Nodes of the Ray cluster that die: a worker, or the head with all that hangs on it."""

from __future__ import annotations

import time
from typing import Any

from ..cluster import RayCluster
from ..trial import Bad, Trial
from . import kind

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


def own_cluster(t: Trial, nodes: int) -> RayCluster:
    """A cluster of its own: two logical CPUs a node, and engines that fill the one or the other."""
    cluster = RayCluster(HOSTS[0], 2, {"AWS_CONFIG_FILE": str(t.world.aws_config)})
    t.cleanups.append(cluster.stop)
    for host in HOSTS[1:nodes]:
        cluster.add_node(host, 2)
    t.address = cluster.address
    return cluster


def engines_on(t: Trial, cluster: RayCluster, host: str) -> list[int]:
    return sorted(set(cluster.pids(host)) & set(t.engine_pids()))


def spread(t: Trial, **more: Any) -> None:
    """A job whose two engines need a node each."""
    t.setup(**more)
    t.orders(sleep=0.012)
    if t.engine == "fast":
        t.job["engine"]["num_cpus"] = 1.5
        t.job["cluster"]["prepare"] = {"num_cpus": 0.5}
        t.job["cluster"]["finish"] = {"num_cpus": 0.25}


@kind("worker node killed", real=True, every=2)
def worker_node_killed(t: Trial) -> None:
    """The run must go on with the nodes that are left."""
    _node_lost(t, freeze=False)


@kind("worker node frozen (no answer, no closed connection)", every=4)
def worker_node_frozen(t: Trial) -> None:
    _node_lost(t, freeze=True)


def _node_lost(t: Trial, freeze: bool) -> None:
    cluster = own_cluster(t, 3)
    spread(t)
    driver = t.start()
    t.wait_commits(t.rng.randint(1, t.shards // 3), driver)
    host = t.rng.choice(HOSTS[1:])
    on = len(engines_on(t, cluster, host))
    if freeze:
        cluster.freeze_node(host)
    else:
        cluster.kill_node(host)
    t.fault(f"{host} lost with {on} engines at {len(t.commit_names())} commits")
    t.keep()
    t.expect_success(driver)


@kind("head killed, continued on a new cluster", every=2)
def head_killed(t: Trial) -> None:
    """The driver must end by itself, and the run go on elsewhere."""
    cluster = own_cluster(t, 2)
    spread(t)
    driver = t.start()
    t.wait_commits(t.rng.randint(1, t.shards // 3), driver)
    cluster.kill_node(HOSTS[0])
    began = time.monotonic()
    t.fault(f"head killed at {len(t.commit_names())} commits")
    t.keep()
    status = driver.wait(150)
    took = time.monotonic() - began
    t.record.extra["driver"] = f"{status.get('error')} after {took:.0f} s"
    if status.get("error") == "Hung":
        raise Bad("the driver did not notice in 150 s that its cluster is gone")
    if "error" not in status:
        raise Bad("the driver succeeded without its cluster")
    cluster.stop()
    t.address = own_cluster(t, 1).address if t.rng.random() < 0.3 else t.world.address
    t.job["cluster"] = {**t.job["cluster"], "address": t.address}
