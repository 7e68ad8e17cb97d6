"""Infers the first rows of a job in this process, without Prefect or Ray; keeps no run."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from prefect_raybatch.errors import (
    CorruptRun,
    EngineFailure,
    InsufficientResources,
    SourceError,
)
from prefect_raybatch.model.pinned import PinnedModel
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.stages.block import Row, Tokenizer
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.cluster.pipeline import Pipeline
    from prefect_raybatch.ledger.ledger import Ledger
    from prefect_raybatch.ledger.plan_tables import Shards
    from prefect_raybatch.ledger.records import Plan
    from prefect_raybatch.sizing.sizes import Capacity, Sizing
    from prefect_raybatch.stages.engine import EngineLaunch

PREVIEW_KEY = "preview"
START_PHASE, ANSWERS_PHASE = "engine's start", "answers"  # keys of `Preview.seconds`


@dataclass(frozen=True)
class PreviewedPrompt:
    """The prompt of one row: the text that the model gets, and its number of tokens.

    `trouble` says why the row makes no prompt, "" if it makes one.
    """

    row: int
    text: str
    tokens: int
    trouble: str = ""


@dataclass(frozen=True)
class Preview:
    """Prompts and answers of a job's first rows.

    `columns` are (name, type) of the input; `asked` are the columns that the prompt uses. `answers`
    and `failed` are rows of the result and of the quarantine; both are empty if only prompts were
    made. `seconds` maps each step (plan, prompts, engine's start, answers) to its duration.
    `larger` is the preview with the larger model of a cascade.
    """

    job: str
    columns: tuple[tuple[str, str], ...]
    asked: tuple[str, ...]
    prompts: tuple[PreviewedPrompt, ...]
    answers: tuple[Row, ...]
    failed: tuple[Row, ...]
    seconds: dict[str, float]
    larger: Preview | None = None


def preview_spec(
    spec: RunSpec,
    ledger: Ledger,
    plan: Plan,
    shards: Shards,
    size: Sizing,
    clock: PhaseClock,
    answers: bool,
    engine: type | None,
) -> Preview:
    """Send all rows of a planned run through every stage here; return prompts and answers.

    `clock` was started before planning. Without `answers`, stops after the prompts are made.
    `engine` replaces the engine stage in tests.
    """
    from prefect_raybatch.cluster.pipeline import Pipeline, stage_of
    from prefect_raybatch.ledger.plan_tables import decode_schema

    schema = decode_schema(plan.input_schema)
    attempt = uuid.uuid4().hex
    stage = engine or stage_of(spec.engine.model.endpoint, batch=False)
    pipeline = Pipeline(spec, plan, shards, ledger.store, attempt, size, engine=stage)
    clock.took("plan")
    read = _read(pipeline, plan, shards)
    prepare, launch, finish = pipeline.stages(False)
    prepared = [prepare(table) for table in read]
    clock.took("prompts")
    preview = Preview(
        job=spec.name,
        columns=tuple((name, str(schema.field(name).type)) for name in schema.names),
        asked=tuple(name for name in spec.prompt.columns if name in schema.names),
        prompts=tuple(p for table in prepared for p in _prompts(pipeline.model, table)),
        answers=(),
        failed=(),
        seconds=clock.seconds,
    )
    if not answers or launch is None:
        return preview
    tables = _answered(prepared, launch, stage, clock)
    rows: dict[str, list[Row]] = {"data": [], "quarantine": []}
    for table in tables:
        for kind, finished in _finished(ledger, plan, shards, finish(table)):
            rows[kind] += finished
    return replace(preview, answers=tuple(rows["data"]), failed=tuple(rows["quarantine"]))


def _read(pipeline: Pipeline, plan: Plan, shards: Shards) -> list[pa.Table]:
    """Return the rows of all shards as blocks; raise `SourceError` if one cannot be read."""
    from prefect_raybatch.ledger.records import Unit
    from prefect_raybatch.stages.block import is_lost, losses

    units = [Unit(shard, 0, shards[shard].rows) for shard in range(plan.shards)]
    read = [t for task in pipeline.read_tasks(units, False) for t in pipeline.reader.read(task)]
    for table in read:
        if is_lost(table):
            raise SourceError(losses(table)[0].message)
    return read


def _answered(
    prepared: Sequence[pa.Table], launch: EngineLaunch, engine: type, clock: PhaseClock
) -> list[pa.Table]:
    """Start an engine, return the blocks with its answers, and close it.

    Raises `EngineFailure`, or the engine's error, if a block was not answered.
    """
    from prefect_raybatch.stages.block import is_lost, losses

    quiet = {"use_tqdm_on_load": False}  # progress bars would be printed between the tables
    started = engine(replace(launch, arguments={**quiet, **launch.arguments}))
    try:
        clock.took(START_PHASE)
        tables = [started(table) for table in prepared]
        clock.took(ANSWERS_PHASE)
    finally:
        started.close()  # the larger model of a cascade may need its GPU
    for table in tables:
        if is_lost(table):
            loss = losses(table)[0]
            raise loss.to_error() if loss.fatal else EngineFailure(loss.message)
    return tables


def check_gpus_here(spec: SizeSpec, capacity: Capacity) -> None:
    """Raise `InsufficientResources` if an engine takes more GPUs than this machine has."""
    needed = spec.gpus_per_replica
    if spec.device_for(capacity.gpus) == "gpu" and needed > capacity.gpus:
        raise InsufficientResources(
            f"an engine needs {counted(needed, 'GPU')}, and this machine, on which a preview runs, "
            f"has {capacity.gpus:g}. Run it on a machine with enough GPUs, or add --no-answers"
        )


def _finished(
    ledger: Ledger, plan: Plan, shards: Shards, table: pa.Table
) -> Iterator[tuple[str, list[Row]]]:
    """Commit the shards of a finished block; yield ("data" or "quarantine", rows) per piece."""
    from prefect_raybatch.ledger.layout import POSITION_COLUMN
    from prefect_raybatch.ledger.records import Receipt
    from prefect_raybatch.result.pieces import read_pieces
    from prefect_raybatch.stages.finish import RECEIPT

    for text in table[RECEIPT].to_pylist():
        receipt = Receipt.from_json(text)
        if receipt.lost is not None:
            raise EngineFailure(receipt.lost.message)
        commit = ledger.commit(plan, shards[receipt.shard].rows, [receipt])
        if commit is None:
            raise CorruptRun(f"preview: some rows of shard {receipt.shard} have no answer")
        for kind, piece, _ in read_pieces(ledger.store, commit):
            yield kind, piece.drop_columns([POSITION_COLUMN]).to_pylist()


def _prompts(model: PinnedModel, table: pa.Table) -> list[PreviewedPrompt]:
    from prefect_raybatch.ledger.layout import POSITION_COLUMN
    from prefect_raybatch.model import pinned as models
    from prefect_raybatch.stages.block import is_passthrough, load_tokenizer
    from prefect_raybatch.stages.columns import CHAT, ERROR, TOKENS

    if is_passthrough(table):
        return []
    asked = CHAT
    shown: Callable[[Any], tuple[str, int]] = _of_messages
    if CHAT not in table.column_names:
        asked, shown = TOKENS, partial(_of_tokens, load_tokenizer(*models.tokenizer_place(model)))
    prompts = []
    columns = (table[name].to_pylist() for name in (POSITION_COLUMN, asked, ERROR))
    for at, value, error in zip(*columns, strict=True):
        trouble = f"{error['kind']}: {error['message']}" if error else ""
        text, tokens = ("", 0) if error else shown(value)
        prompts.append(PreviewedPrompt(at, text, tokens, trouble))
    return prompts


def _of_tokens(tokenizer: Tokenizer, ids: list[int]) -> tuple[str, int]:
    return tokenizer.decode(ids), len(ids)


def _of_messages(text: str) -> tuple[str, int]:
    """Return (JSON messages for a hosted model as lines of text, estimated tokens)."""
    from prefect_raybatch.stages.endpoint.body import prompt_estimate

    messages = json.loads(text)
    lines = "\n".join(f"{one['role']}: {_shown(one['content'])}" for one in messages)
    return lines, prompt_estimate(messages)


def _shown(content: object) -> str:
    """Return a message's content as text, with [image] in place of each image."""
    from prefect_raybatch.stages.images.rows import is_image

    if not isinstance(content, list):
        return str(content)
    return " ".join("[image]" if is_image(p) else str(p.get("text", p)) for p in content)


class PhaseClock:
    """A stopwatch for consecutive steps; `seconds` has the duration of each, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._at = time.monotonic()

    def took(self, what: str) -> None:
        """End the current step, record its duration under the name `what`, and begin the next."""
        now = time.monotonic()
        self.seconds[what] = round(now - self._at, 1)
        self._at = now
