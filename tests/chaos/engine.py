"""Engines of the campaign, at the one seam of the pipeline: they travel to Ray's actors by name.

`FastEngine` is the package's engine stage with vLLM taken out: each row's answer follows from its
text alone. What it shall do wrong stands in CHAOS_DIR/engine.json, which is read at every block,
so that a trial can change it while the run goes on. It writes down each row it is handed, which
is how rows that were inferred again are counted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import select
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from prefect_raybatch.stages.block import is_passthrough
from prefect_raybatch.stages.columns import ERROR, POSITION, SHARD
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage
from prefect_raybatch.stages.vllm.canary import CANARY_PROMPT
from prefect_raybatch.stages.vllm.stepper import Completion, EngineDied

Rows = list[tuple[int, int, str]]  # shard, position, text


def answer(text: str) -> str:
    """What the fast engine says to `text`; the checker has the same function of its own."""
    return "re:" + hashlib.sha256(text.encode()).hexdigest()[:16]


def once(folder: Path, name: str) -> bool:
    """True for one caller of a trial, whichever process it is in."""
    try:
        os.close(os.open(folder / f"once-{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def note_rows(folder: Path, rows: Rows) -> int:
    """Appends the rows handed to an engine to a file of this process; how many it was then, of all
    that engines were handed."""
    text = "".join(f"{shard} {position}\n" for shard, position, _ in rows)
    (folder / "seen").mkdir(exist_ok=True)
    with open(folder / "seen.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(folder / "seen" / str(os.getpid()), "a") as file:
            file.write(text)
        return sum(path.read_bytes().count(b"\n") for path in (folder / "seen").iterdir())


def well_rows(table: pa.Table) -> Rows:
    """The rows of a block that an engine is asked, in order."""
    table = table.set_column(  # a row that has failed may hold what is no UTF-8
        table.column_names.index("text"), "text", table["text"].cast(pa.large_binary())
    )
    columns = (table[name].to_pylist() for name in (SHARD, POSITION, "text", ERROR))
    return [(s, p, t.decode()) for s, p, t, error in zip(*columns, strict=True) if error is None]


class FastEngine(EngineStage):
    """The engine stage with a `Fast` in place of vLLM, which answers by position."""

    def __init__(self, launch: EngineLaunch) -> None:
        super().__init__(replace(launch, sort=False, merge=False))

    def start(self) -> None:
        self.engine = Fast(Path(self.launch.env["CHAOS_DIR"]), self.launch.hang_seconds)

    def __call__(self, table: pa.Table) -> pa.Table:
        table = self.without_committed(table)
        if not is_passthrough(table):
            engine = self.ready()
            if engine is not None:
                engine.mine.rows = well_rows(table)
        return super().__call__(table)


class Fast:
    """Answers after a moment, and dies as engine.json says."""

    def __init__(self, folder: Path, hang_seconds: float | None = None) -> None:
        self.folder, self.hang_seconds = folder, hang_seconds
        self.mine = threading.local()  # the rows of this thread's call
        self.lock = threading.Lock()
        self.answered = 0
        self.child: Any = None
        (folder / "engines").mkdir(exist_ok=True)
        (folder / "engines" / str(os.getpid())).touch()
        if self._orders().get("child"):
            self.child = subprocess.Popen(
                ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
            (folder / "engines" / str(os.getpid())).write_text(str(self.child.pid))

    def _orders(self) -> dict[str, Any]:
        return json.loads((self.folder / "engine.json").read_text())

    def stats(self) -> dict[str, int]:
        return {"rows": self.answered, "refused": 0}

    def run(self, requests: Any) -> list[Completion]:
        if requests[0].prompt_token_ids == CANARY_PROMPT:  # asked after a death, and in no row
            return [Completion([[5]], [""], "stop", prompt_tokens=3)]
        rows: Rows = self.mine.rows
        if len(rows) != len(requests):
            raise RuntimeError(f"{len(requests)} requests for {len(rows)} rows")
        seen = note_rows(self.folder, rows)
        while seen > (self._orders().get("most") or seen):  # held: the run is not to end
            time.sleep(0.05)
        orders = self._orders()
        self._misbehave(orders, [text for _, _, text in rows])
        texts = [answer(self._asked(text, orders)) for _, _, text in rows]
        self.answered += len(texts)
        return [Completion([[5]], [t], "stop", prompt_tokens=3, cached_tokens=1) for t in texts]

    def _asked(self, text: str, orders: dict[str, Any]) -> str:
        time.sleep(orders.get("sleep", 0.004))
        if self.child is None:
            return text
        with self.lock:
            try:
                self.child.stdin.write(json.dumps(text) + "\n")
                self.child.stdin.flush()
                ready, _, _ = select.select([self.child.stdout], [], [], self.hang_seconds)
                if not ready:  # as the stepper does with vLLM's core
                    self.child.kill()
                    raise EngineDied(f"hung: no step returned for {self.hang_seconds:g} s")
                back = self.child.stdout.readline()
            except OSError as error:
                raise EngineDied(f"the engine's process is gone: {error}") from None
        if not back:
            raise EngineDied(f"the engine's process ended with {self.child.wait()}")
        return str(json.loads(back))

    def _misbehave(self, orders: dict[str, Any], texts: list[str]) -> None:
        if set(orders.get("kills", ())) & set(texts):
            os.kill(os.getpid(), signal.SIGKILL)
        if set(orders.get("dies", ())) & set(texts):
            raise EngineDied("illegal memory access (as ordered)")
        for kind, at in orders.get("once", {}).items():
            if at in texts and once(self.folder, kind):
                if kind == "memory_error":
                    _fill_memory()
                elif kind == "cuda_oom":  # what the stepper makes of vLLM's error
                    raise EngineDied("OutOfMemoryError: CUDA out of memory (as ordered)")
                elif kind == "oom_killer":
                    os.kill(os.getpid(), signal.SIGKILL)
                else:
                    raise RuntimeError(f"unknown order {kind}")


def _fill_memory() -> None:
    """A real MemoryError: more than the address space of the machine."""
    bytearray(1 << 60)


class RealEngine(EngineStage):
    """vLLM as it is; only writes down the rows it is handed, and its process."""

    def __call__(self, table: pa.Table) -> pa.Table:
        folder = Path(self.launch.env["CHAOS_DIR"])
        (folder / "engines").mkdir(exist_ok=True)
        (folder / "engines" / str(os.getpid())).touch()
        table = self.without_committed(table)
        if not is_passthrough(table):
            note_rows(folder, well_rows(table))
        return super().__call__(table)


class RealEngineOutOfMemory(RealEngine):
    """vLLM whose step runs out of memory once."""

    def start(self) -> None:
        super().start()
        folder = Path(self.launch.env["CHAOS_DIR"])
        inner = getattr(self.engine, "_engine", None)
        if inner is None:
            return
        step, steps = inner.step, iter(range(10**9))

        def failing() -> Any:
            if next(steps) == 3 and once(folder, "vllm-oom"):
                import torch

                raise torch.OutOfMemoryError("out of memory (as ordered)")
            return step()

        inner.step = failing


ENGINES = {
    "fast": FastEngine,
    "vllm": RealEngine,
    "vllm-oom": RealEngineOutOfMemory,
}
