"""The recent runs of a job on one page: outcomes, and whether answers have shifted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from prefect_raybatch.harmless import code_span, markdown_text
from prefect_raybatch.quality.accuracy import Accuracy
from prefect_raybatch.quality.alarm import AccuracySeries
from prefect_raybatch.quality.judgement import Judgement, series_of
from prefect_raybatch.report.answers import FAILED_ROWS, LEAST_ANSWERS, Shift, short_text
from prefect_raybatch.report.inputs import Inputs
from prefect_raybatch.report.plots import data_uri, of_history
from prefect_raybatch.report.report import DASH, duration, number, table_lines
from prefect_raybatch.report.verdict import (
    DRIFT_REMARK,
    FALLEN_REMARK,
    LATE_REMARK,
    few_rows,
    outcome_text,
    slow,
)
from prefect_raybatch.words import counted, money

STATE_VERBS = {"crashed": "crashed", "failed": "failed", "cancelled": "was cancelled"}
LABELS_SHOWN = 8  # most common labels in the table of answers


@dataclass(frozen=True)
class HistoryLine:
    """A run of a job as the page shows it.

    `run` is its directory, "" for a run that Prefect scheduled and that has none. `began` is in
    seconds since 1970. Unknown values, e.g. of an incomplete run, are None. `shifts`
    are the differences from the completed runs before. `trouble` says why a run
    cannot be read, `failure` why its last attempt failed, and `command` runs it again.
    """

    run_key: str
    run: str
    state: str
    began: float | None = None
    rows: int | None = None
    committed: float | None = None  # share of its shards
    good: int | None = None
    quarantined: int | None = None
    rate: float | None = None
    seconds: float | None = None  # of work
    cost: float | None = None
    answers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    shifts: tuple[Shift, ...] = ()
    compared: bool = False  # with the completed run before it
    is_first: bool = False  # no earlier run counts answers
    trouble: str = ""
    failure: str = ""
    command: str = ""
    elapsed: float | None = None  # seconds of all attempts, start-up and waits included
    is_late: bool = False  # missed its deadline
    currency: str = ""  # of the cost
    accuracy: Accuracy | None = None  # on golden rows
    judgement: Judgement | None = None
    prompt_tokens: float | None = None  # mean of a prompt
    inputs: Inputs = field(default_factory=Inputs)

    @property
    def distributions(self) -> dict[str, Mapping[str, float]]:
        """Return the distributions of answers, and that of answered and failed rows."""
        failed = {"answered": float(self.good or 0), "failed": float(self.quarantined or 0)}
        return {**self.answers, FAILED_ROWS: failed}

    @property
    def series(self) -> dict[str, AccuracySeries]:
        """Return what compares the accuracy with that of earlier runs, by how it was measured."""
        return series_of(self.accuracy, self.judgement)

    @property
    def has_fallen(self) -> bool:
        """Return whether the accuracy is below that of the job's first runs."""
        return any(series.rings for series in self.series.values())

    @property
    def drift(self) -> tuple[Shift, ...]:
        """Return the shifts that are beyond what the runs of this job differ by themselves."""
        return tuple(shift for shift in self.shifts if shift.is_drift)


@dataclass(frozen=True)
class HistoryPage:
    """The runs of one job, newest first.

    `unreadable` are run directories that cannot be read and may belong to any job, as {run key:
    reason}.
    """

    job: str
    runs: tuple[HistoryLine, ...]
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @property
    def latest(self) -> HistoryLine | None:
        return self.runs[0] if self.runs else None


def history_rows(page: HistoryPage) -> list[dict[str, str]]:
    """Return one row for each run."""
    costs = any(line.cost is not None for line in page.runs)
    accuracies = any(line.accuracy is not None for line in page.runs)
    judged = any(line.judgement is not None for line in page.runs)
    return [_row(line, costs, accuracies, judged) for line in page.runs]


def _row(
    run: HistoryLine, with_cost: bool, with_accuracy: bool, with_judgement: bool
) -> dict[str, str]:
    began = DASH
    if run.began is not None:
        began = datetime.fromtimestamp(run.began, UTC).strftime("%Y-%m-%d %H:%M")
    state = run.state
    if run.committed is not None and run.state != "completed":
        state = f"{state}, {run.committed:.0%} committed"
    cost = (
        {"cost": DASH if run.cost is None else money(run.cost, run.currency)} if with_cost else {}
    )
    accuracy = {"accuracy": run.accuracy.short() if run.accuracy else DASH} if with_accuracy else {}
    return {
        "run": run.run_key,
        "started (UTC)": began,
        "state": state,
        "rows": number(run.rows, 0),
        "in quarantine": number(run.quarantined, 0),
        "rows/s": number(run.rate, 0),
        "time": duration(run.elapsed),
        "work": duration(run.seconds),
        **cost,
        **accuracy,
        **({"judged": run.judgement.short() if run.judgement else DASH} if with_judgement else {}),
        **({"e-value": _e_values(run)} if with_accuracy or with_judgement else {}),
        "answers": _shift_text(run),
    }


def _e_values(run: HistoryLine) -> str:
    """Return the e-values of the accuracy: by golden rows, then by the judge."""
    return " / ".join(series.short() for series in run.series.values()) or DASH


def _shift_text(run: HistoryLine) -> str:
    """Return the shifts from the run before, or why there are none."""
    if run.shifts:
        return "; ".join(map(short_text, run.shifts))
    if not run.answers:
        return DASH
    if run.compared:
        return "no shift"
    reason = "no earlier run" if run.is_first else f"fewer than {LEAST_ANSWERS} answers"
    return f"not compared: {reason}"


