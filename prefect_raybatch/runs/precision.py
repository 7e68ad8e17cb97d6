"""Decides before a run's first shard whether a quantization is good enough (`try-fp8`)."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.cluster.warm import ActorOptions
from prefect_raybatch.driver.cost import CostMeter
from prefect_raybatch.errors import (
    ConfigError,
    CorruptRun,
    EngineFailure,
    EngineStartError,
    InsufficientResources,
    RayBatchError,
)
from prefect_raybatch.ledger.increments import TakenPrecision, increment_of, requests_ledger
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import Shards, decode_schema
from prefect_raybatch.ledger.precision import (
    Disagreement,
    PrecisionNote,
    PrecisionTry,
    read_precision,
    record_precision,
)
from prefect_raybatch.ledger.records import Plan, Unit
from prefect_raybatch.report.report import settings_text
from prefect_raybatch.sizing.agreement import bonferroni_confidence, lower_bound, trial_rows
from prefect_raybatch.spec.result import OutputSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.storage import Store, open_store
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.cluster.sharing import Tenant
    from prefect_raybatch.cluster.trial_actor import AskSample
    from prefect_raybatch.sizing.sizes import Capacity, Sizing
    from prefect_raybatch.stages.trial import RowOutcome, SampledRow, TrialStages

log = logging.getLogger(__name__)

SHARDS_SAMPLED = 64  # shards from which sampled rows are drawn; each is read whole
KEPT_ROWS, KEPT_TEXT = 20, 500  # disagreeing rows recorded; characters of each answer


def decided_precision(
    spec: RunSpec,
    plan: Plan,
    shards: Shards,
    ledger: Ledger,
    capacity: Capacity,
    user: Tenant,
    attempt: str,
    engine: type | None = None,
    meter: CostMeter | None = None,
    halted: Callable[[], RayBatchError | None] | None = None,
) -> Mapping[str, str]:
    """Return the engine arguments of the precision that a run uses; {} for the unquantized model.

    A decision on record holds. Without one, the precision is decided and recorded:
    1. If the run retries failed rows or reuses answers, it takes over the decision of that other
       run, because answers of two precisions must not mix.
    2. Otherwise it infers a sample of rows without quantization and in each precision to try, until
       one agrees well enough.

    `attempt` is the id of this attempt, `user` its registration with the cluster. `engine` replaces
    the engine stage in tests. `meter` counts the GPU time of the trials. `halted` returns the error
    if the run must stop.

    Raises `CorruptRun` if shards are committed without a decision, and `ConfigError` if the input
    has too few rows to show the required agreement. If the unquantized model does not work, raises
    `EngineFailure` or the error with which a shard of the sample failed. If a trial is interrupted,
    for example by a lost node, raises an error that is worth a retry, and records nothing.
    """
    note = read_precision(ledger.store)
    if note is None:
        if ledger.committed(plan).any():
            raise CorruptRun(
                f"{ledger.store.uri}: shards are committed, but precision.json, which records "
                "their precision, is missing. Restore it, or run the job under a new run key"
            )
        note = _of_parent(spec.output, plan) or _of_plan(plan)
        if note is None:
            bench = SampleBench(spec, plan, shards, ledger, capacity, user, attempt, engine)
            bench.meter, bench.halted = meter or bench.meter, halted or bench.halted
            note = bench.decide()
        note = record_precision(ledger.store, note)
    log.info("precision: %s", decision_text(note))
    return note.decided


def decision_text(note: PrecisionNote) -> str:
    """Return the decision as a line of text: the precision, and the agreement of each one tried."""
    if not note.tries:
        return f"{settings_text(note.decided)}, as decided in run {note.by}"
    told = []
    for one in note.tries:
        name = settings_text(one.tried)
        if one.error:
            told.append(f"{name} did not work: {one.error}")
        else:
            rows = counted(one.rows, "row")
            told.append(f"{name} agreed in {one.agreed:,} of {rows}, at least {one.bound:.2%}")
    least = f"limits.min_agreement {note.min_agreement:g}"
    return f"{settings_text(note.decided)}; {'; '.join(told)} ({least})"


def _of_parent(output: OutputSpec, plan: Plan) -> PrecisionNote | None:
    """Return the decision on the precision of the run whose failed rows this one retries.

    Returns None if it is no retry, or if that run has no decision.
    """
    if plan.parent is None:
        return None
    root = open_store(output.uri, dict(output.options) or None)
    found = precision_of(root.sub(plan.parent))
    return None if found is None else replace(found, by=plan.parent, tries=(), itself=None)


def _of_plan(plan: Plan) -> PrecisionNote | None:
    """Return the precision decision that a plan took over from another run; None if it has none."""
    increment = increment_of(plan)
    if increment is None or increment.precision is None:
        return None
    taken = increment.precision
    return PrecisionNote(taken.decided, taken.min_agreement, (), taken.by)


def precision_of(store: Store) -> PrecisionNote | None:
    """Return the precision that a run uses, as it decided or took over; None if there is no record.

    A decision of its requests phase counts, too.
    """
    plan = Ledger(store).load_plan()
    asks = read_precision(requests_ledger(store).store)
    return asks or read_precision(store) or (None if plan is None else _of_plan(plan))


def taken_precision(
    tries: Sequence[Mapping[str, str]], earlier: Sequence[Store], parent: Store | None
) -> TakenPrecision | None:
    """Return the precision that a new run takes over from another run; None to decide anew.

    `tries` are the engine arguments of the precisions to try. Without any (no `try-fp8`), returns
    None. `parent` is the run whose failed rows are retried: if it is set, only its decision counts.
    `earlier` are the runs whose answers are reused. Without a `parent`, the first decision among
    them counts.

    Raises `CorruptRun` if there are `earlier` runs, no `parent`, and no decision.
    """
    stores = [parent] if parent is not None else list(earlier)
    if not tries or not stores:
        return None
    for store in stores:
        if (found := precision_of(store)) is not None:
            key = store.uri.rpartition("/")[2]
            return TakenPrecision(dict(found.decided), found.min_agreement, key)
    if parent is not None:
        return None
    raise CorruptRun(
        f"{stores[0].uri}: its answers are to be reused, but precision.json, which records their "
        "precision, is missing. Restore it, or run the job without reuse"
    )


class SampleBench:
    """Infers a random sample of a run's rows with several engine settings; compares the answers.

    The sample has `rows` rows, by default as many as limits.min_agreement needs.
    """

    def __init__(
        self,
        spec: RunSpec,
        plan: Plan,
        shards: Shards,
        ledger: Ledger,
        capacity: Capacity,
        user: Tenant,
        attempt: str,
        engine: type | None,
        rows: int | None = None,
    ):
        self.spec, self.plan, self.shards, self.ledger = spec, plan, shards, ledger
        self.have, self.user, self.attempt, self.engine = capacity, user, attempt, engine
        self.meter = CostMeter()
        self.halted: Callable[[], RayBatchError | None] = user.halted
        if rows is None:
            rows = trial_rows(spec.engine.tries, spec.limits.min_agreement, plan.rows)
        self.sample = drawn_rows(shards, rows, plan.hash)

    def decide(self) -> PrecisionNote:
        """Try one precision after the other until one agrees well enough; return the decision.

        If none does, the decision is the unquantized model.
        """
        began = time.monotonic()
        tries, least = self.spec.engine.tries, self.spec.limits.min_agreement
        rows = sum(map(len, self.sample.values()))
        log.info("precision: asking %s both ways before the run starts", counted(rows, "row"))
        with self.sample_engine(self.spec.decide(precision={}), _deciding({})) as ask:
            stored, again = ask(False), ask(True)
        both, same, _ = _compared(stored, again)
        confidence = bonferroni_confidence(len(tries))
        made: list[PrecisionTry] = []
        decided: Mapping[str, str] = {}
        for tried in tries:
            spec = self.spec.decide(precision=tried)
            made.append(self.tried(spec, tried, stored, confidence))
            if made[-1].bound >= least:
                decided = tried
                break
        return PrecisionNote(
            decided=dict(decided),
            min_agreement=least,
            tries=tuple(made),
            by=self.attempt,
            itself=round(same / both, 6) if both else None,
            seconds=round(time.monotonic() - began, 1),
        )

    def tried(
        self,
        spec: RunSpec,
        tried: Mapping[str, str],
        stored: Mapping[SampledRow, RowOutcome],
        confidence: float,
    ) -> PrecisionTry:
        """Infer the sample with an engine of `spec`; compare the outcomes with those in `stored`.

        `tried` are the settings in which `spec` differs from the unquantized model or the unchanged
        job, whose outcomes `stored` has. They are only recorded in the result. The agreement's
        lower bound holds with `confidence` (0 to 1). If the engine does not work, the result's
        `error` says why.
        """
        began = time.monotonic()
        try:
            with self.sample_engine(spec, _deciding(tried)) as ask:
                found = ask(False)
        except (ConfigError, EngineStartError, EngineFailure, InsufficientResources) as error:
            log.warning(
                "precision: %s does not work on this cluster: %s", settings_text(tried), error
            )
            text = f"{type(error).__name__}: {error}"[:KEPT_TEXT]
            seconds = round(time.monotonic() - began, 1)
            return PrecisionTry(dict(tried), 0, 0, 0.0, confidence, (), text, seconds)
        rows, agreed, differ = _compared(stored, found)
        return PrecisionTry(
            tried=dict(tried),
            rows=rows,
            agreed=agreed,
            bound=round(lower_bound(agreed, rows, confidence), 6),
            confidence=round(confidence, 6),
            disagreeing=tuple(
                Disagreement(self._number(row), *_both(stored[row], found[row]))
                for row in differ[:KEPT_ROWS]
            ),
            seconds=round(time.monotonic() - began, 1),
        )

    def _number(self, row: SampledRow) -> int:
        """Return the number that a sampled row, (shard, position), has in the whole input."""
        return self.shards[row[0]].start + row[1]

    @contextmanager
    def sample_engine(self, spec: RunSpec, why: str) -> Iterator[AskSample]:
        """Start one engine of `spec`; yield a function that infers the sample with it.

        The engine shares its GPUs with no other, and sampling is greedy. `why` ends the text that
        is shown while the run waits.
        """
        from prefect_raybatch.cluster import connect as cluster
        from prefect_raybatch.cluster.trial_actor import trial_on_worker

        sizes = spec.sizes.with_one_engine()
        spec = replace(spec, sampling=spec.sampling.greedy(), sizes=sizes)
        size = sized.for_attempt(sizes, self.plan, self.have)
        cluster.check_fit(sizes, self.have, size.pool)
        stages, resources, engine = self._stages(spec, size)
        with ExitStack() as stack:
            stack.enter_context(cluster.admitted(sizes, self.have, size.pool, self.user))
            stack.callback(self.user.waits, "")
            self.user.waits(f"asking a sample of the rows first, {why}")
            gpus = size.pool.gpus_a_replica if size.pool.device == "gpu" else 0
            stack.enter_context(self.meter.holding(gpus))
            yield stack.enter_context(trial_on_worker(engine, stages, resources, self.halted))

    def _stages(self, spec: RunSpec, size: Sizing) -> tuple[TrialStages, ActorOptions, type]:
        from prefect_raybatch.cluster.pipeline import Pipeline
        from prefect_raybatch.stages.engine import EngineStage
        from prefect_raybatch.stages.read import ShardReader
        from prefect_raybatch.stages.trial import TrialStages
        from prefect_raybatch.stages.vllm.forking import CORE_APART

        store, options = self.ledger.store, dict(spec.read.options)
        engine = self.engine or EngineStage
        pipeline = Pipeline(spec, self.plan, self.shards, store, self.attempt, size, engine=engine)
        prepare, launch, finish = pipeline.stages(False)
        if launch is None:
            raise RayBatchError("this run starts no engine, so no precision can be tried")
        reader = ShardReader(
            self.ledger.files(self.plan),
            decode_schema(self.plan.input_schema),
            store if self.plan.snapshot else None,
            {} if self.plan.snapshot else options,
        )
        read = []
        for shard, positions in self.sample.items():
            held = self.shards[shard]
            (task,) = reader.tasks([(Unit(shard, 0, held.rows), held.start)])
            read.append((reader.bind(task), positions))
        answer = replace(
            finish.spec, postprocess=None, types=None, columns=(), extras=(), probabilities=False
        )
        finish = replace(finish, spec=answer, sampling=replace(finish.sampling, logprobs=None))
        model, parsing = spec.engine.model, answer.parsing
        env = launch.env
        if model.pools and size.pool.device == "gpu":
            # The trial's actor is not restarted, so it must outlive a row that ends the engine.
            env = {**env, CORE_APART: "1", **model.env}
        stages = TrialStages(
            read=read,
            prepare=prepare,
            launch=replace(launch, done=None, env=env),
            finish=finish,
            # Different reasoning may lead to the same answer.
            ignored=() if parsing is None else (parsing.reasoning_column,),
            pooled=(model.task, answer.column) if model.pools else None,
        )
        return stages, pipeline.engine_resources(), pipeline.engine


def _deciding(arguments: Mapping[str, str]) -> str:
    return f"to decide on the precision ({settings_text(arguments)})"


def drawn_rows(shards: Shards, sample: int, seed: str) -> dict[int, list[int]]:
    """Return {shard: ascending positions} of `sample` random rows from random shards.

    Shards are drawn until there are SHARDS_SAMPLED (64) or more with at least `2 * sample` rows in
    all, or until all are drawn; then rows are drawn from them. Equal `seed`s draw equal rows.
    """
    draw = random.Random(seed)
    order = draw.sample(range(len(shards)), len(shards))
    sizes = np.diff(shards.starts)
    chosen: list[int] = []
    held = 0
    for shard in order:
        if len(chosen) >= SHARDS_SAMPLED and held >= 2 * sample:
            break
        chosen.append(shard)
        held += int(sizes[shard])
    places = [(shard, at) for shard in sorted(chosen) for at in range(int(sizes[shard]))]
    found: dict[int, list[int]] = {}
    for shard, at in sorted(draw.sample(places, min(sample, len(places)))):
        found.setdefault(shard, []).append(at)
    return found


def _compared(
    one: Mapping[SampledRow, RowOutcome], other: Mapping[SampledRow, RowOutcome]
) -> tuple[int, int, Sequence[SampledRow]]:
    from prefect_raybatch.stages.trial import compared

    return compared(one, other)


def _both(stored: RowOutcome, tried: RowOutcome) -> tuple[str, str]:
    """Return a row's outcome in both precisions as text; for two vectors, with their cosine."""
    from prefect_raybatch.stages.trial import cosine

    one, other = stored[1], tried[1]
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return _text(stored), f"{_text(tried)}, cosine {cosine(one, other):.4f}"
    return _text(stored), _text(tried)


def _text(outcome: RowOutcome) -> str:
    """Return a row's outcome (answer, vector or failure) as text, cut to KEPT_TEXT characters."""
    kind, value = outcome
    if kind == "failed":
        return str(value)[:KEPT_TEXT]
    if isinstance(value, np.ndarray):
        return f"a vector of {len(value):,} numbers"
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text[:KEPT_TEXT]
