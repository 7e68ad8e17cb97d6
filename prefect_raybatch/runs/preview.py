"""Answers the first rows of a job in this process: without Prefect, Ray or a run to keep."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from prefect_raybatch.compile.job import cluster_spec, compile_planned
from prefect_raybatch.compile.sizes import size_spec
from prefect_raybatch.errors import (
    ConfigError,
    CorruptRun,
    EngineFailure,
    EngineStartError,
    InsufficientResources,
    SourceError,
)
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.cluster import LOCAL
from prefect_raybatch.job.edits import edited
from prefect_raybatch.job.precision import with_precision
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.ledger.ledger import Ledger
    from prefect_raybatch.ledger.plan_tables import Shards
    from prefect_raybatch.ledger.records import Plan
    from prefect_raybatch.sizing.sizes import Capacity

PREVIEW_KEY = "preview"


@dataclass(frozen=True)
class PreviewedPrompt:
    """What one row asks: the prompt as the model gets it and its tokens; or why it asks nothing."""

    row: int
    text: str
    tokens: int
    trouble: str = ""


@dataclass(frozen=True)
class Preview:
    """`columns`: (name, type) of the input, `asked` those that make the prompts; `answers` and
    `failed`: rows of the result and of the quarantine, empty if no engine was asked; `seconds` by
    phase."""

    job: str
    columns: tuple[tuple[str, str], ...]
    asked: tuple[str, ...]
    prompts: tuple[PreviewedPrompt, ...]
    answers: tuple[dict[str, Any], ...]
    failed: tuple[dict[str, Any], ...]
    seconds: dict[str, float]


def preview_rows(
    job: BatchJob, rows: int = 5, answers: bool = True, engine: type | None = None
) -> Preview:
    """Send the first `rows` rows through every stage of the job, in this process, on one engine.

    Nothing is kept, published, or reused from earlier runs. Raises like `plan_run` for a job that
    cannot run, `InsufficientResources` if this machine has no GPU for its engine,
    `EngineStartError` or `EngineFailure` if the engine does not start or dies. `engine` replaces
    the engine stage in tests.
    """
    if rows < 1:
        raise ConfigError(f"rows {rows}: at least one row is shown")
    with tempfile.TemporaryDirectory(prefix="raybatch-") as folder:
        return _preview(_small(job, rows, folder), answers, engine)


def _small(job: BatchJob, rows: int, folder: str) -> BatchJob:
    """Return the job restricted to its first rows, with one local engine, without quantization
    trials, and with its result in `folder`."""
    limit = min(rows, job.source.limit or rows)
    changes: dict[str, Any] = {
        "source.limit": limit,
        "source.rows_per_shard": limit,
        "engine.replicas": 1,
        "engine.engines_per_gpu": 1,
        "engine.order": "input" if job.engine.order == "input" else "auto",
        "output.uri": folder,
        "output.options": {},
        "output.publish": [],
        "output.keep_answers": None,
        "limits.max_cost": None,
        "cluster": {"address": LOCAL},
        "reuse": None,
    }
    return with_precision(edited(job, changes, "the job of a preview"), {})


def _preview(job: BatchJob, answers: bool, made: type | None) -> Preview:
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster import sizes as sized
    from prefect_raybatch.cluster.pipeline import Pipeline
    from prefect_raybatch.ledger.ledger import Ledger
    from prefect_raybatch.ledger.plan_tables import decode_schema
    from prefect_raybatch.ledger.records import Unit
    from prefect_raybatch.runs.plan_run import plan_run
    from prefect_raybatch.runs.run import load_run, run_store
    from prefect_raybatch.stages.block import is_lost, losses

    clock = _Clock()
    have = cluster.this_machine(cluster_spec(job))
    if answers:
        _check_here(size_spec(job), have)
    run = plan_run(job, PREVIEW_KEY)
    store = run_store(job.output, PREVIEW_KEY)
    ledger = Ledger(store)
    plan, shards = load_run(ledger, run)
    spec = compile_planned(job, plan)
    schema = decode_schema(plan.input_schema)
    size = sized.for_attempt(spec.sizes, plan, have)
    pipeline = Pipeline(spec, plan, shards, store, uuid.uuid4().hex, size)
    clock.took("plan")
    units = [Unit(shard, 0, shards[shard].rows) for shard in range(plan.shards)]
    read = [t for task in pipeline.read_tasks(units, False) for t in pipeline.reader.read(task)]
    prepare, launch, finish = pipeline.stages(False)
    prepared = []
    for table in read:
        if is_lost(table):
            raise SourceError(losses(table)[0].message)
        prepared.append(prepare(table))
    clock.took("prompts")
    found = Preview(
        job=job.name,
        columns=tuple((name, str(schema.field(name).type)) for name in schema.names),
        asked=tuple(name for name in spec.prompt.columns if name in schema.names),
        prompts=tuple(p for table in prepared for p in _prompts(pipeline.model, table)),
        answers=(),
        failed=(),
        seconds=clock.seconds,
    )
    if not answers or launch is None:
        return found
    # No bars of files that are read, in the midst of what is shown.
    quiet = {"use_tqdm_on_load": False}
    launch = replace(launch, arguments={**quiet, **launch.arguments})
    engine = (made or pipeline.engine)(launch)
    clock.took("engine's start")
    tables = [engine(table) for table in prepared]
    clock.took("answers")
    for table in tables:
        if is_lost(table):
            why = losses(table)[0]
            raise (EngineStartError if why.fatal else EngineFailure)(why.message)
    kinds: dict[str, list[dict[str, Any]]] = {"data": [], "quarantine": []}
    for table in tables:
        for kind, rows in _finished(ledger, plan, shards, finish(table)):
            kinds[kind] += rows
    return replace(found, answers=tuple(kinds["data"]), failed=tuple(kinds["quarantine"]))


def _check_here(spec: SizeSpec, have: Capacity) -> None:
    """Raise `InsufficientResources` if an engine takes more GPUs than this machine has."""
    takes = spec.gpus_per_replica
    if spec.device_for(have.gpus) == "gpu" and takes > have.gpus:
        raise InsufficientResources(
            f"an engine takes {counted(takes, 'GPU')}, and this machine, where a preview asks it, "
            f"has {have.gpus:g}; do it where the GPUs are, or add --no-answers"
        )


def _finished(
    ledger: Ledger, plan: Plan, shards: Shards, table: pa.Table
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (kind, rows as in the result) of what a block became."""
    from prefect_raybatch.ledger.layout import POSITION
    from prefect_raybatch.ledger.records import Receipt
    from prefect_raybatch.result.pieces import read_pieces
    from prefect_raybatch.stages.finish import RECEIPT

    for text in table[RECEIPT].to_pylist():
        receipt = Receipt.from_json(text)
        if receipt.lost is not None:
            raise EngineFailure(receipt.lost.message)
        commit = ledger.commit(plan, shards[receipt.shard].rows, [receipt])
        if commit is None:
            raise CorruptRun(f"shard {receipt.shard} was not answered whole")
        for kind, piece, _ in read_pieces(ledger.store, commit):
            yield kind, piece.drop_columns([POSITION]).to_pylist()


def _prompts(model: dict[str, Any], table: pa.Table) -> list[PreviewedPrompt]:
    from prefect_raybatch.ledger.layout import POSITION
    from prefect_raybatch.model import pinned as models
    from prefect_raybatch.stages.block import load_tokenizer, passes_by
    from prefect_raybatch.stages.columns import ERROR, TOKENS

    if passes_by(table):
        return []
    tokenizer = load_tokenizer(*models.tokenizer_place(model))
    made = []
    columns = (table[name].to_pylist() for name in (POSITION, TOKENS, ERROR))
    for at, ids, error in zip(*columns, strict=True):
        trouble = f"{error['kind']}: {error['message']}" if error else ""
        text = "" if error else tokenizer.decode(ids)
        made.append(PreviewedPrompt(at, text, 0 if error else len(ids), trouble))
    return made


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._at = time.monotonic()

    def took(self, what: str) -> None:
        now = time.monotonic()
        self.seconds[what] = round(now - self._at, 1)
        self._at = now
