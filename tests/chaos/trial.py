"""One trial: an input, a run with a fault in it, reruns to the end, and the checks."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import checker, inputs, processes
from .cluster import base_env
from .drivers import Driver
from .places import Place
from .world import World

RUN_KEY = "chaos"
REPLICAS, BATCHES = 2, 2


class Bad(Exception):
    """The trial failed: the text says what was seen and what should have been."""


@dataclass
class Record:
    """What a trial came to, as a line of the results file."""

    kind: str
    number: int
    seed: str
    store: str
    engine: str
    plan: str = ""  # the fault as it was drawn
    ok: bool = False
    note: str = ""
    attempts: int = 0
    faults: int = 0
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    again: int = 0
    bound: int = 0
    recover: float | None = None
    seconds: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Trial:
    """What a kind of fault works with. `rng` decides everything that is random."""

    def __init__(self, world: World, kind: str, number: int, seed: int, store: str, engine: str):
        self.world, self.store, self.engine = world, store, engine
        text = f"{seed}:{kind}:{number}"
        self.rng = random.Random(text)
        self.record = Record(kind, number, text, store, engine)
        self.folder = world.folder / f"{kind}-{number}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.drivers: list[Driver] = []
        self.kept: dict[str, bytes] = {}
        self.fault_at: float | None = None
        self.done: dict[str, Any] | None = None
        self.rows: list[dict[str, Any]] = []
        self.quarantined: dict[int, str] = {}
        self.skipped: set[int] = set()
        self.shape: Callable[[dict[str, Any]], dict[str, Any]] = lambda row: row
        self.answer: Callable[[str], str | None] = checker.fast_answer
        self.address: str | None = world.address
        self.engine_class = engine
        self.bound_faults: float | None = None
        self.cleanups: list[Callable[[], None]] = []
        self.out = world.out(self.store, self.folder, f"{kind}-{number}")
        self.options = dict(world.options(self.store))
        self.job: dict[str, Any] = {}
        self.env: dict[str, str] = {}
        remote = store == "s3" and self.rng.random() < 0.5
        self.in_uri = f"{self.out}-in" if remote else str(self.folder / "in")
        self.in_place = world.place("s3" if remote else "local", self.in_uri, "")

    # --- set up ---------------------------------------------------------------------------------

    def setup(self, rows: int | None = None, per_shard: int | None = None, **groups: Any) -> None:
        """Writes an input (unless `rows` was set before) and makes the job."""
        count = rows or self.rng.choice([600, 900, 1200])
        self.per_shard = per_shard or self.rng.choice([25, 40, 50])
        if self.engine != "fast":
            self.answer = self.world.truth.get
        if not self.rows:
            self.rows = inputs.rows(count, self.engine)
        if not self.in_place.names(""):
            self.write_input(self.rows)
        self.orders(sleep=self.rng.choice([0.002, 0.004, 0.006]))
        self.job = inputs.job(
            self.engine,
            source={
                "uri": self.in_uri,
                "rows_per_shard": self.per_shard,
                "options": self.options if self.in_uri.startswith("s3") else {},
            },
            engine={
                "replicas": REPLICAS if self.engine == "fast" else 1,
                "max_concurrent_batches": BATCHES,
                "env": {"CHAOS_DIR": str(self.folder)},
            },
            output={"uri": self.out, "options": self.options},
            cluster={"address": self.address} if self.address else {},
        )
        for group, fields in groups.items():
            self.job[group] = {**self.job.get(group, {}), **fields}

    def write_input(self, rows: list[dict[str, Any]], name: str = "a.parquet") -> None:
        self.in_place.write(name, inputs.parquet(rows))

    def orders(self, **orders: Any) -> None:
        """Tells the fast engines how to behave from their next block on."""
        path = self.folder / "engine.json"
        old = json.loads(path.read_text()) if path.exists() else {}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({**old, **orders}))
        fresh.replace(path)

    # --- drive ----------------------------------------------------------------------------------

    def start(self, *hooks: dict[str, Any], run_key: str = RUN_KEY) -> Driver:
        spec = {
            "job": self.job,
            "run_key": run_key,
            "engine": self.engine_class,
            "hooks": list(hooks),
            "folder": str(self.folder),
        }
        mark = {"CHAOS_TRIAL": self.record.seed}
        name = f"driver-{len(self.drivers)}"
        driver = Driver(self.folder, name, spec, {**base_env(), **mark, **self.env})
        self.drivers.append(driver)
        self.record.attempts += 1
        return driver

    def complete(self, attempts: int = 3) -> dict[str, Any]:
        """Runs until the run is finished."""
        for _ in range(attempts):
            began = time.time()
            status = self.start().wait(self.limit)
            self._note_recovery(began)
            if "error" not in status:
                self.done = status
                return status
        raise Bad(f"not complete after {attempts} more attempts: {_short(status)}")

    @property
    def limit(self) -> float:
        return 300 if self.engine == "fast" else 600

    def expect_error(self, driver: Driver, error: str, *texts: str) -> dict[str, Any]:
        """The driver must end with this error, whose text holds `texts`."""
        status = driver.wait(self.limit)
        if status.get("error") != error or status.get("code") != 1:
            raise Bad(f"{error} was expected, not {_short(status)}")
        for text in texts:
            if text not in status["text"]:
                raise Bad(f"{error} does not say {text!r}: {status['text'][:300]}")
        return status

    def expect_success(self, driver: Driver) -> dict[str, Any]:
        status = driver.wait(self.limit)
        if "error" in status:
            raise Bad(f"{driver.name} should have succeeded: {_short(status)}")
        self.done = status
        return status

    def fault(self, what: str = "", faults: int = 1) -> None:
        """Notes that a fault has just been made."""
        self.record.faults += faults
        self.fault_at = time.time()
        if what:
            self.record.plan = f"{self.record.plan}; {what}".strip("; ")

    # --- look -----------------------------------------------------------------------------------

    @property
    def place(self) -> Place:
        return self.world.place(self.store, self.out, RUN_KEY)

    def commit_names(self) -> list[str]:
        return [n for n in self.place.names("_raybatch/commits") if "/.tmp-" not in n]

    def commits(self) -> dict[str, bytes]:
        return {name: self.place.read(name) for name in self.commit_names()}

    @property
    def shards(self) -> int:
        return -(-len(self.rows) // self.per_shard)

    def keep(self) -> int:
        """From now on the commits that are there must stay as they are; returns how many."""
        self.kept.update(self.commits())
        return len(self.kept)

    def wait_commits(self, count: int, driver: Driver, seconds: float = 120) -> bool:
        """Until that many commits are there; False when the driver ended before."""
        return self.wait_for(lambda: len(self.commit_names()) >= count, driver, seconds)

    def wait_for(self, what: Callable[[], bool], driver: Driver, seconds: float = 120) -> bool:
        end = time.monotonic() + seconds
        while not what():
            if not driver.running:
                return False
            if time.monotonic() > end:
                raise Bad(f"waited {seconds} s in vain; {driver.name}: {driver.tail()[-300:]}")
            time.sleep(0.05)
        return True

    def engine_pids(self) -> list[int]:
        folder = self.folder / "engines"
        pids = [int(path.name) for path in folder.iterdir()] if folder.exists() else []
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    def _note_recovery(self, began: float) -> None:
        """Seconds from the fault, or the restart after it, to the first new commit."""
        if self.fault_at is None:
            return
        since = max(began, self.fault_at)
        times = [json.loads(c)["committed"] for c in self.commits().values()]
        later = [t for t in times if t > since]
        if later and self.record.recover is None:
            self.record.recover = round(min(later) - since, 2)

    def inferred_again(self) -> int:
        """Rows handed to an engine more often than once."""
        seen: Counter[str] = Counter()
        for path in (self.folder / "seen").glob("*"):
            seen.update(path.read_text().split("\n"))
        seen.pop("", None)
        return sum(times - 1 for times in seen.values())

    def seen_rows(self) -> int:
        """Rows handed to an engine, as often as they were."""
        texts = (path.read_text() for path in (self.folder / "seen").glob("*"))
        return sum(text.count("\n") for text in texts)

    def forget_seen(self) -> None:
        """What engines were handed until now is not of the run that the trial is about."""
        shutil.rmtree(self.folder / "seen", ignore_errors=True)

    # --- check ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that must hold at the end of every trial; raises `Bad`."""
        record = self.record
        record.rows = len(self.rows)
        if self.fault_at is not None:
            self._note_recovery(self.fault_at)
        found = checker.check(
            self.place,
            self.rows,
            self.answer,
            self.quarantined,
            frozenset(self.skipped),
            self.shape,
        )
        record.lost, record.doubled, record.wrong = found.lost, found.doubled, found.wrong
        record.again = self.inferred_again()
        faults = self.bound_faults if self.bound_faults is not None else record.faults
        record.bound = int(self.in_flight * self.per_shard * faults)
        problems = list(found.faults)
        now = self.commits()
        changed = [name for name, body in self.kept.items() if now.get(name) != body]
        if changed:
            problems.append(f"commits changed or lost: {changed[:3]}")
        problems += self._verify()
        problems += self._leftovers()
        if record.again > record.bound:
            problems.append(f"{record.again} rows inferred again, at most {record.bound} allowed")
        if problems:
            raise Bad("; ".join(problems))

    @property
    def in_flight(self) -> int:
        """Shards that may be in engines, or answered and not committed: `Pipeline.uncommitted`."""
        return 2 * int(self.job["engine"]["replicas"]) * (BATCHES + 1)

    def _run_store(self) -> Any:
        from prefect_raybatch.storage import open_store

        return open_store(f"{self.out}/{RUN_KEY}", self.world.options(self.store) or None)

    def _verify(self) -> list[str]:
        from prefect_raybatch.result.verify import verify

        verdict = verify(self._run_store())
        return [f"verify: {fault}" for fault in verdict.faults] + (
            [] if verdict.finished else ["verify: not finished"]
        )

    def _leftovers(self) -> list[str]:
        for driver in self.drivers:
            if driver.running:
                driver.kill(group=True)
        waited, left = processes.wait_until_gone(("CHAOS_TRIAL", self.record.seed))
        self.record.extra["processes_gone_s"] = round(waited, 1)
        problems = [f"still alive after 30 s: {', '.join(left)}"] if left else []
        odd = checker.unexpected_files(self.place)
        # A killed writer's temporary file, a killed planner's probe: harmless, and for `reap`.
        killed = [name for name in odd if "/.tmp-" in f"/{name}" or name.startswith("_probe-")]
        if killed:
            from prefect_raybatch.result.reap import reap

            self.record.extra["left_by_a_kill"] = len(killed)
            reap(self._run_store(), older_than=0.0)
            odd = checker.unexpected_files(self.place)
        if odd:
            problems.append(f"unexpected files: {odd[:4]} ({len(odd)})")
        return problems

    def close(self, keep: bool) -> None:
        for driver in self.drivers:
            if driver.running:
                driver.kill(group=True)
        for action in reversed(self.cleanups):
            action()
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def _short(status: dict[str, Any]) -> str:
    return f"{status.get('error', 'success')}: {str(status.get('text', ''))[:300]}"
