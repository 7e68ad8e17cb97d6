"""Tries some engine settings on a sample of the job's own rows, and chooses the fastest.

A trial runs the real stages (read, prepare, engine, finish) for a short time; nothing is committed,
and its files are deleted. Settings that may change answers (quantization, speculation, tensor
parallelism) are tried after the others. If one of them is faster, some of its answers are compared
with those of the unchanged job.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.errors import ConfigError, RayBatchError
from prefect_raybatch.harmless import visible
from prefect_raybatch.job.job_file import with_fields
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.precision import PrecisionTry
from prefect_raybatch.ledger.records import JsonObject, Plan, Receipt, Unit
from prefect_raybatch.report.advice import SPARE
from prefect_raybatch.report.report import duration
from prefect_raybatch.runs.alterations import Changed, Changes, agreements, sampled_rows
from prefect_raybatch.runs.precision import SampleBench
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted
from prefect_raybatch.yaml_text import visible_yaml

if TYPE_CHECKING:
    from prefect_raybatch.cluster.pipeline import Pipeline
    from prefect_raybatch.cluster.sharing import Tenant
    from prefect_raybatch.sizing.sizes import Capacity

log = logging.getLogger(__name__)

FOLDER = "_tune"  # under output.uri; no run key begins with an underscore
BETTER = 1.03  # factor over the best rate so far: smaller gains are noise
COPIED_ROWS = 100_000  # most rows of an input that must be copied
MOST_SHARDS = 4096  # of batch_size rows: more than a trial gets through
REMOVALS = 10  # most attempts to delete files that are still being written
ENGINES, REPLICAS, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = (
    "engine.engines_per_gpu",
    "engine.replicas",
    "engine.max_num_seqs",
    "engine.max_num_batched_tokens",
)

Moves = Callable[[int], list[int]]  # from a field's value to the next values to try


@dataclass(frozen=True)
class Trial:
    """A trial of the settings `changes` {job field: value}, and how fast they were.

    `rows_per_s` is the steady rate, measured over `rows` rows; `start_s` is the time until an
    engine got its first row. The model had `replicas`, with `engines` in all. `error` says why the
    trial failed, or "". `may_alter`: the settings may change answers; `agreement` then says how
    many sampled answers equal those of the unchanged job, None if that was not measured.
    """

    changes: Changes
    rows_per_s: float = 0.0
    start_s: float = 0.0
    rows: int = 0
    replicas: int = 1
    engines: int = 1
    error: str = ""
    may_alter: bool = False  # the job's answers
    agreement: PrecisionTry | None = None


@dataclass(frozen=True)
class Tuned:
    """The outcome of tuning.

    The whole input has `rows` rows and would take `seconds` with the settings of `best`. If that is
    longer than `deadline` (seconds), `needs` is the number of replicas that would meet it. `needs`
    is None if the deadline is met, cannot be met, or is None. `notes` are sentences to show.
    """

    trials: tuple[Trial, ...]
    best: Trial
    rows: int
    seconds: float
    deadline: float | None = None
    needs: int | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)


def tried(
    bench: Bench,
    moves: Mapping[str, Moves],
    options: Sequence[Changes],
    seconds: float,
    observe: Callable[[Trial], None],
) -> list[Trial]:
    """Run trials for about `seconds` and return them: first of other sizes, then of `options`.

    `moves` maps a job field to a function from a value to the next values to try. Each of `options`
    is a change of the job that may alter answers; it is tried on top of the best trial so far.
    `observe` is called with each trial.
    """
    began = time.monotonic()
    trials = list(search(bench.starts(), moves, bench, seconds, observe, len(options)))
    ends = trials_end(began, trials[0], seconds)
    return trials + altered(trials, options, bench, ends, observe)


def outcome(
    trials: Sequence[Trial],
    options: Sequence[Changes],
    min_agreement: float,
    rows: int,
    deadline: float | None,
) -> Tuned:
    """Choose the fastest of the `trials` that keep the answers; return it, and the time it needs.

    `options` are the changes that may alter answers; a trial of one is chosen only if at least the
    share `min_agreement` of answers stays equal. The input has `rows` rows; `deadline` is in
    seconds. Raises `ConfigError` if no trial worked.
    """
    kept = (trial for trial in trials if keeps(trial, min_agreement))
    best = max(kept, key=lambda trial: trial.rows_per_s)
    if not best.rows_per_s:
        raise ConfigError(f"no setting worked; the unchanged job failed with: {trials[0].error}")
    tuned = tuned_of(tuple(trials), best, rows, deadline)
    notes = alteration_sentences(trials, options, min_agreement)
    return replace(tuned, notes=(*tuned.notes, *notes))


def keeps(trial: Trial, least: float) -> bool:
    """Return whether a trial keeps at least the share `least` (0 to 1) of the job's answers.

    True if its settings cannot change answers; False if they may, but were not compared.
    """
    if not trial.may_alter:
        return True
    return trial.agreement is not None and trial.agreement.bound >= least


def altered(
    trials: Sequence[Trial],
    options: Sequence[Changes],
    bench: Callable[[Changes], Trial],
    ends: float,
    observe: Callable[[Trial], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Trial]:
    """Try each of `options`, which may change answers, on top of the best of `trials`.

    Returns the new trials, in the order of `options`. Each is assumed to take as long as the
    longest new one before it. No further trial begins if it would then end after `ends`, a time of
    `clock`. Tries none if none of `trials` worked. `observe` is called with each new trial.
    """
    best = max(trials, key=lambda trial: trial.rows_per_s)
    made: list[Trial] = []
    took = 0.0
    for changes in options if best.rows_per_s else ():
        began = clock()
        if began + took > ends:
            break
        made.append(replace(bench({**best.changes, **changes}), may_alter=True))
        observe(made[-1])
        took = max(took, clock() - began)
    return made


def alteration_sentences(
    trials: Sequence[Trial], options: Sequence[Changes], least: float
) -> list[str]:
    """Return a sentence for each tried option, and a last one for those not tried.

    `options` are the changes that may alter answers. A sentence gives the speed-up and the share of
    sampled answers that stayed equal, and says whether that reaches `least` (limits.min_agreement).
    """
    plain = max((t.rows_per_s for t in trials if not t.may_alter), default=0.0)
    tried = [trial for trial in trials if trial.may_alter]
    said = []
    for trial, changes in zip(tried, options, strict=False):
        name = changes_text(changes)
        if not trial.rows_per_s or not plain:
            said.append(f"{name} did not work: {trial.error}")
            continue
        brought = f"{name} brought {trial.rows_per_s / plain:.2f} times"
        if trial.agreement is None:
            said.append(f"{brought}, so its answers were not compared")
        elif trial.agreement.error:
            said.append(f"{brought}; its answers could not be compared: {trial.agreement.error}")
        else:
            one = trial.agreement
            taken = "may be taken" if keeps(trial, least) else "not taken"
            said.append(
                f"{brought}; {one.agreed:,} of {counted(one.rows, 'sampled answer')} are the job's "
                f"own, so at least {one.bound:.2%} of all; limits.min_agreement {least:g}: {taken}"
            )
    left = [changes_text(changes) for changes in options[len(tried) :]]
    return said + ([f"there was no time for {'; '.join(left)}"] if left and plain else [])


def search(
    starts: Mapping[str, int],
    axes: Mapping[str, Moves],
    bench: Callable[[Changes], Trial],
    seconds: float,
    observe: Callable[[Trial], None],
    kept: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Trial]:
    """Try the unchanged job, then change one field after the other in the best settings so far.

    While a change helps, the field is changed further in the same direction. `starts` are the
    fields' values in the unchanged job; `axes` maps a field to a function from a value to the next
    ones to try. The search ends `seconds` after the first trial's first row. It ends earlier if
    `kept` more trials are to follow it: the time for them, at most half of `seconds`, is left free.
    """
    took = 0.0  # seconds of the latest trial

    def attempt(changes: Changes) -> Trial:
        nonlocal took
        began = clock()
        trial = bench(changes)
        took = clock() - began
        observe(trial)
        return trial

    began = clock()
    best = attempt({})
    yield best
    ends = trials_end(began, best, seconds)
    took -= best.start_s
    seen = {_key(best.changes)}
    for name, moves in axes.items():
        now = starts[name]
        ways = [[value] for value in moves(now)]
        while ways:
            (value,) = ways.pop(0)
            changes = {**best.changes, name: value}
            if _key(changes) in seen:
                continue
            if clock() + took > ends - min(kept * took, seconds / 2):
                return
            seen.add(_key(changes))
            trial = attempt(changes)
            yield trial
            if trial.rows_per_s > best.rows_per_s * BETTER:
                best = trial
                up = value > now
                ways = [[next_] for next_ in moves(value) if (next_ > value) == up]
                now = value


def trials_end(began: float, first: Trial, seconds: float) -> float:
    """Return the monotonic time by which trials have to end.

    This is `seconds` after the first row of the trial `first`, which began at `began`. The start of
    its engine does not count because it may compile kernels: 140 s for an 8B model where later
    starts took 50 s.
    """
    return began + first.start_s + seconds


class Bench:
    """Runs trials on a cluster: call it with changes of the job to get the `Trial`.

    All trials infer shards of one plan, made of a sample of the input.
    """

    def __init__(
        self,
        changed: Changed,
        plan: Plan,
        shards: Shards,
        store: Store,
        capacity: Capacity,
        seconds: float,
        engine: type | None = None,
    ):
        """Store the arguments.

        `changed(changes)` returns the run's spec with some fields changed. A trial lasts `seconds`
        after its first finished shard. `engine` replaces the engine stage in tests.
        """
        self.changed, self.plan, self.shards, self.store = changed, plan, shards, store
        self.capacity, self.seconds, self.engine = capacity, seconds, engine
        self.spec = changed({})

    def compared(self, trials: Sequence[Trial], user: Tenant) -> list[Trial]:
        """Return all trials, some of them with their `agreement`, which is measured here.

        It is measured for trials that may change answers and are faster than all trials that
        cannot. Their answers to a sample of rows are compared with those of the unchanged job.
        `user` registers this process with the cluster.
        """
        plain = max(trial.rows_per_s for trial in trials if not trial.may_alter)
        faster = [t for t in trials if t.may_alter and t.rows_per_s > BETTER * plain]
        if not faster:
            return list(trials)
        least = self.spec.limits.min_agreement
        rows = sampled_rows(least, self.plan.rows, len(faster))
        bench = SampleBench(
            *(self.spec, self.plan, self.shards, Ledger(self.store), self.capacity, user),
            *(uuid.uuid4().hex, self.engine, rows),
        )
        made = agreements(bench, [trial.changes for trial in faster], self.changed)
        found = {id(t): replace(t, agreement=a) for t, a in zip(faster, made, strict=True)}
        return [found.get(id(trial), trial) for trial in trials]

    def starts(self) -> dict[str, int]:
        """Return {job field: value} of the fields to tune in the unchanged job; resolve `auto`."""
        size = sized.for_attempt(self.spec.sizes, self.plan, self.capacity)
        return {
            ENGINES: size.pool.engines_per_gpu,
            REPLICAS: size.pool.replicas[1],
            MAX_NUM_SEQS: size.max_num_seqs,
            MAX_NUM_BATCHED_TOKENS: size.arguments.max_num_batched_tokens,
        }

    def __call__(self, changes: Changes) -> Trial:
        """Run one trial; if it fails, the returned trial's `error` says why."""
        try:
            return self._trial(changes)
        except RayBatchError as error:
            return Trial(changes, error=f"{type(error).__name__}: {error}")

    def _trial(self, changes: Changes) -> Trial:
        from prefect_raybatch.cluster import connect as cluster
        from prefect_raybatch.cluster.pipeline import Pipeline
        from prefect_raybatch.stages.engine import EngineStage

        spec = self.changed(changes)
        size = sized.for_attempt(spec.sizes, self.plan, self.capacity)
        cluster.check_fit(spec.sizes, self.capacity, size.pool)
        pipeline = Pipeline(
            spec,
            self.plan,
            self.shards,
            self.store,
            uuid.uuid4().hex,
            size,
            engine=self.engine or EngineStage,
        )
        began = time.time()
        done, error = self._receipts(pipeline)
        if not done:
            return Trial(changes, error=error or "no shard was finished in time")
        first = min(receipt.stats.started or 0.0 for receipt in done)
        rate, rows = steady(done)
        pool = size.pool
        start = round(first - began, 1)
        return Trial(changes, round(rate, 1), start, rows, pool.replicas[1], pool.engines)

    def _receipts(self, pipeline: Pipeline) -> tuple[list[Receipt], str]:
        """Return (receipts of the shards finished in time, why a shard failed or "")."""
        done: list[Receipt] = []
        until = math.inf
        error = ""
        units = list(self._units())
        found = pipeline(units, False)
        for receipt in found:
            if receipt.lost is not None:
                error = str(receipt.lost)
                if receipt.lost.fatal:
                    break
            elif receipt.stats.started is not None:
                done.append(receipt)
                until = min(until, time.monotonic() + self.seconds)
            if time.monotonic() > until:
                break
        pipeline.stop()
        return done, error

    def _units(self) -> Iterator[Unit]:
        """Yield up to MOST_SHARDS shards, in an order whose first few are spread over the input."""
        number = min(self.plan.shards, MOST_SHARDS)
        for place in spread(number):
            shard = place * self.plan.shards // number
            yield Unit(shard, 0, self.shards[shard].rows)


