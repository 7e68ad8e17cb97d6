"""The recent runs of a job on one page: the outcome of each, and whether its answers differ from
the run before. Pure; memory is bounded by the runs shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from prefect_raybatch.harmless import markdown_text
from prefect_raybatch.report.answers import Shift
from prefect_raybatch.report.plots import data_uri, of_nights
from prefect_raybatch.report.report import DASH, duration, number, table_lines
from prefect_raybatch.words import counted, money

LABELS_SHOWN = 8  # of the commonest, in the table of answers


@dataclass(frozen=True)
class NightLine:
    """A run of a job as the page shows it; `began` is in seconds since 1970. Unknown values, e.g.
    of an incomplete run, are None. `shifts`: how its answers differ from the completed run before.
    `trouble` says why a run cannot be read, `failure` why its last attempt failed, and `command`
    runs it again."""

    run_key: str
    run: str
    state: str
    began: float | None = None
    rows: int | None = None
    committed: float | None = None  # share of its shards
    good: int | None = None
    quarantined: int | None = None
    rate: float | None = None
    seconds: float | None = None
    cost: float | None = None
    answers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    shifts: tuple[Shift, ...] = ()
    compared: bool = False  # with the completed run before it
    trouble: str = ""
    failure: str = ""
    command: str = ""


@dataclass(frozen=True)
class NightsPage:
    """The runs of one job, newest first. `unreadable` are run directories that cannot be read and
    may belong to any job: {run key: reason}."""

    job: str
    nights: tuple[NightLine, ...]
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @property
    def latest(self) -> NightLine | None:
        return self.nights[0] if self.nights else None


def night_rows(page: NightsPage) -> list[dict[str, str]]:
    """Return one row for each run."""
    return [_row(night, any(n.cost is not None for n in page.nights)) for night in page.nights]


def _row(night: NightLine, with_cost: bool) -> dict[str, str]:
    began = DASH
    if night.began is not None:
        began = datetime.fromtimestamp(night.began, UTC).strftime("%Y-%m-%d %H:%M")
    state = night.state
    if night.committed is not None and night.state != "completed":
        state = f"{state} {night.committed:.0%}"
    cost = {"cost": DASH if night.cost is None else money(night.cost)} if with_cost else {}
    return {
        "begun (UTC)": began,
        "state": state,
        "rows": number(night.rows, 0),
        "in quarantine": number(night.quarantined, 0),
        "rows/s": number(night.rate, 0),
        "time": duration(night.seconds) if night.seconds is not None else DASH,
        **cost,
        "answers": _answers_said(night),
        "run": night.run_key,
    }


def _answers_said(night: NightLine) -> str:
    """Return the shifts from the run before, or whether they were looked for."""
    if night.shifts:
        return "; ".join(f"{shift.kind} {shift.moved:.1%} otherwise" for shift in night.shifts)
    if not night.answers:
        return DASH
    return "no shift" if night.compared else "not compared"


def answers_table(page: NightsPage) -> list[dict[str, str]]:
    """Return shares of answers, a column for each run, newest first: by label if labels are
    counted, otherwise by length and by finish reason. Empty if no run counts answers."""
    told = [night for night in page.nights if night.answers]
    kinds = ("labels",) if any("labels" in n.answers for n in told) else ("lengths", "ends")
    rows = []
    for kind in kinds:
        names = shown_names(told, kind)
        prefix = {"lengths": " tokens", "ends": ""}.get(kind, "")
        for name in names:
            title = f"ended: {name}" if kind == "ends" else f"{name}{prefix}"
            shares = {night.run_key: _share(night.answers.get(kind, {}), name) for night in told}
            rows.append({"": title, **shares})
    return rows


def shown_names(nights: Sequence[NightLine], kind: str) -> list[str]:
    """Return the most common names over all runs; lengths in their order."""
    sums: dict[str, float] = {}
    for night in nights:
        for name, count in night.answers.get(kind, {}).items():
            sums[name] = sums.get(name, 0.0) + count
    common = sorted(sums, key=lambda name: -sums[name])[:LABELS_SHOWN]
    if kind == "lengths":
        common.sort(key=lambda name: int(name.partition("-")[0].replace(",", "")))
    return common


def _share(counts: Mapping[str, float], name: str) -> str:
    total = sum(counts.values())
    return f"{counts.get(name, 0.0) / total:.1%}" if total else DASH


def nights_markdown(page: NightsPage, plots: bool = True) -> str:
    """Return the page as Markdown; `plots`: with its plot as an inline image."""
    lines = [f"# {markdown_text(page.job)}: the last {counted(len(page.nights), 'night')}", ""]
    lines += [f"- **{markdown_text(line)}**" for line in headlines(page)]
    lines += [""] if headlines(page) else []
    lines += table_lines(night_rows(page))
    picture = of_nights(page.nights) if plots else None
    if picture is not None:
        lines += ["", f"![Nights]({data_uri(picture)})"]
    if answers := answers_table(page):
        lines += ["", "## Answers", "", *table_lines(answers)]
    for title, pairs in (("Failed", failures(page)), ("Not readable", unread(page))):
        notes = [f"- {markdown_text(f'{key}: {why}')}" for key, why in pairs]
        lines += ["", f"## {title}", "", *notes] if notes else []
    return "\n".join(lines) + "\n"


def headlines(page: NightsPage) -> list[str]:
    """Return what to read first about the newest run."""
    night = page.latest
    if night is None:
        return []
    found = [] if night.state == "completed" else [f"{night.run_key} is {night.state}"]
    if night.failure:
        found = [f"{night.run_key} failed: {night.failure}"]
    return found + [f"{night.run_key}: {shift.line()}" for shift in night.shifts]


def failures(page: NightsPage) -> list[tuple[str, str]]:
    """Return (run key, why its last attempt failed and the command that runs it again)."""
    return [
        (night.run_key, f"{night.failure}; {night.command}" if night.command else night.failure)
        for night in page.nights
        if night.failure
    ]


def unread(page: NightsPage) -> list[tuple[str, str]]:
    """Return (run key, reason) of what cannot be read."""
    own = [(night.run_key, night.trouble) for night in page.nights if night.trouble]
    return own + list(page.unreadable.items())
