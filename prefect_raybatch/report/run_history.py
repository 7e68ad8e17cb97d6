"""The recent runs of a job on one page: outcomes, and whether answers have shifted. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from prefect_raybatch.harmless import code_span, markdown_text
from prefect_raybatch.ledger.forks import fork_key
from prefect_raybatch.ledger.last_attempt import advice, cut_to_characters
from prefect_raybatch.quality.accuracy import Accuracy
from prefect_raybatch.quality.agreement import Agreement
from prefect_raybatch.quality.alarm import ACCURACY, AGREEMENT, ShareSeries
from prefect_raybatch.quality.judgement import Judgement, series_of
from prefect_raybatch.report.answers import FAILED_ROWS, LEAST_ANSWERS, Shift, short_text
from prefect_raybatch.report.inputs import Inputs
from prefect_raybatch.report.plots import data_uri, history_plot
from prefect_raybatch.report.records import ModelShare
from prefect_raybatch.report.report import DASH, duration, number, table_lines
from prefect_raybatch.report.verdict import (
    DISAGREEMENT_REMARK,
    DRIFT_REMARK,
    FALLEN_REMARK,
    LATE_REMARK,
    LOST_ALARM_REMARK,
    few_rows,
    outcome_text,
    slow,
)
from prefect_raybatch.words import counted, money, sentence

STATE_VERBS = {"crashed": "crashed", "failed": "failed", "cancelled": "was cancelled"}
# Columns that only some jobs have.
MEASURED = ("cost", "accuracy", "judged", "e-value", "agreement", "agreement e-value")
MORE_OF = {"labels": "label", "lengths": "length", "ends": "finish reason"}
NOT_COMPARED = "not compared"
UNDONE_SHOWN = 160  # characters of a headline
LABELS_SHOWN = 8  # most common labels in the table of answers


@dataclass(frozen=True)
class HistoryLine:
    """A run of a job, as the page of its recent runs shows it; unknown values are None.

    `run` is the run directory; it is "" for a run that Prefect scheduled and that never started.
    `began` is in seconds since 1970. `committed` is the share of the run's shards that are
    committed. `good` and `quarantined` are numbers of rows, `rate` is in rows/s. `seconds` is the
    working time, `elapsed` the time of all attempts with start-up and waits. `is_late`: it missed
    its deadline.

    `answers` is the `answer_counts` of the run. `shifts` are the differences from earlier completed
    runs. `compared`: the answers were compared with those of the newest earlier run that counts
    answers. `is_first`: this run counts answers, and no earlier completed run does. `checked` is
    the smaller model of a cascade if some of its answers were checked. `prompt_tokens` is the mean
    number of tokens of a prompt.

    `trouble` says why the run cannot be read, `failure` why its last attempt failed. `command` runs
    it again. Before that, the user must do `first_step` ("": nothing). `undone` says which later
    step of a complete run (such as publishing) was not done, and why. `under_way` says which
    process is doing such a step now. `is_left`: the run is incomplete, and no driver works on it.
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
    first_step: str = ""
    undone: str = ""
    under_way: str = ""
    is_left: bool = False
    elapsed: float | None = None  # seconds of all attempts, start-up and waits included
    is_late: bool = False  # missed its deadline
    currency: str = ""  # of the cost
    accuracy: Accuracy | None = None  # on golden rows
    judgement: Judgement | None = None
    checked: ModelShare | None = None  # smaller model of a cascade, if its answers were checked
    agreement: Agreement | None = None  # of both models of a cascade, compared with earlier runs
    prompt_tokens: float | None = None  # mean of a prompt
    inputs: Inputs = field(default_factory=Inputs)

    @property
    def distributions(self) -> dict[str, Mapping[str, float]]:
        """Return {kind: {name: number}}: `answers`, and the numbers of answered and failed rows.

        The rows have the kind FAILED_ROWS and the names "answered" and "failed", 0 if unknown.
        """
        failed = {"answered": float(self.good or 0), "failed": float(self.quarantined or 0)}
        return {**self.answers, FAILED_ROWS: failed}

    @property
    def series(self) -> dict[str, ShareSeries]:
        """Return {"golden rows", "judge" or "larger model": series compared with earlier runs}.

        A key is left out if the run has no such series (`ShareSeries`).
        """
        return series_of(self.accuracy, self.judgement, self.agreement)

    def has_fallen(self, share: str) -> bool:
        """Return whether an alarm says that `share` (ACCURACY or AGREEMENT) fell."""
        return any(one.rings for one in self.series.values() if one.measure == share)

    @property
    def drift(self) -> tuple[Shift, ...]:
        """Return the shifts that are larger than the usual differences between runs of this job."""
        return tuple(shift for shift in self.shifts if shift.is_drift)