def answers_table(page: HistoryPage) -> list[dict[str, str]]:
    """Return shares of answers, a column per run, newest first; empty if no run counts answers.

    By label if labels are counted, otherwise by length and by finish reason.
    """
    runs = [run for run in page.runs if run.answers]
    kinds = ("labels",) if any("labels" in run.answers for run in runs) else ("lengths", "ends")
    titles = {"labels": "{}", "lengths": "{} tokens", "ends": "finish reason {}"}
    rows = []
    for kind in kinds:
        for name in shown_names(runs, kind):
            title = "1 token" if (kind, name) == ("lengths", "1") else titles[kind].format(name)
            shares = {run.run_key: _share(run.answers.get(kind, {}), name) for run in runs}
            rows.append({"": title, **shares})
    return rows


def shown_names(runs: Sequence[HistoryLine], kind: str) -> list[str]:
    """Return the most common names over all runs; lengths in ascending order."""
    sums: dict[str, float] = {}
    for run in runs:
        for name, count in run.answers.get(kind, {}).items():
            sums[name] = sums.get(name, 0.0) + count
    common = sorted(sums, key=lambda name: -sums[name])[:LABELS_SHOWN]
    if kind == "lengths":
        common.sort(key=lambda name: int(name.partition("-")[0].replace(",", "")))
    return common


def _share(counts: Mapping[str, float], name: str) -> str:
    total = sum(counts.values())
    return f"{counts.get(name, 0.0) / total:.1%}" if total else DASH


def history_markdown(page: HistoryPage, plots: bool = True) -> str:
    """Return the page as Markdown; `plots`: with its plot as an inline image."""
    lines = [f"# {markdown_text(page.job)}: the last {counted(len(page.runs), 'run')}", ""]
    lines += [f"- **{markdown_text(line)}**" for line in headlines(page)]
    lines += [""] if headlines(page) else []
    lines += table_lines(history_rows(page))
    lines += _incomplete_lines(page)
    picture = of_history(page.runs) if plots else None
    if picture is not None:
        lines += ["", f"![Runs]({data_uri(picture)})"]
    if answers := answers_table(page):
        lines += ["", "## Answers", "", *table_lines(answers)]
    notes = [f"- {markdown_text(f'{key}: {why}')}" for key, why in unread(page)]
    lines += ["", "## Unreadable runs", "", *notes] if notes else []
    return "\n".join(lines) + "\n"


def _incomplete_lines(page: HistoryPage) -> list[str]:
    """Return each run that did not complete with the reason and, to be copied, the command."""
    lines = []
    for run in page.runs:
        if run.failure:
            command = f"; continue with: {code_span(run.command)}" if run.command else ""
            lines.append(f"- {markdown_text(f'{run.run_key}: {run.failure}')}{command}")
    return ["", "## Runs that did not complete", "", *lines] if lines else []


def headlines(page: HistoryPage) -> list[str]:
    """Return the most important facts about the newest run."""
    run = page.latest
    if run is None:
        return []
    if run.failure:
        return [_failure_line(run)]
    # Which no run before this one has told of.
    unstarted = [_failure_line(line) for line in page.runs[1:] if not line.run]
    if run.rows is None or run.good is None:
        return [f"{run.run_key} is {run.state}", *unstarted]
    # The shifts have lines of their own.
    about, shifted = remarks(page, run), [f"{run.run_key}: {shift.line()}" for shift in run.shifts]
    about += [LATE_REMARK] if run.is_late else []
    about += [DRIFT_REMARK] if run.drift else []
    about += [FALLEN_REMARK] if run.has_fallen else []
    counts, seconds = (run.rows, run.good, run.quarantined or 0), run.elapsed or 0.0
    outcome = outcome_text(*counts, seconds, run.cost, about, run.currency)
    return [f"Last run: {outcome}", *shifted, *unstarted]


def _failure_line(run: HistoryLine) -> str:
    verb = STATE_VERBS.get(run.state, f"is {run.state}")
    return f"{run.run_key} {verb}: {run.failure}"


def remarks(page: HistoryPage, run: HistoryLine) -> list[str]:
    """Return what is unusual about a completed run of the page, its answers apart."""
    return [text for text in unusual_figures(page, run) if text]


def unusual_figures(page: HistoryPage, run: HistoryLine) -> tuple[str, str]:
    """Return the remarks on too few rows and on too long a time, "" for a usual figure."""
    before = page.runs[page.runs.index(run) + 1 :]
    earlier = [line.rows for line in before if line.good is not None and line.rows is not None]
    times = [line.elapsed for line in before if line.good is not None and line.elapsed]
    return few_rows(run.rows or 0, earlier) or "", slow(run.elapsed or 0.0, times) or ""


def failures(page: HistoryPage) -> list[tuple[str, str]]:
    """Return (run key, why its last attempt failed, and the command that runs it again)."""
    return [
        (
            run.run_key,
            f"{run.failure}; continue with: {run.command}" if run.command else run.failure,
        )
        for run in page.runs
        if run.failure
    ]


def unread(page: HistoryPage) -> list[tuple[str, str]]:
    """Return (run key, reason) of runs that cannot be read."""
    damaged = [(run.run_key, run.trouble) for run in page.runs if run.trouble]
    return damaged + list(page.unreadable.items())
