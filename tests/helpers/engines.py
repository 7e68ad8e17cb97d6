"""Stand-ins at the engine's seam: a block callable for the pipeline, and a stepped engine."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.stages.block import Failure, is_passthrough, lost_block_like
from prefect_raybatch.stages.columns import (
    ERROR,
    ERROR_TYPE,
    PARAMS,
    POSITION,
    PREPARE_SPENT,
    TOKENS,
)
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage
from prefect_raybatch.stages.vllm.stepper import Completion, Request

HIDDEN = 256  # of the bundled model
FAILS = 13  # the id of the row that the fake engine refuses


class FakeEngine:
    """Takes the engine stage's place in a pipeline: answers `answer ID`, refuses one row."""

    FAILS = FAILS

    def __init__(self, launch: EngineLaunch):
        self.spec = self.launch = launch

    def __call__(self, table: pa.Table) -> pa.Table:
        if is_passthrough(table):
            return table
        errors = table[ERROR].to_pylist()
        numbers = self.numbers(table)
        for i, number in enumerate(numbers):
            if self.refused(number) and errors[i] is None:
                errors[i] = Failure("engine", "ValueError", "refused").to_dict()
        return with_answers(table, errors, [self.text(number) for number in numbers])

    def numbers(self, table: pa.Table) -> list[int]:
        """The rows' numbers, by which they are answered."""
        # The asks of a run that keeps answers hold only the columns that the prompt is made of.
        return table["id" if "id" in table.column_names else POSITION].to_pylist()

    def refused(self, number: int) -> bool:
        return number == self.FAILS

    def text(self, number: int) -> str:
        return f"answer {number}"

    def close(self) -> None:
        """Nothing is held."""


class NotedEngine(FakeEngine):
    """Notes in the file $ENGINE_NOTES when it is started, and when another run takes it over."""

    def __init__(self, launch: EngineLaunch):
        super().__init__(launch)
        self.note("started")

    def take_over(self, launch: EngineLaunch) -> None:
        self.spec = self.launch = launch
        self.note("taken over")

    def note(self, what: str) -> None:
        with open(self.spec.env["ENGINE_NOTES"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, "pid": os.getpid(), "at": time.time()}) + "\n")


def with_answers(
    table: pa.Table, errors: Sequence[dict[str, str] | None], texts: Sequence[str]
) -> pa.Table:
    """The block as the real engine stage gives it on, when the engine gives these answers."""
    good = [text for text, error in zip(texts, errors, strict=True) if error is None]
    rows = table.num_rows
    for name, column in {
        TOKENS: pa.array([[1, 2, 3]] * rows, pa.list_(pa.int32())),
        PARAMS: pa.array([None] * rows, pa.string()),
        ERROR: pa.array(list(errors), ERROR_TYPE),
        PREPARE_SPENT: pa.array([0.25] * rows, pa.float64()),
    }.items():
        if name in table.column_names:
            table = table.drop_columns([name])
        table = table.append_column(name, column)
    return _Answering(Stepped(lambda requests: [completion(text) for text in good]))(table)


class _Answering(EngineStage):
    def __init__(self, engine: Stepped, sampling: dict[str, Any] | None = None):
        self.launch, self.engine = EngineLaunch({}, sampling or {}, {}), engine

    def ready(self) -> Stepped:
        return self.engine


def completion(text: str, finish: str = "stop") -> Completion:
    return Completion([[5]], [text], finish, prompt_tokens=3, cached_tokens=1)


class Stepped:
    """A `SteppedEngine` whose answers a function gives; it may raise."""

    def __init__(self, answer: Callable[[Sequence[Request]], list[Completion]]):
        self.answer = answer
        self.seen: list[list[Request]] = []
        self.rows = self.refused = 0
        self.died: str | None = None
        self.closed = False

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        self.seen.append(list(requests))
        found = self.answer(requests)
        self.rows += len(found)
        self.refused += sum(completion.error is not None for completion in found)
        return found

    def stats(self) -> dict[str, Any]:
        return {"rows": self.rows, "refused": self.refused, "died": self.died}

    def close(self) -> None:
        self.closed = True

    def load(self) -> dict[str, float]:
        return {}


class Factory:
    """Takes `SteppedEngine`'s place: each construction does the next thing of `plan`, an error to
    raise or an answering function."""

    def __init__(self, *plan: Any):
        self.plan = list(plan)
        self.arguments: list[dict[str, Any]] = []
        self.made: list[Stepped] = []

    def __call__(self, arguments: dict[str, Any], hang_seconds: float | None = None) -> Stepped:
        self.hang_seconds = hang_seconds
        self.arguments.append(arguments)
        step = self.plan.pop(0)
        if isinstance(step, BaseException):
            raise step
        self.made.append(Stepped(step))
        return self.made[-1]


