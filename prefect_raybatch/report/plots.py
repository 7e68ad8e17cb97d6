"""The plots of a run as SVG, from the figures in its report. Pure.

`drawing`, with matplotlib, is imported only if there is something to draw.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prefect_raybatch.report.records import Charts, RunReport, WorkerStats

if TYPE_CHECKING:
    from prefect_raybatch.report.drawing import Plot
    from prefect_raybatch.report.run_history import HistoryLine

NAMES_DRAWN = 7  # most common answers, which have their own colour
NAMES = {
    "throughput": "Throughput over time",
    "durations": "Task times",
    "shards": "Shard map",
    "engines": "Balance between engines",
}


def report_plots(report: RunReport) -> dict[str, str]:
    """Return {name: SVG} of the plots for which a report has data, in the order of `NAMES`."""
    return chart_plots(report.charts, report.workers)


def chart_plots(
    charts: Charts, workers: Sequence[WorkerStats] = (), working: int = 0
) -> dict[str, str]:
    """Return {name: SVG} of the plots of a run.

    `working` is the approximate number of shards that engines are working on now.
    """
    return {n: picture_of([n], [plot]) for n, plot in _plots(charts, workers, working).items()}


def live(charts: Charts, working: int = 0) -> str | None:
    """Return throughput plot and shard map as one image (data URI); None before the first commit.

    `working` is the approximate number of shards that engines are working on now.
    """
    if not charts.throughput:
        return None
    return _image(_plots(Charts(charts.throughput, {}, charts.cells), (), working))


def combined_plot(report: RunReport) -> str | None:
    """Return all plots of a report as one image (data URI); None if there are none."""
    return _image(_plots(report.charts, report.workers))


def image_lines(report: RunReport) -> list[str]:
    """Return Markdown lines that show the plots of a report as inline images."""
    lines: list[str] = []
    for name, picture in report_plots(report).items():
        lines += [f"![{NAMES[name]}]({data_uri(picture)})", ""]
    return lines[:-1]


def history_plot(runs: Sequence[HistoryLine]) -> str | None:
    """Return bars of rows and answers of `runs` (newest first) as SVG; None if none is complete."""
    counted_runs = [run for run in reversed(runs) if run.good is not None]
    if not counted_runs:
        return None
    from prefect_raybatch.report import drawing

    names = [run.run_key for run in counted_runs]
    rows = {
        "answered": [float(run.good or 0) for run in counted_runs],
        "in quarantine": [float(run.quarantined or 0) for run in counted_runs],
    }
    bars = [drawing.run_bars("Rows per run", names, rows, share=False)]
    kind = "labels" if any("labels" in run.answers for run in counted_runs) else "lengths"
    runs_with_answers = [run for run in counted_runs if run.answers.get(kind)]
    if runs_with_answers:
        titles = {"labels": "Answers by label", "lengths": "Answers by length in tokens"}
        shares = _shares([run.answers[kind] for run in runs_with_answers])
        keys = [run.run_key for run in runs_with_answers]
        bars.append(drawing.run_bars(titles[kind], keys, shares, share=True))
    return drawing.svg("Runs", bars)


def _shares(counts: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return {name: its share in each run} of the 7 most common names, and of "others".

    `counts` has {name: number} of each run.
    """
    sums: dict[str, float] = {}
    for run_counts in counts:
        for name, number in run_counts.items():
            sums[name] = sums.get(name, 0.0) + number
    common = sorted(sums, key=lambda name: -sums[name])
    shown = common[:NAMES_DRAWN]
    totals = [sum(run_counts.values()) or 1.0 for run_counts in counts]
    shares = {
        name: [run.get(name, 0.0) / total for run, total in zip(counts, totals, strict=True)]
        for name in shown
    }
    if len(common) > len(shown):
        others = [1.0 - sum(values) for values in zip(*shares.values(), strict=True)]
        shares["others"] = [max(0.0, value) for value in others]
    return shares


def data_uri(picture: str) -> str:
    """Return an SVG picture as a data URI."""
    return "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode()


def _plots(charts: Charts, workers: Sequence[WorkerStats], working: int = 0) -> dict[str, Plot]:
    if not (charts.throughput or charts.durations or charts.cells or workers):
        return {}
    from prefect_raybatch.report import drawing

    plots = {}
    if charts.throughput:
        plots["throughput"] = drawing.throughput(NAMES["throughput"], charts.throughput)
    if charts.durations:
        plots["durations"] = drawing.durations(NAMES["durations"], charts.durations)
    if charts.cells:
        plots["shards"] = drawing.shard_map(NAMES["shards"], charts.cells, working)
    if len(workers) > 1:
        plots["engines"] = drawing.engines(NAMES["engines"], workers)
    return plots


def _image(plots: dict[str, Plot]) -> str | None:
    return data_uri(picture_of(list(plots), list(plots.values()))) if plots else None


def picture_of(names: Sequence[str], plots: Sequence[Plot]) -> str:
    """Return plots, one below the other, as one SVG; `names` are the plots' keys in `NAMES`."""
    from prefect_raybatch.report import drawing

    return drawing.svg(", ".join(NAMES[name] for name in names), plots)
