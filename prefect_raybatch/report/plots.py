"""The plots of a run as SVG, from the figures in its report: throughput, task times, the shard map,
balance between engines. Pure; sizes are bounded as `Charts` is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from prefect_raybatch.ledger.records import Charts, RunReport, WorkerStats
from prefect_raybatch.report.svg import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    RED,
    SKY,
    Box,
    Scale,
    curve,
    data_uri,
    document,
    legend,
    line,
    linear,
    logarithmic,
    num,
    rect,
    short,
    shorten,
    span,
    stacked,
    text,
    ticks,
)

WIDTH = 760
LEFT, RIGHT = 64, WIDTH - 20
STAGES = ("read", "prepare", "engine", "finish")  # in their order; JSON keeps another
BARS = 24  # engines shown
MANY = 0.01  # failed rows of a cell's, from where it is shown as bad
FEW_COLOUR, MANY_COLOUR, WORK_COLOUR = SKY, RED, ORANGE
NAMES = {
    "throughput": "Throughput over time",
    "durations": "Task times",
    "shards": "Shard map",
    "engines": "Balance between engines",
}


def of_report(report: RunReport) -> dict[str, str]:
    """{name: SVG} of what a report knows; names are those of `NAMES`, in their order."""
    return of_charts(report.charts, report.workers)


def of_charts(
    charts: Charts, workers: Sequence[WorkerStats] = (), working: int = 0
) -> dict[str, str]:
    """The same, of a run that goes on: about `working` shards are in engines now."""
    made = {}
    if charts.throughput:
        made["throughput"] = throughput(charts.throughput)
    if charts.durations:
        made["durations"] = durations(charts.durations)
    if charts.cells:
        made["shards"] = shard_map(charts.cells, working)
    if workers:
        made["engines"] = engines(workers)
    return made


def live(charts: Charts, working: int = 0) -> str | None:
    """Throughput and the shard map in one picture, as a data URI; None before the first commit."""
    made = of_charts(charts, working=working)
    shown = [made[name] for name in ("throughput", "shards") if name in made]
    return data_uri(stacked(shown)) if "throughput" in made else None


def whole(report: RunReport) -> str | None:
    """All plots of a report in one picture, as a data URI; None where there are none."""
    made = of_report(report)
    return data_uri(stacked(list(made.values()))) if made else None


def markdown(report: RunReport) -> list[str]:
    """Lines of Markdown that show the plots of a report, as images within the text."""
    lines: list[str] = []
    for name, picture in of_report(report).items():
        lines += [f"![{NAMES[name]}]({data_uri(picture)})", ""]
    return lines[:-1]


# --- throughput ---------------------------------------------------------------------------------


def throughput(points: Sequence[tuple[float, ...]]) -> str:
    """Rows/s above, tokens/s in and out below, over seconds of work.

    `points`: (end of the time, rows/s, prompt tokens/s, output tokens/s).
    """
    end = points[-1][0]
    unit, name = span(end)
    x = linear(0, end, LEFT, RIGHT)
    body = [text(16, 26, NAMES["throughput"], size=15)]
    upper, lower = Box(LEFT, 66, RIGHT, 176), Box(LEFT, 226, RIGHT, 326)
    body += _rates(upper, points, {1: (BLUE, "rows/s")}, "rows/s")
    kinds = {2: (GREEN, "tokens in"), 3: (ORANGE, "tokens out")}
    body += _rates(lower, points, kinds, "tokens/s")
    marks = [(value * unit, f"{value:g}") for value in ticks(0, end / unit, 8)]
    body.append(line(LEFT, upper.bottom, RIGHT, upper.bottom, GREY))
    body.append(lower.x_axis(marks, x, f"time of work, {name}"))
    body.append(legend(WIDTH - 200, 26 + 190, list(kinds.values())))
    return document(NAMES["throughput"], WIDTH, 372, body)


def _rates(
    box: Box,
    points: Sequence[tuple[float, ...]],
    kinds: Mapping[int, tuple[str, str]],
    title: str,
) -> Iterator[str]:
    high = max(max(point[kind] for point in points) for kind in kinds) or 1.0
    y, grid = box.y_axis(high * 1.05, title)
    x = linear(0, points[-1][0], box.left, box.right)
    yield grid
    for kind, (colour, words) in kinds.items():
        corners, before = [], 0.0
        for point in points:  # a rate holds for the time up to its point
            corners += [(x(before), y(point[kind])), (x(point[0]), y(point[kind]))]
            before = point[0]
        yield curve(corners, colour, f'data-series="{words}"')


# --- task times ---------------------------------------------------------------------------------


def durations(stages: Mapping[str, tuple[float, ...]]) -> str:
    """A box a stage: middle half of its tasks, 5 % to 95 %, and the longest as a dot.

    `stages`: seconds (p5, p25, median, p75, p95, longest).
    """
    stages = {name: stages[name] for name in sorted(stages, key=(*STAGES, *stages).index)}
    low = max(1e-3, min(values[0] for values in stages.values()))
    high = max(low * 1.01, *(values[5] for values in stages.values()))
    left, right = 90, WIDTH - 96
    wide = high / low > 20
    if wide:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        x = logarithmic(low, high, left, right)
        decades = range(round(math.log10(low)), round(math.log10(high)) + 1)
        marks = [(10.0**power, f"{10.0**power:g}") for power in decades]
    else:
        x = linear(0, high, left, right)
        marks = [(value, f"{value:g}") for value in ticks(0, high, 6)]
    bottom = 50 + 40 * len(stages)
    body = [text(16, 26, NAMES["durations"], size=15)]
    body += [line(x(value), 44, x(value), bottom) for value, _ in marks]
    for row, (stage, values) in enumerate(stages.items()):
        body.append(_box(stage, values, x, 68 + 40 * row, right))
    note = "seconds a task (log scale)" if wide else "seconds a task"
    axis = Box(left, 44, right, bottom)
    body.append(axis.x_axis(marks, x, f"{note}: box 25-75 %, line 5-95 %, dot the longest"))
    return document(NAMES["durations"], WIDTH, bottom + 46, body)


def _box(stage: str, values: Sequence[float], x: Scale, y: float, right: float) -> str:
    p5, p25, median, p75, p95, longest = (x(value) for value in values)
    more = 'stroke-width="2"'
    return (
        text(82, y + 4, stage, "end")
        + line(p5, y, p95, y, BLUE, more)
        + rect(p25, y - 9, max(p75 - p25, 1), 18, BLUE, 'data-stage="box" fill-opacity="0.75"')
        + line(median, y - 9, median, y + 9, INK, more)
        + f'<circle cx="{num(longest)}" cy="{num(y)}" r="3.5" fill="{RED}"/>'
        + text(right + 8, y + 4, f"{values[2]:.3g} s", size=11, fill=GREY)
    )


# --- the shard map ------------------------------------------------------------------------------


def shard_map(cells: Sequence[tuple[int, ...]], working: int = 0) -> str:
    """A cell a run of neighbouring shards, filled from the left as they are committed.

    `cells`: (shards, committed, failed rows, committed rows). `working` shards, the first that are
    not committed, are shown as in work: engines take them about in order.
    """
    columns = min(len(cells), max(10, math.ceil(math.sqrt(len(cells) * 4))))
    size = min(24.0, (RIGHT - LEFT) / columns)
    rows = -(-len(cells) // columns)
    a_cell = cells[0][0]
    title = f"a cell is {a_cell:,} shards" if a_cell > 1 else "a cell is a shard"
    body = [text(16, 26, f"{NAMES['shards']}: {title}", size=15)]
    key = {
        BLUE: "committed",
        FEW_COLOUR: "some rows failed",
        MANY_COLOUR: f"{MANY:.0%} or more failed",
        **({WORK_COLOUR: "in work, about"} if working else {}),
        PALE: "pending",
    }
    body.append(legend(LEFT, 50, list(key.items())))
    lines: dict[str, list[str]] = {colour: [] for colour in key}
    for colour, row, start, end in _spans(cells, columns, working):
        lines[colour].append(f"M{_cells(start)} {row}h{_cells(end - start)}")
    # A line as thick as a cell takes half the characters of a rectangle.
    place = f'transform="translate({LEFT} {num(66 + size / 2)}) scale({size:.4g})" fill="none"'
    for colour, parts in lines.items():
        if parts:
            body.append(f'<path {place} stroke="{colour}" d="{"".join(parts)}"/>')
    body.append(_grid(len(cells), columns, rows, size))
    every = max(1, math.ceil(16 / size))
    for row in range(0, rows, every):
        first = short(row * columns * a_cell)
        body.append(text(LEFT - 8, 66 + row * size + min(size, 12), first, "end", 11, GREY))
    return document(NAMES["shards"], WIDTH, 66 + rows * size + 20, body)


def _spans(
    cells: Sequence[tuple[int, ...]], columns: int, working: int
) -> Iterator[tuple[str, int, float, float]]:
    """(colour, row, from, to) in cells, neighbours of a colour joined."""
    pieces: list[tuple[str, int, float, float]] = []
    for index, (shards, committed, failed, done) in enumerate(cells):
        row, column = divmod(index, columns)
        busy = min(working, shards - committed)
        working -= busy
        at = float(column)
        bad = MANY_COLOUR if failed >= MANY * done else FEW_COLOUR
        colours = (bad if failed else BLUE, WORK_COLOUR, PALE)
        counts = (committed, busy, shards - committed - busy)
        for colour, number in zip(colours, counts, strict=True):
            if number > 0:
                pieces.append((colour, row, at, at + number / shards))
                at += number / shards
    for (colour, row), group in groupby(pieces, key=lambda piece: piece[:2]):
        joined = list(group)
        yield colour, row, joined[0][2], joined[-1][3]


def _cells(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _grid(cells: int, columns: int, rows: int, size: float) -> str:
    """White lines between the cells."""
    width, height = columns * size, rows * size
    lines = [f"M{num(LEFT + c * size)} 66v{num(height)}" for c in range(1, columns)]
    lines += [f"M{LEFT} {num(66 + r * size)}h{num(width)}" for r in range(1, rows)]
    thick = 1.5 if size > 12 else 0.7
    return f'<path d="{"".join(lines)}" stroke="#FFFFFF" stroke-width="{thick}" fill="none"/>'


# --- balance ------------------------------------------------------------------------------------


def engines(workers: Sequence[WorkerStats]) -> str:
    """A bar an engine: rows it answered, with the mean of all as a line."""
    shown = sorted(workers, key=lambda worker: -worker.rows)[:BARS]
    mean = sum(worker.rows for worker in workers) / len(workers)
    high = max(1, *(worker.rows for worker in shown))
    left, right, bottom = 220, WIDTH - 150, 48 + 22 * len(shown)
    x = linear(0, high, left, right)
    more = len(workers) - len(shown)
    title = NAMES["engines"] + (f" ({more} more not shown)" if more else "")
    body = [text(16, 26, title, size=15)]
    for row, worker in enumerate(shown):
        y = 44 + 22 * row
        note = f"{short(worker.rows)} rows, {worker.shards:,} shards"
        body.append(text(left - 8, y + 13, shorten(worker.name, 30), "end", 11))
        body.append(rect(left, y, x(worker.rows) - left, 16, BLUE, 'data-bar="engine"'))
        body.append(text(right + 10, y + 13, note, size=11, fill=GREY))
    body.append(line(x(mean), 40, x(mean), bottom, INK, 'stroke-dasharray="4 3"'))
    marks = [(value, short(value)) for value in ticks(0, high, 5)]
    body.append(
        Box(left, 40, right, bottom).x_axis(marks, x, "rows; the dashed line is the mean engine")
    )
    return document(NAMES["engines"], WIDTH, bottom + 46, body)