class VectorEngine(EngineStage):
    """The engine stage of a task that pools: a prompt's vector is its length and its adapter's
    number."""

    def __init__(self, launch: EngineLaunch):
        self.launch, self._adapters = launch, launch.adapted.copy_to_node()

    def ready(self) -> Any:
        return Stepped(lambda requests: [vector_of(request) for request in requests])

    def close(self) -> None:
        """Nothing is held."""


class WideVectorEngine(VectorEngine):
    """The same, as wide as the vectors of the bundled model."""

    def ready(self) -> Any:
        return Stepped(lambda requests: [widened(vector_of(request)) for request in requests])


def widened(completion: Completion) -> Completion:
    vector = np.asarray(completion.vector)
    return replace(completion, vector=np.pad(vector, (0, HIDDEN - len(vector))))


def vector_of(request: Request) -> Completion:
    numbers = [len(request.prompt_token_ids), request.adapter[1] if request.adapter else 0]
    length = len(request.prompt_token_ids)
    return Completion([], prompt_tokens=length, vector=np.array(numbers, np.float32))


class FineEngine(FakeEngine):
    """Refuses no row."""

    FAILS = -1


class NoEngine:
    """Nobody may start it."""

    def __init__(self, launch: EngineLaunch) -> None:
        raise AssertionError("an engine was started")


class CrashingEngine(FakeEngine):
    """Ends its process, without a word, on the block that holds one row."""

    AT = 4
    FAILS = -1

    def __call__(self, table: pa.Table) -> pa.Table:
        if not is_passthrough(table) and self.AT in table["id"].to_pylist():
            os._exit(1)
        return super().__call__(table)


class PassedOnEngine(CrashingEngine):
    """Goes from one run to the next; notes each start and each run in the folder `PLACES` of its
    environment, and answers nothing before `ENGINES` of them have started."""

    def __init__(self, launch: EngineLaunch):
        super().__init__(launch)
        self._note("start")

    def __call__(self, table: pa.Table) -> pa.Table:
        env, until = self.spec.env, time.monotonic() + 120
        while len(list(Path(env["PLACES"]).glob("start-*"))) < int(env["ENGINES"]):
            assert time.monotonic() < until, "an engine does not start"
            time.sleep(0.05)
        return super().__call__(table)

    def take_over(self, launch: EngineLaunch) -> None:
        self.spec = self.launch = launch
        self._note("next")

    def _note(self, what: str) -> None:
        with open(os.path.join(self.spec.env["PLACES"], f"{what}-{os.getpid()}"), "a") as file:
            file.write(f"{self.spec.attempt}\n")


class Fp8Engine(FakeEngine):
    """Notes, in the file that the environment names, the precision it was made for; in fp8 it
    answers otherwise to every row that the environment says, and starts only where it says so."""

    FAILS = -1
    NOTES, EVERY, REFUSES = "FP8_NOTES", "FP8_EVERY", "FP8_REFUSES"

    def __init__(self, launch: EngineLaunch):
        super().__init__(launch)
        self.fp8 = launch.arguments.get("quantization") == "fp8"
        self.kv = launch.arguments.get("kv_cache_dtype") == "fp8"
        with open(launch.env[self.NOTES], "a") as notes:
            notes.write(f"{'fp8' if self.fp8 else '-'} {'fp8' if self.kv else '-'}\n")

    def __call__(self, table: pa.Table) -> pa.Table:
        if is_passthrough(table):
            return table
        env = self.spec.env
        if self.fp8 and (kind := env.get(self.REFUSES)):
            return lost_block_like(table, Loss(kind, "no kernel for fp8", fatal=True))
        every = int(env.get(self.EVERY) or 0) if self.fp8 else 0
        texts = [
            f"other {i}" if every and i % every == 0 else f"answer {i}"
            for i in table["id"].to_pylist()
        ]
        return with_answers(table, table[ERROR].to_pylist(), texts)


class Fp8Vectors(Fp8Engine):
    """The same of a task that pools: a vector of two numbers a prompt, which is turned in fp8."""

    TURNED = 0.3  # by how much; the others too little to tell

    def __call__(self, table: pa.Table) -> pa.Table:
        if is_passthrough(table):
            return table
        stage = _Answering(Stepped(self.vectors), dict(self.spec.sampling))
        return stage(table)

    def vectors(self, requests: Sequence[Request]) -> list[Completion]:
        """By the tokens of each prompt."""
        every = int(self.spec.env.get(self.EVERY) or 0) if self.fp8 else 0
        made = []
        for request in requests:
            number = zlib.crc32(bytes(str(list(request.prompt_token_ids)), "ascii"))
            turn = self.TURNED if every and number % every == 0 else 0.01 * self.fp8
            angle = number % 7 / 5 + turn
            made.append(Completion([], vector=np.array([np.cos(angle), np.sin(angle)], np.float32)))
        return made
