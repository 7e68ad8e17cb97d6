"""Defines the report of a run as a record (the JSON of report.json); reads and writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from prefect_raybatch.ledger.accepted import Accepted
from prefect_raybatch.ledger.arrangement import ArrangementOutcome
from prefect_raybatch.ledger.failures import FailureKey
from prefect_raybatch.ledger.layout import DATA_FOLDER, REPORT
from prefect_raybatch.ledger.precision import PrecisionNote
from prefect_raybatch.ledger.published import Published
from prefect_raybatch.ledger.record_files import put_record, read_record
from prefect_raybatch.ledger.records import Part, dump, with_checksum, without_checksum
from prefect_raybatch.ledger.strict import Number, StrictRecord, read_json
from prefect_raybatch.quality.accuracy import Accuracy, interval
from prefect_raybatch.quality.agreement import Agreement
from prefect_raybatch.quality.alarm import ShareSeries
from prefect_raybatch.quality.judgement import Judgement, series_of
from prefect_raybatch.result_reader import FinishedRows
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted

LABELS_NAMED = 10  # of a classifier, in the report
Point = Annotated[tuple[Number, ...], Field(min_length=4, max_length=4)]
Quantiles = Annotated[tuple[Number, ...], Field(min_length=6, max_length=6)]
Cell = Annotated[tuple[int, ...], Field(min_length=4, max_length=4)]


@dataclass(frozen=True)
class StageStats(StrictRecord):
    """The work of one stage over the whole run; unknown values are None.

    `seconds` are summed over its tasks. `rows_per_s` is `rows` divided by `seconds`: the rate of
    one task. `balance` is the mean task time divided by the longest (1 is even). `mean_s` and
    `slowest_s` are the mean and the longest task time. `busiest` is the number of rows of the
    busiest engine divided by the mean of all engines; for the finish stage it compares nodes in the
    same way. It is None for read and prepare.
    """

    name: str
    tasks: int
    rows: int
    seconds: Number
    rows_per_s: Number
    balance: Number
    mean_s: Number | None = None
    slowest_s: Number | None = None
    busiest: Number | None = None


@dataclass(frozen=True)
class WorkerStats(StrictRecord):
    """An engine actor, named HOST:PID, and its work.

    `tokens` are of prompts and answers; `seconds` are summed over shards, also concurrent ones. A
    report lists the engines of the attempt that processed most rows.
    """

    name: str
    shards: int
    rows: int
    tokens: Number
    seconds: Number


@dataclass(frozen=True)
class NodeStats(StrictRecord):
    """A node with engines, and what they processed.

    `figures` are the means and peaks measured there, if known (MEANS, PEAKS in `ledger/stats.py`).
    """

    name: str
    engines: int
    shards: int
    rows: int
    figures: Mapping[str, Number]


@dataclass(frozen=True)
class Charts(StrictRecord):
    """The data of the plots, of bounded size for any run.

    `throughput` has (seconds of work, rows/s, prompt tokens/s, output tokens/s) at the end of each
    of up to 120 equal spans. `durations` is {stage: (p5, p25, median, p75, p95, longest)} of task
    times in seconds. `cells` has (shards, committed shards, failed rows, committed rows) of up to
    2,000 groups of equally many shards, in order.
    """

    throughput: Annotated[tuple[Point, ...], Field(max_length=1000)] = ()
    durations: Annotated[Mapping[str, Quantiles], Field(max_length=20)] = field(
        default_factory=dict
    )
    cells: Annotated[tuple[Cell, ...], Field(max_length=10_000)] = ()


@dataclass(frozen=True)
class StartTimes(StrictRecord):
    """The time from the start of an attempt to its first commit, as {phase: seconds}.

    Phases of engines are those of the slowest engine.
    """

    attempt: str
    engines: int
    seconds: Mapping[str, Number]


@dataclass(frozen=True)
class Advice(StrictRecord):
    """Advice from a run's own figures: the problem, the evidence, and the one change to make."""

    about: str
    evidence: str
    change: str


