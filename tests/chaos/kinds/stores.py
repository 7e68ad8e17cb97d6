"""A store in trouble: errors, slowness, broken connections, lost answers, death, a full disk."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from s3server import proxy

from ..trial import Bad, Trial
from . import kind

S3 = ("s3",)
Decide = Callable[[str, str, Mapping[str, str]], str]


def through_proxy(t: Trial, decide: Decide) -> list[tuple[str, str, str]]:
    """The drivers of this trial see the store through a proxy; what it was asked is returned."""
    context = proxy(t.world.s3, decide)
    running = context.__enter__()
    t.cleanups.append(lambda: context.__exit__(None, None, None))
    t.options["endpoint_url"] = running.endpoint
    return running.seen


def spoiled(seen: list[tuple[str, str, str]]) -> int:
    return sum(decision != "pass" for _, _, decision in seen)


def at_random(t: Trial, share: float, what: Callable[[random.Random, str], str]) -> Decide:
    """Spoils this share of the calls; a seed of its own, since calls come from many threads."""
    rng = random.Random(t.record.seed)

    def decide(method: str, path: str, headers: Mapping[str, str]) -> str:
        return what(rng, method) if rng.random() < share else "pass"

    return decide


def _survives(t: Trial, decide: Decide) -> None:
    """The driver must get through on its own."""
    seen = through_proxy(t, decide)
    t.setup()
    t.expect_success(t.start())
    t.fault(f"{spoiled(seen)} of {len(seen)} calls spoiled", faults=0)
    if not spoiled(seen):
        raise Bad("no call was spoiled")


@kind("store: 500 or 503 at 10 % of the calls", stores=S3, real=True)
def store_errors(t: Trial) -> None:
    _survives(t, at_random(t, 0.1, lambda rng, method: rng.choice(["500", "503"])))


@kind("store: slow answers", stores=S3)
def store_slow(t: Trial) -> None:
    _survives(t, at_random(t, 0.15, lambda rng, method: f"slow {rng.uniform(0.2, 2.5):.2f}"))


@kind("store: connection reset in the middle of a body", stores=S3, real=True)
def store_resets(t: Trial) -> None:
    def what(rng: random.Random, method: str) -> str:
        return rng.choice(["cut-up", "reset"]) if method == "PUT" else "cut-down"

    _survives(t, at_random(t, 0.1, what))


@kind("store: PUT succeeded, answer lost", stores=S3, real=True)
def store_lost_answers(t: Trial) -> None:
    share = t.rng.choice([0.2, 0.5])
    _survives(t, at_random(t, share, lambda rng, method: "lose" if method == "PUT" else "pass"))


@kind("store: answers lost and driver killed", stores=S3)
def store_lost_answers_killed(t: Trial) -> None:
    what = {"PUT": "lose", "GET": "cut-down", "HEAD": "503"}
    through_proxy(t, at_random(t, 0.2, lambda rng, method: what.get(method, "pass")))
    t.setup()
    driver = t.start()
    t.wait_commits(t.rng.randint(1, t.shards // 2), driver)
    driver.kill()
    t.fault("20 % spoiled; killed")
    t.keep()


@kind("store: killed and restarted", stores=S3, real=True)
def store_killed(t: Trial) -> None:
    t.setup()
    driver = t.start()
    t.wait_commits(t.rng.randint(0, t.shards // 2), driver)
    before = t.keep()
    down = t.rng.uniform(0, 12)
    t.world.s3.kill()
    t.fault(f"down for {down:.0f} s and its start, at {before} commits")
    time.sleep(down)
    t.world.s3.restart()
    status = driver.wait(t.limit)
    if "error" in status and status["error"] != "StoreUnavailable":
        raise Bad(f"success or StoreUnavailable was expected: {status}")
    t.record.extra["driver"] = status.get("error", "went on")
    t.done = None if "error" in status else status


@kind("store: credentials expire, then are renewed by hand", stores=S3)
def credentials_expire(t: Trial) -> None:
    """With keys that nothing renews the run must end, say why, and go on with valid ones."""
    state = {"expired": False}
    seen = through_proxy(t, lambda *_: "expired" if state["expired"] else "pass")
    t.setup()
    driver = t.start()
    t.wait_commits(t.rng.randint(1, t.shards // 2), driver)
    state["expired"] = True
    t.expect_error(driver, "StoreError", "expired", "enew")
    t.fault(f"{spoiled(seen)} calls answered ExpiredToken")
    t.keep()
    state["expired"] = False


@kind("store: credentials expire and a provider renews them", stores=S3)
def credentials_renewed(t: Trial) -> None:
    """boto's chain gives new keys: the run must go on by itself."""
    old, new = (t.world.s3.key, t.world.s3.secret), t.world.second_key
    if new is None:
        raise Bad("needs radosgw")
    state = {"expired": False}

    def decide(method: str, path: str, headers: Mapping[str, str]) -> str:
        signed = headers.get("Authorization") or headers.get("authorization") or ""
        return "expired" if state["expired"] and f"Credential={old[0]}/" in signed else "pass"

    seen = through_proxy(t, decide)
    keys = t.folder / "keys.json"
    _offer(keys, old)
    profile = t.folder.name
    with t.world.aws_config.open("a") as file:
        file.write(f"[profile {profile}]\nregion = us-east-1\n")
        file.write(f"credential_process = cat {keys}\n")
    t.options = {"endpoint_url": t.options["endpoint_url"], "profile": profile}
    t.setup()
    t.env = {"AWS_CONFIG_FILE": str(t.world.aws_config)}
    driver = t.start()
    t.wait_commits(t.rng.randint(1, t.shards // 2), driver)
    _offer(keys, new)
    state["expired"] = True
    t.fault("the old key is refused from now on", faults=0)
    t.expect_success(driver)
    t.record.extra["refused"] = spoiled(seen)
    state["expired"] = False


def _offer(path: Path, key: tuple[str, str]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(f'{{"Version": 1, "AccessKeyId": "{key[0]}", "SecretAccessKey": "{key[1]}"}}')
    fresh.replace(path)


@kind("disk full in the middle of a shard", stores=("local",), real=True, needs_root=True)
def disk_full(t: Trial) -> None:
    """A clear error, everything committed kept; with room made the same command completes."""
    mount = t.folder / "out"
    mount.mkdir()
    size = t.rng.choice([96, 160, 240])
    _mount(t, mount, f"size={size}k,nr_inodes=10k")
    t.setup(rows=1200, per_shard=40)
    driver = t.start()
    status = t.expect_error(driver, "StoreError", "disk full", "Free some space")
    t.fault(f"{size} KB disk full at {len(t.commit_names())} commits: {status['text'][:60]}")
    t.keep()
    subprocess.run(["mount", "-o", "remount,size=64m", str(mount)], check=True)


def _mount(t: Trial, mount: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount)], check=True)
    t.cleanups.append(lambda: subprocess.run(["umount", "-l", str(mount)], check=True) and None)