@dataclass(frozen=True)
class HistoryPage:
    """The runs of one job, newest first.

    `unreadable` is {run key: reason} of run directories that cannot be read, so they may belong to
    any job.
    """

    job: str
    runs: tuple[HistoryLine, ...]
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @property
    def latest(self) -> HistoryLine | None:
        return self.runs[0] if self.runs else None


def history_rows(page: HistoryPage) -> list[dict[str, str]]:
    """Return one row for each run; a column of MEASURED is left out if no run has a value."""
    rows = [_row(line) for line in page.runs]
    unknown = {name for name in MEASURED if all(row[name] == DASH for row in rows)}
    return [{name: text for name, text in row.items() if name not in unknown} for row in rows]


def _row(run: HistoryLine) -> dict[str, str]:
    began = DASH
    if run.began is not None:
        began = datetime.fromtimestamp(run.began, UTC).strftime("%Y-%m-%d %H:%M")
    state = run.state
    if run.committed is not None and run.state != "completed":
        state = f"{state}, {run.committed:.0%} of shards committed"
    return {
        "run": run.run_key,
        "started (UTC)": began,
        "state": state,
        "rows": number(run.rows, 0),
        "in quarantine": number(run.quarantined, 0),
        "rows/s": number(run.rate, 0),
        "time": duration(run.elapsed),
        "work": duration(run.seconds),
        "cost": DASH if run.cost is None else money(run.cost, run.currency),
        "accuracy": run.accuracy.short() if run.accuracy else DASH,
        "judged": run.judgement.short() if run.judgement else DASH,
        "e-value": _e_values(run, ACCURACY),
        "agreement": (run.checked and run.checked.agreement()) or DASH,
        "agreement e-value": _e_values(run, AGREEMENT),
        "answers": _shift_text(run),
    }


def _e_values(run: HistoryLine, share: str) -> str:
    """Return a run's e-values (`quality/alarm.py`) of `share`, ACCURACY or AGREEMENT, as text.

    There may be two for ACCURACY: first the one from golden rows, then the one from the judge.
    """
    series = [one for one in run.series.values() if one.measure == share]
    found = [f"{one.short()} (alarm)" if one.rings else one.short() for one in series]
    return " / ".join(found) or DASH


def _shift_text(run: HistoryLine) -> str:
    """Describe the shifts of a run's answers from earlier runs.

    If there is no shift, or if the answers could not be compared, the text says so.
    """
    if run.shifts:
        return "; ".join(map(short_text, run.shifts))
    if not run.answers:
        return DASH
    if run.compared:
        return "no shift"
    return "no earlier run" if run.is_first else NOT_COMPARED


def comparison_note(page: HistoryPage) -> str:
    """Return why the answers of some runs are not compared; "" if all are."""
    if NOT_COMPARED not in map(_shift_text, page.runs):
        return ""
    return f"{NOT_COMPARED}: this run or the one before it has fewer than {LEAST_ANSWERS} answers"