@dataclass(frozen=True)
class ModelShare(StrictRecord):
    """A model of a cascade: its rows, tokens and cost (with the keys of `RunReport.cost`).

    `asked` counts the rows sent to the model, `answered` the rows with its answer in the result,
    and `failed` the quarantined rows that failed at this model.

    As a check, some rows that the smaller model answered are sent to the larger model too.
    `checked` counts such rows with an answer of both models, and `agreed` those of them with equal
    answers. `unanswered` counts such rows to which the larger model gave no answer. These three
    counts are 0 for the larger model.
    """

    model: str
    asked: int
    answered: int
    failed: int
    tokens: Mapping[str, Number] = field(default_factory=dict)
    cost: Mapping[str, Number] = field(default_factory=dict)
    checked: int = 0
    agreed: int = 0
    unanswered: int = 0

    def agreement(self) -> str:
        """Return e.g. `97.0% (93.6% to 98.9%)`: the share of checked answers that were equal.

        In parentheses is the exact 95 % interval. "" if no answer was checked.
        """
        if not self.checked:
            return ""
        low, high = interval(self.agreed, self.checked)
        return f"{self.agreed / self.checked:.1%} ({low:.1%} to {high:.1%})"


@dataclass(frozen=True)
class ClassifierNote(StrictRecord):
    """The classifier of a run: its file, encoder and labels, and how it did in training.

    It was `trained` (seconds since 1970) on the run with key `run`. It was tested on `tested` other
    texts; for `same` of them, its label was that run's answer. `run` is "" if this is unknown.
    """

    file: str
    encoder: str
    labels: tuple[str, ...]
    run: str = ""
    trained: Number = 0.0
    tested: int = 0
    same: int = 0

    def text(self) -> str:
        """Return a sentence about the classifier for the report; it names up to 10 labels."""
        shown = ", ".join(self.labels[:LABELS_NAMED])
        more = ", ..." if len(self.labels) > LABELS_NAMED else ""
        text = (
            f"{counted(len(self.labels), 'label')} ({shown}{more}) by {self.file} on {self.encoder}"
        )
        if not self.run:
            return text
        when = datetime.fromtimestamp(self.trained, UTC).strftime("%Y-%m-%d %H:%M UTC")
        low, high = interval(self.same, self.tested)
        return (
            f"{text}, trained {when} on run {self.run}, where it gave {self.same:,} of "
            f"{counted(self.tested, 'other text')} that run's answer: "
            f"{self.same / max(1, self.tested):.1%} ({low:.1%} to {high:.1%})"
        )


