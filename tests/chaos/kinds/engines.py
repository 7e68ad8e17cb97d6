"""Engines that die, run out of memory or hang; the driver goes on by itself."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from .. import processes
from ..drivers import Driver
from ..trial import Trial
from . import kind


def in_the_middle(t: Trial, driver: Driver) -> bool:
    """Waits for a random moment at which engines work; False when the run was faster."""
    t.wait_for(lambda: bool(t.engine_pids()), driver, 180)
    if not t.wait_commits(t.rng.randint(0, max(1, t.shards * 2 // 3)), driver):
        return False
    time.sleep(t.rng.random() * 0.5)
    return driver.running


@kind("engine actor killed", real=True)
def engine_killed(t: Trial) -> None:
    t.setup()
    driver = t.start()
    for _ in range(t.rng.choice([1, 1, 2]) if t.engine == "fast" else 1):
        pids = t.engine_pids() if in_the_middle(t, driver) else []
        if not pids:
            break
        os.kill(t.rng.choice(pids), signal.SIGKILL)
        t.fault(f"engine killed at {len(t.commit_names())} commits")
        t.keep()
    t.expect_success(driver)


def cores(t: Trial) -> list[int]:
    """Processes that engine actors have started: vLLM's core, or the fast engine's child."""
    found = []
    for pid in t.engine_pids():
        try:
            for child in psutil.Process(pid).children(recursive=True):
                text = " ".join(child.cmdline()) + child.name()
                if "VLLM::" in text or child.name() == "cat":
                    found.append(child.pid)
        except psutil.Error:
            continue
    return found


@kind("engine's own subprocess killed", real=True)
def engine_core_killed(t: Trial) -> None:
    _with_core(t)
    driver = t.start()
    if in_the_middle(t, driver) and (found := cores(t)):
        os.kill(t.rng.choice(found), signal.SIGKILL)
        t.fault(f"core killed at {len(t.commit_names())} commits")
        t.keep()
    t.expect_success(driver)


def _with_core(t: Trial, **groups: Any) -> None:
    t.setup(**groups)
    t.orders(child=True)
    if t.engine == "vllm":
        t.job["engine"]["env"]["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"


@kind("engine's own subprocess stopped for a while", real=True, every=2)
def engine_core_hangs(t: Trial) -> None:
    _with_core(t)
    driver = t.start()
    if in_the_middle(t, driver) and (found := cores(t)):
        pid, seconds = t.rng.choice(found), t.rng.uniform(5, 15)
        os.kill(pid, signal.SIGSTOP)
        t.fault(f"core stopped for {seconds:.0f} s", faults=0)
        t.keep()
        time.sleep(seconds)
        processes.kill([pid], signal.SIGCONT)
    t.expect_success(driver)


@kind("engine's own subprocess stopped for ever", real=True, every=2)
def engine_core_hangs_for_ever(t: Trial) -> None:
    # vLLM's limit leaves time for a step on a busy machine.
    _with_core(t, limits={"hang_seconds": 3 if t.engine == "fast" else 30})
    driver = t.start()
    pid = None
    if in_the_middle(t, driver) and (found := cores(t)):
        pid = t.rng.choice(found)
        os.kill(pid, signal.SIGSTOP)
        t.fault(f"core stopped at {len(t.commit_names())} commits")
        t.keep()
    status = t.expect_success(driver)
    # Stopped with nothing left to answer, it hangs for nobody; it must be gone in either case.
    until = time.monotonic() + 15
    while pid is not None and not processes.gone(pid) and time.monotonic() < until:
        time.sleep(0.1)
    if pid is not None and not processes.gone(pid):
        raise RuntimeError(f"the stopped core {pid} was not ended: {status}")


def _some_text(t: Trial) -> str:
    return str(t.rng.choice(t.rows)["text"])


@kind("out of memory: Python's MemoryError in an engine")
def memory_error(t: Trial) -> None:
    _once(t, "memory_error")


@kind("out of memory: on the GPU", real=True)
def cuda_out_of_memory(t: Trial) -> None:
    if t.engine == "vllm":
        t.setup()
        t.engine_class = "vllm-oom"
        driver = t.start()
        t.expect_success(driver)
        t.fault("torch.OutOfMemoryError at the third step")
        if not (t.folder / "once-vllm-oom").exists():
            raise RuntimeError("the fault did not happen")
    else:
        _once(t, "cuda_oom")


@kind("out of memory: the kernel kills an engine")
def oom_killer(t: Trial) -> None:
    _once(t, "oom_killer")


def _once(t: Trial, what: str) -> None:
    t.setup()
    t.orders(once={what: _some_text(t)})
    driver = t.start()
    marker = Path(t.folder / f"once-{what}")
    t.wait_for(marker.exists, driver)
    t.fault(what)
    t.keep()
    t.expect_success(driver)


@kind("a row that kills its engine each time")
def poison_kills(t: Trial) -> None:
    _poison(t, "kills")


@kind("a row whose engine dies each time (no process death)")
def poison_dies(t: Trial) -> None:
    _poison(t, "dies")


def _poison(t: Trial, how: str) -> None:
    """It must end in quarantine after a bounded number of deaths, its neighbours answered."""
    t.setup(rows=300, per_shard=25, limits={"max_failed_rows": 2})
    bad = t.rng.sample(range(300), t.rng.choice([1, 1, 2]))
    t.orders(**{how: [t.rows[i]["text"] for i in bad]})
    t.quarantined = dict.fromkeys(bad, "EngineDied")
    driver = t.start()
    t.expect_success(driver)
    seen = "".join(path.read_text() for path in (t.folder / "seen").glob("*")).split("\n")
    deaths = [seen.count(f"{i // t.per_shard} {i % t.per_shard}") for i in sorted(t.quarantined)]
    t.record.extra["deaths"] = deaths
    # Shared pass, alone as a shard, as a part of 2, then alone as a row, twice.
    if max(deaths) > 8:
        raise RuntimeError(f"a poison row was tried {deaths} times")
    t.fault(f"rows {bad}, tried {deaths} times", faults=sum(deaths))
