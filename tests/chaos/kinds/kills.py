"""SIGKILL of the driver: at a random time, after a number of commits, and at chosen points."""

from __future__ import annotations

import time
from typing import Any

from .. import inputs
from ..trial import Bad, Trial
from . import kind


def hook(
    op: str, path: str, n: int = 1, when: str = "before", do: str = "kill", **more: Any
) -> Any:
    return {"op": op, "path": path, "n": n, "when": when, "do": do, **more}


def killed_itself(t: Trial, at: Any) -> None:
    """Starts a driver armed with a hook and waits for its death."""
    driver = t.start(at)
    status = driver.wait(t.limit)
    t.fault(f"{at['do']} {at['when']} {at['op']} {at['path']} #{at['n']}")
    if status["code"] != -9:
        raise Bad(f"the driver should have been killed: {status}")
    t.keep()


@kind("driver killed (the process)", real=True)
def driver_killed(t: Trial) -> None:
    _killed(t, group=False)


@kind("driver killed (its process group)", real=True)
def driver_group_killed(t: Trial) -> None:
    _killed(t, group=True)


def _killed(t: Trial, group: bool) -> None:
    t.setup()
    for _ in range(t.rng.choice([1, 1, 2, 3])):
        had, commits = len(t.commit_names()), t.rng.random() < 0.5
        left = t.shards - had - 1  # no machine is to be through with the run before it is killed
        more = min(left, t.rng.randint(1, max(1, t.shards // 3))) if commits else left
        if t.engine == "fast":
            t.orders(most=t.seen_rows() + more * t.per_shard)
        driver = t.start()
        if commits:
            t.wait_commits(had + more, driver)
            time.sleep(t.rng.random() * 0.3)
        else:
            time.sleep(t.rng.uniform(1, 14))
        if not driver.running:
            return
        driver.kill(group)
        t.orders(most=None)
        t.fault(f"killed after {time.time() - driver.began:.1f} s, {len(t.commit_names())} commits")
        t.keep()


@kind("driver killed, with the Ray cluster it had started")
def driver_killed_own_cluster(t: Trial) -> None:
    t.address = None
    t.setup(rows=600, engine={"replicas": 1})  # a local cluster has this machine's CPUs
    driver = t.start()
    t.wait_commits(t.rng.randint(1, t.shards // 2), driver, 180)
    driver.kill()
    t.fault("killed; its Ray is its child")
    t.keep()


@kind("driver killed while planning")
def killed_planning(t: Trial) -> None:
    t.setup()
    at = t.rng.choice(
        [
            hook("put_if_absent", "_raybatch/plan.json", 1, t.rng.choice(["before", "after"])),
            hook("put_if_absent", "_raybatch/plan.json", 1, "middle", delay=t.rng.random() * 0.01),
            hook("put_if_absent", "_probe", t.rng.randint(1, 8)),
        ]
    )
    killed_itself(t, at)


@kind("driver killed while copying the snapshot")
def killed_snapshot(t: Trial) -> None:
    t.rows = inputs.rows(800, t.engine)
    for number in range(4):
        t.in_place.write(f"{number}.csv", inputs.csv_text(t.rows[number * 200 :][:200]).encode())
    t.setup()
    killed_itself(t, hook("put_file", "_raybatch/input/", 1, t.rng.choice(["before", "after"])))


@kind("driver killed in a commit", real=True)
def killed_in_commit(t: Trial) -> None:
    t.setup()
    when = t.rng.choice(["before", "middle", "after"])
    n, delay = t.rng.randint(1, t.shards - 1), t.rng.random() * 0.012
    killed_itself(t, hook("put_if_absent", "_raybatch/commits/", n, when, delay=delay))


@kind("driver killed between piece and receipt")
def killed_before_receipt(t: Trial) -> None:
    t.setup()
    killed_itself(t, hook("piece", "_raybatch/pieces/", t.rng.randint(1, t.shards - 1), "after"))


@kind("driver killed in finalize")
def killed_in_finalize(t: Trial) -> None:
    t.setup(output={"uri": t.out, "options": t.options, "file_mb": 1})
    when = t.rng.choice(["before", "middle", "after"])
    killed_itself(t, hook("put_file_if_absent", "data/", 1, when, delay=t.rng.random() * 0.01))


@kind("driver killed around _SUCCESS")
def killed_at_success(t: Trial) -> None:
    t.setup()
    at = t.rng.choice(
        [
            hook("put", "_raybatch/report.json", 1, "before"),
            hook("put", "_raybatch/report.json", 1, "after"),
            hook("put_if_absent", "_SUCCESS", 1, "before"),
            hook("put_if_absent", "_SUCCESS", 1, "middle", delay=t.rng.random() * 0.01),
            hook("put_if_absent", "_SUCCESS", 1, "after"),
            hook("delete", "_raybatch/pieces", 1, "before"),
            hook("delete", "_raybatch/pieces", 1, "middle", delay=t.rng.random() * 0.004),
        ]
    )
    killed_itself(t, at)