@dataclass(frozen=True)
class RunReport(FinishedRows, StrictRecord):
    """The report of a run; the JSON of report.json.

    Its rows are read from the run directory on demand. Times are in seconds, rates in rows per
    second. `run` is the run directory. Of `rows` rows, `good` are answered, `failed` in quarantine
    and `skipped` left out by `output.postprocess`. `resumed_shards` were committed by earlier
    attempts. `seconds` is the working time, `elapsed` the time of all attempts with start-up and
    waits. `failures` is {"stage|error|message": rows} of the most common failures, `losses`
    {reason: how often a shard or a part of one was lost}, `parts` the files of the result.
    `engines` and `workers` are those of the attempt that processed most rows; `other_engines`
    counts those of other attempts.
    """

    run: str
    run_key: str
    job: str
    state: str
    rows: int
    good: int
    failed: int
    skipped: int
    shards: int
    resumed_shards: int
    seconds: Number
    rows_per_s: Number
    tokens: Mapping[str, Number]
    stages: tuple[StageStats, ...]
    failures: Mapping[str, int]
    model: Mapping[str, Any]
    parts: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()
    steady_rows_per_s: Number = 0.0
    engine_deaths: int = 0
    figures: Mapping[str, Number] = field(default_factory=dict)  # MEANS and PEAKS, where known
    workers: tuple[WorkerStats, ...] = ()
    nodes: tuple[NodeStats, ...] = ()
    charts: Charts = field(default_factory=Charts)
    dashboard: str = ""  # of Ray, while its cluster lives
    engines: int = 0  # engines of the attempt that did most rows
    other_engines: int = 0  # of other attempts
    losses: Mapping[str, int] = field(default_factory=dict)  # why shards were lost: how often
    advice: tuple[Advice, ...] = ()
    # Kept in their own records, since the report is written before a run is published.
    published: tuple[Published, ...] = ()
    accuracy: Accuracy | None = None
    judgement: Judgement | None = None
    agreement: Agreement | None = None
    # rows reused, merged and asked, tokens and seconds saved; only with `reuse`
    reuse: Mapping[str, Number] = field(default_factory=dict)
    starts: tuple[StartTimes, ...] = ()  # of the latest attempts that started engines
    # GPU-hours and, if the job gives a price, their cost; only with GPUs
    cost: Mapping[str, Number] = field(default_factory=dict)
    code: Mapping[str, int] = field(default_factory=dict)  # rows by the package's code on workers
    # {labels, lengths, ends: {name: answers}}, if counted
    answers: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    # {column: {null, filled: rows}} and {column: {digest of a value: rows}} of the input
    nulls: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    # shares of the GPUs' peak, if known (`Tally.roofline`)
    roofline: Mapping[str, Number] = field(default_factory=dict)
    # the decision of a trial of quantization, and its evidence
    precision: PrecisionNote | None = None
    # seconds of all attempts, start-up and waits included
    elapsed: Number = 0.0
    currency: str = ""  # of the costs, if the job names it
    cascade: tuple[ModelShare, ...] = ()  # the models of a cascade, the smaller one first
    classifier: ClassifierNote | None = None  # that answers rows, in a cascade or alone
    accepted: tuple[Accepted, ...] = ()  # accepted differences from the plan; also in the notes
    # how the engines were arranged and why, and what was measured; if sizes are learned
    arrangement: ArrangementOutcome | None = None

    @property
    def series(self) -> dict[str, ShareSeries]:
        """Return {"golden rows", "judge" or "larger model": series compared with earlier runs}.

        A key is left out if the run has no such series (`ShareSeries`).
        """
        return series_of(self.accuracy, self.judgement, self.agreement)

    @property
    def quarantine_folder(self) -> str | None:
        """Return the folder with the files of failed rows; None if no row failed."""
        folders = (part.path.partition("/")[0] for part in self.parts)
        return next((folder for folder in folders if folder != DATA_FOLDER), None)

    def _place(self) -> tuple[str, None]:
        return self.run, None

    def failed_with(self, error: str) -> int:
        """Return how many rows failed with error class `error`.

        Counts only the most common failures, which are in `failures`.
        """
        keys = ((FailureKey.parse(text), rows) for text, rows in self.failures.items())
        return sum(rows for key, rows in keys if key.error == error)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of report.json; fields that only some runs have are left out if empty."""
        value = asdict(self)
        optional = (
            "published",
            "accuracy",
            "judgement",
            "agreement",
            "reuse",
            "cost",
            "currency",
            "code",
            "answers",
            "nulls",
            "values",
            "roofline",
            "precision",
            "arrangement",
            "elapsed",
            "accepted",
            "cascade",
            "classifier",
            "starts",
        )
        for name in optional:
            if not value[name]:
                del value[name]
        return value

    def to_bytes(self) -> bytes:
        return dump(self.to_dict())

    @classmethod
    def from_bytes(cls, data: bytes) -> RunReport:
        return read_json(_REPORT, data, "report.json")


_REPORT = TypeAdapter(RunReport)


def with_judgement(report: RunReport, judgement: Judgement | None) -> RunReport:
    """Return the report with the judgement, and with the judge's cost added to the run's cost.

    `cost["judge"]` is the judge's part of `cost["total"]`. If `judgement` is None, the report is
    returned unchanged.
    """
    if judgement is None:
        return report
    cost, judged = dict(report.cost), judgement.cost
    for name in ("gpu_hours", "total"):
        if name in judged:
            cost[name] = cost.get(name, 0.0) + judged[name]
    if "total" in judged:
        cost["judge"] = judged["total"]
    currency = report.currency or judgement.currency
    return replace(report, judgement=judgement, cost=cost, currency=currency)


def put_report(store: Store, report: RunReport) -> None:
    """Write report.json, with its checksum, to the run directory `store`."""
    put_record(store, REPORT, with_checksum(report.to_bytes()))


def read_report(store: Store) -> RunReport:
    """Return the report in report.json of the run directory `store`.

    Raises `CorruptRun` if its checksum is wrong, and FileNotFoundError if there is none.
    """
    data = read_record(store, REPORT)
    return RunReport.from_bytes(without_checksum(data, f"{store.uri}/{REPORT}"))