def answers_table(page: HistoryPage) -> list[dict[str, str]]:
    """Return the shares of answers, a column per run, newest first; [] if no run counts answers.

    There is a row for each common label if labels are counted, else for each range of lengths and
    each finish reason. In a cascade, lengths and finish reasons are of the larger model alone.
    """
    runs = [run for run in page.runs if run.answers]
    kinds = ("labels",) if any("labels" in run.answers for run in runs) else ("lengths", "ends")
    titles = {"labels": "{}", "lengths": "{} tokens", "ends": "finish reason {}"}
    of_larger = kinds != ("labels",) and any(run.checked for run in runs)
    rows = []
    for kind in kinds:
        names, others = shown_names(runs, kind)
        for name in names:
            title = "1 token" if (kind, name) == ("lengths", "1") else titles[kind].format(name)
            title += ", larger model" if of_larger else ""
            rows.append(_shares(title, runs, kind, [name]))
        if others:
            more = f"and {counted(len(others), f'more {MORE_OF[kind]}')}"
            rows.append(_shares(more, runs, kind, others))
    return rows


def _shares(
    title: str, runs: Sequence[HistoryLine], kind: str, names: Sequence[str]
) -> dict[str, str]:
    """Return a row of the table: its `title`, and the share of answers in `names` for each run."""
    return {"": title, **{run.run_key: _share(run.answers.get(kind, {}), names) for run in runs}}


def shown_names(runs: Sequence[HistoryLine], kind: str) -> tuple[list[str], list[str]]:
    """Return the names of a kind of answer, over all runs, as (common names, other names).

    The common names are the up to LABELS_SHOWN most common ones. The most common name comes first;
    ranges of lengths are in ascending order instead.
    """
    sums: dict[str, float] = {}
    for run in runs:
        for name, count in run.answers.get(kind, {}).items():
            sums[name] = sums.get(name, 0.0) + count
    names = sorted(sums, key=lambda name: -sums[name])
    common = names[:LABELS_SHOWN]
    if kind == "lengths":
        common.sort(key=lambda name: int(name.partition("-")[0].replace(",", "")))
    return common, names[LABELS_SHOWN:]


def _share(counts: Mapping[str, float], names: Sequence[str]) -> str:
    total = sum(counts.values())
    return f"{sum(counts.get(name, 0.0) for name in names) / total:.1%}" if total else DASH


def history_markdown(page: HistoryPage, plots: bool = True) -> str:
    """Return the page as Markdown; if `plots`, with its plot as an inline image."""
    lines = [f"# {markdown_text(page.job)}: the last {counted(len(page.runs), 'run')}", ""]
    lines += [f"- **{markdown_text(line)}**" for line in headlines(page)]
    lines += [""] if headlines(page) else []
    lines += table_lines(history_rows(page))
    lines += ["", markdown_text(note)] if (note := comparison_note(page)) else []
    todo = [
        f"- {markdown_text(f'{key}: {text}')}{f' {code_span(command)}' if command else ''}"
        for key, text, command in _to_continue(page)
    ]
    lines += ["", "## Runs to continue", "", *todo] if todo else []
    picture = history_plot(page.runs) if plots else None
    if picture is not None:
        lines += ["", f"![Runs]({data_uri(picture)})"]
    if answers := answers_table(page):
        lines += ["", "## Answers", "", *table_lines(answers)]
    notes = [f"- {markdown_text(f'{key}: {why}')}" for key, why in unread(page)]
    lines += ["", "## Unreadable runs", "", *notes] if notes else []
    return "\n".join(lines) + "\n"


def headlines(page: HistoryPage) -> list[str]:
    """Return lines with the main facts about the newest run, and about runs that never started.

    [] if there are no runs.
    """
    run = page.latest
    if run is None:
        return []
    if run.failure:
        return [_failure_line(run), *_last_complete(page)]
    # A run that never started could not report this itself.
    unstarted = [_failure_line(line) for line in page.runs[1:] if not line.run]
    if run.rows is None or run.good is None:
        return [f"{run.run_key} is {run.state}", *_last_complete(page), *unstarted]
    return [*_outcome(page, run, "Last run"), *unstarted]