def spread(number: int) -> list[int]:
    """Return 0 to number - 1 in bit-reversed order, whose first few are spread over the range."""
    bits = max(1, (number - 1).bit_length())
    turned = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return [i for i in turned if i < number]


def steady(receipts: list[Receipt]) -> tuple[float, int]:
    """Return (rows per second, rows) of the finished shards of a trial.

    With three or more shards, the rate is measured from the end of the first shard to the end of
    the last; else over the whole time in the engine.
    """
    figures = [receipt.stats for receipt in receipts]
    ends = sorted((one.ended or 0.0, int(one.rows or 0)) for one in figures)
    rows = sum(number for _, number in ends)
    if len(ends) >= 3 and ends[-1][0] > ends[0][0]:
        return (rows - ends[0][1]) / (ends[-1][0] - ends[0][0]), rows
    span = ends[-1][0] - min(one.started or 0.0 for one in figures)
    return rows / max(span, 1e-6), rows


def axes(sizes: SizeSpec, capacity: Capacity) -> dict[str, Moves]:
    """Return the fields to tune, each with a function from a value to the next ones to try."""

    def twice_or_half(least: int, most: int) -> Moves:
        return lambda value: [v for v in (value * 2, value // 2) if least <= v <= most]

    axes: dict[str, Moves] = {}
    if sizes.device_for(capacity.gpus) == "gpu":
        if sizes.gpus_per_replica == 1:
            axes[ENGINES] = lambda value: [v for v in (value + 1, value - 1) if 1 <= v <= 8]
        axes[MAX_NUM_SEQS] = twice_or_half(64, 4096)
        axes[MAX_NUM_BATCHED_TOKENS] = twice_or_half(4096, 65536)
    else:
        most = int((capacity.cpus - sizes.stage_cpus) / sizes.cpus)
        axes[REPLICAS] = lambda value: [v for v in (value + 1,) if v <= most]
        axes[MAX_NUM_SEQS] = twice_or_half(32, 512)
    return axes


def _key(changes: Changes) -> str:
    return repr(sorted(changes.items()))


def tuned_of(trials: tuple[Trial, ...], best: Trial, rows: int, deadline: float | None) -> Tuned:
    """Return the outcome of tuning for an input of `rows` rows.

    `deadline` is the time allowed for the whole input in seconds, None for any time.
    """
    work = rows / best.rows_per_s
    seconds = round(best.start_s + work, 1)
    if deadline is None or seconds <= deadline:
        return Tuned(trials, best, rows, seconds, deadline)
    left = deadline - best.start_s
    if left <= 0:
        note = f"the engines take {best.start_s:,.0f} s to start, so no number meets the deadline"
        return Tuned(trials, best, rows, seconds, deadline, notes=(note,))
    needs = math.ceil(best.replicas * work / left * SPARE)
    return Tuned(trials, best, rows, seconds, deadline, needs)


def remove_trials(output: Store, top: str) -> None:
    """Delete the folder `top` of the trials, including unfinished files of killed writers.

    Deletes through the output's root store, so that no empty folder is left. Logs a warning if
    files remain.
    """
    trials = output.sub(top)
    try:
        for _ in range(REMOVALS):
            trials.unfinished(math.inf, remove=True)
            output.delete([info.path for info in output.list(top)])
            time.sleep(0.5)  # a writer on another node may get one more file through
            if next(iter(trials.list()), None) is None and not trials.unfinished(math.inf, False):
                return
        log.warning(
            "%s: a process still writes files there. Delete the folder when it has ended",
            trials.uri,
        )
    except RayBatchError as error:  # must not replace the result
        log.warning("%s could not be removed: %s. Delete it by hand", trials.uri, error)


def changes_text(changes: Changes) -> str:
    """Return settings as text, e.g. `engine.max_num_seqs: 512`.

    For settings of speculation, the text has only the method.
    """
    named = (
        (name, value.get("method", value) if isinstance(value, Mapping) else value)
        for name, value in changes.items()
    )
    return ", ".join(f"{name}: {value}" for name, value in named) or "as the job is"


def line(trial: Trial) -> str:
    """Return one line of text about a trial."""
    return f"{changes_text(trial.changes)} -> {trial.error or f'{trial.rows_per_s:,.1f} rows/s'}"


def table(tuned: Tuned) -> list[dict[str, str]]:
    """Return one {column title: text} for each trial, in order, with the best marked."""
    first = tuned.trials[0].rows_per_s
    compared = any(trial.may_alter for trial in tuned.trials)
    return [
        {
            "settings": changes_text(trial.changes),
            "rows/s": f"{trial.rows_per_s:,.1f}" if trial.rows_per_s else "-",
            "of the first": f"{trial.rows_per_s / first:.2f}" if first else "-",
            "rows": f"{trial.rows:,}",
            "start s": f"{trial.start_s:,.0f}" if trial.rows_per_s else "-",
            **({"same answers": _agreed(trial)} if compared else {}),
            "": "best" if trial is tuned.best else "did not work" if trial.error else "",
        }
        for trial in tuned.trials
    ]


def _agreed(trial: Trial) -> str:
    one = trial.agreement
    return "" if one is None or not one.rows else f"{one.agreement:.1%}, at least {one.bound:.1%}"


def conclusion(tuned: Tuned) -> list[str]:
    """Return sentences: how long the input takes, if the deadline is met, and what did not work."""
    engines = counted(tuned.best.engines, "engine")
    said = [
        f"{counted(tuned.rows, 'row')} would take {duration(tuned.seconds)} with {engines} "
        f"at {tuned.best.rows_per_s:,.1f} rows/s in all"
    ]
    if tuned.deadline is not None:
        meets = f"the deadline of {duration(tuned.deadline)}"
        if tuned.needs:
            said.append(f"{meets} needs engine.replicas: {tuned.needs}, with 10 % to spare")
        elif tuned.seconds <= tuned.deadline:
            said.append(f"{meets} is met")
    wrong = (trial for trial in tuned.trials if trial.error and not trial.may_alter)
    return [
        *said,
        *(f"{changes_text(one.changes)} did not work: {one.error}" for one in wrong),
        *tuned.notes,
    ]


def settings(tuned: Tuned) -> dict[str, Any]:
    """Return {job field: value} to set in the job: those of the best trial.

    If only more replicas meet the deadline, their number is among them.
    """
    more = {REPLICAS: tuned.needs} if tuned.needs else {}
    return {**tuned.best.changes, **more}


def job_file(value: JsonObject, tuned: Tuned) -> str:
    """Return the job `value` as YAML, with the best settings set and the trials in comments."""
    rows = ("  ".join(cell for cell in row.values() if cell) for row in table(tuned))
    return commented(value, settings(tuned), [*rows, *conclusion(tuned)])


def commented(value: JsonObject, changes: Changes, texts: Sequence[str]) -> str:
    """Return the job `value` as YAML, with `changes` set and `texts` as comments at its head.

    `value` is the job as plain values.
    """
    lines = "\n".join(texts).splitlines()  # an error may have several
    said = "".join(f"# {visible(text)}\n" for text in lines)
    return said + visible_yaml(with_fields(value, changes))