def _last_complete(page: HistoryPage) -> list[str]:
    """Return the lines about the newest complete run, [] if no run is complete."""
    run = next((line for line in page.runs if line.good is not None), None)
    return [] if run is None else _outcome(page, run, f"Last complete run, {run.run_key}")


def _outcome(page: HistoryPage, run: HistoryLine, title: str) -> list[str]:
    """Return lines about a complete run: `title` with its outcome, then one for each shift."""
    # The shifts have lines of their own.
    about, shifted = remarks(page, run), [f"{run.run_key}: {shift.line()}" for shift in run.shifts]
    about += [LATE_REMARK] if run.is_late else []
    about += [DRIFT_REMARK] if run.drift else []
    about += [FALLEN_REMARK] if run.has_fallen(ACCURACY) else []
    about += [DISAGREEMENT_REMARK] if run.has_fallen(AGREEMENT) else []
    about += [LOST_ALARM_REMARK] if any(one.lost_alarm for one in run.series.values()) else []
    about += [cut_to_characters(f"{run.undone.rstrip('.')}.", UNDONE_SHOWN)] if run.undone else []
    about += [f"{sentence(run.under_way)}."] if run.under_way else []
    counts = (run.rows or 0, run.good or 0, run.quarantined or 0)
    seconds = run.elapsed or 0.0
    outcome = outcome_text(*counts, seconds, run.cost, about, run.currency)
    return [f"{title}: {outcome}", *shifted]


def _failure_line(run: HistoryLine) -> str:
    verb = STATE_VERBS.get(run.state, f"is {run.state}")
    return f"{run.run_key} {verb}: {run.failure}"


def remarks(page: HistoryPage, run: HistoryLine) -> list[str]:
    """Return the remarks on a completed run of the page; [] if its rows and time are usual.

    They say that it had far fewer rows or took far longer than usual.
    """
    return [text for text in unusual_figures(page, run) if text]


def replaced_keys(runs: Sequence[HistoryLine]) -> set[str]:
    """Return the keys of completed runs that a completed repaired run supersedes.

    Comparisons with earlier runs leave them out.
    """
    completed = {run.run_key for run in runs if run.good is not None}
    return {key for key in completed if fork_key(key) in completed}


def unusual_figures(page: HistoryPage, run: HistoryLine) -> tuple[str, str]:
    """Return (remark on too few rows, remark on too long a time) about a run on the page.

    A remark is "" if the figure is usual.
    """
    replaced = replaced_keys(page.runs)
    runs = page.runs[page.runs.index(run) + 1 :]
    before = [line for line in runs if line.run_key not in replaced]
    earlier = [line.rows for line in before if line.good is not None and line.rows is not None]
    times = [line.elapsed for line in before if line.good is not None and line.elapsed]
    return few_rows(run.rows or 0, earlier) or "", slow(run.elapsed or 0.0, times) or ""


def runs_to_continue(page: HistoryPage) -> list[tuple[str, str]]:
    """Return (run key, text) for each run to continue: why it is not done, and what to do."""
    return [(key, f"{text}{command}") for key, text, command in _to_continue(page)]


def _to_continue(page: HistoryPage) -> Iterator[tuple[str, str, str]]:
    """Yield (run key, why it is not done and what to do, command) for each run to continue.

    The command is "" if there is none.
    """
    for run in page.runs:
        left = f"{run.state}, and no driver is heard" if run.is_left else ""
        reason = run.failure or run.undone or left
        if reason and (run.run or run.command):
            todo = advice(run.first_step, run.command)
            yield run.run_key, f"{reason.rstrip('.: ')}; {todo}", run.command
        elif reason:
            yield run.run_key, reason, ""


def unread(page: HistoryPage) -> list[tuple[str, str]]:
    """Return (run key, reason) for each run on the page that cannot be read."""
    damaged = [(run.run_key, run.trouble) for run in page.runs if run.trouble]
    return damaged + list(page.unreadable.items())
