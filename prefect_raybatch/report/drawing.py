"""Draws the plots of a run with matplotlib; their size does not grow with the run's.

Only this module imports matplotlib, which takes a second and 50 MB, so import it only to draw a
plot. It does not use pyplot, whose state belongs to the user's own code in the same process.
"""

from __future__ import annotations

import io
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter

from prefect_raybatch.harmless import clean
from prefect_raybatch.report.records import WorkerStats

# Okabe and Ito's colours, distinguishable with any colour vision.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, GREY, PALE, INK, WHITE = "#56B4E9", "#6B7280", "#E5E7EB", "#1F2937", "#FFFFFF"
PURPLE = "#CC79A7"

WIDTH = 760  # all lengths are in pixels
LEFT, RIGHT = 64, WIDTH - 20
GAP = 14  # between stacked plots
STAGES = ("read", "prepare", "engine", "finish")  # order of the plot; JSON has another
BARS = 24  # engines shown
FEW_RUNS, RUN_NAME = 7, 16  # least number of runs on the x axis; characters of a run's name
CELL = 24.0  # largest side of a cell of the shard map
MAP_STEP = 0.25  # coordinates of the shard map are multiples of it, which keeps them short
MANY = 0.01  # share of failed rows from which a cell of the shard map is red
COMMITTED, FEW, FAILED, WORK, PENDING = "committed", "few-failed", "many-failed", "work", "pending"
COLOURS = {COMMITTED: BLUE, FEW: SKY, FAILED: RED, WORK: ORANGE, PENDING: PALE}

STYLE: dict[Any, Any] = {
    "figure.dpi": 72,  # a point is a pixel
    "savefig.dpi": "figure",
    "font.size": 11,
    "text.color": GREY,
    "text.parse_math": False,  # names of hosts may hold a $
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.facecolor": "none",
    "axes.grid": True,
    "grid.color": PALE,
    "grid.linewidth": 1,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "ytick.major.size": 0,
    "ytick.major.pad": 8,
    "legend.frameon": False,
    "legend.handlelength": 0.9,
    "legend.handleheight": 0.9,
    "legend.columnspacing": 1.4,
    "legend.handletextpad": 0.5,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0,
    "path.simplify": False,
    "svg.fonttype": "none",  # text stays text: light, and found by a search
}
LegendPlace = Literal["upper left", "upper right"]
Line = tuple[tuple[float, float], tuple[float, float]]
_LOCK = threading.Lock()  # matplotlib's settings are the whole process's


@dataclass(frozen=True)
class Panel:
    """The area of one plot in a figure.

    It is `height` pixels high, and its upper edge is `top` pixels below that of the figure.
    """

    figure: Figure
    top: float
    height: float

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Convert pixels from the panel's upper left corner to matplotlib's figure coordinates."""
        width, height = self.figure.get_size_inches() * self.figure.dpi
        return x / width, 1 - (self.top + y) / height

    def axes(self, left: float, top: float, right: float, bottom: float) -> Axes:
        """Add axes to the figure; the edges are in pixels from the panel's upper left corner."""
        (x, y), (x2, y2) = self.place(left, bottom), self.place(right, top)
        return self.figure.add_axes((x, y, x2 - x, y2 - y))

    def text(self, x: float, y: float, words: str, **style: Any) -> None:
        self.figure.text(*self.place(x, y), clean(words), **style)

    def title(self, words: str) -> None:
        self.text(16, 26, words, size=15, color=INK)

    def legend(
        self, x: float, y: float, entries: Sequence[tuple[str, str]], loc: LegendPlace
    ) -> None:
        """Draw a row of coloured squares with their names; `entries` are (colour, name).

        Corner `loc` of the row is at (`x`, `y`), in pixels.
        """
        self.figure.legend(
            handles=[Patch(color=colour, label=words) for colour, words in entries],
            loc=loc,
            bbox_to_anchor=self.place(x, y),
            ncols=len(entries),
        )

    def ground(self) -> None:
        """Draw a white background with round corners, since the page around it may be dark."""
        width, height = self.figure.get_size_inches() * self.figure.dpi
        box = FancyBboxPatch(
            (0, (height - self.top - self.height) / height),
            1,
            self.height / height,
            boxstyle=f"round,pad=0,rounding_size={6 / width}",
            mutation_aspect=width / height,
            transform=self.figure.transFigure,
            facecolor=WHITE,
            edgecolor="none",
            zorder=-1,
        )
        self.figure.add_artist(box)


@dataclass(frozen=True)
class Plot:
    """A plot: the height of its panel in pixels, and the function that draws it into the panel."""

    height: float
    draw: Callable[[Panel], None]


def svg(title: str, plots: Sequence[Plot]) -> str:
    """Return the plots, one below the other, as one SVG element for an HTML page.

    The same plots give the same bytes.
    """
    tall = sum(plot.height for plot in plots) + GAP * (len(plots) - 1)
    # Ignore the settings of the user's own code; the backend cannot be changed.
    default = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith("backend")}
    # Ids within the SVG are reproducible, and differ from those of other plots in a page.
    style = {**default, **STYLE, "svg.hashsalt": title}
    with _LOCK, matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH / 72, tall / 72))
        figure.patch.set_visible(False)
        top = 0.0
        for plot in plots:
            panel = Panel(figure, top, plot.height)
            panel.ground()
            plot.draw(panel)
            top += plot.height + GAP
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata={**nothing, "Title": clean(title)})
    return _for_pages(file.getvalue(), title, tall)


def _for_pages(text: str, title: str, tall: float) -> str:
    """Turn matplotlib's SVG file into an element for an HTML page, `tall` pixels high.

    The XML header and what a page does not need are removed.
    """
    body = text[text.index("<svg") :].partition(">")[2]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r' id="[a-z0-9.]+_\d+"', "", body)  # nothing refers to these ids
    # matplotlib repeats a list of fonts for each text; the page sets the font once.
    body = re.sub(r"font-family: [^;\"]*; |font: [^;\"]*; ", "", body)
    body = re.sub(r' transform="rotate\(-0 [^"]*"', "", body)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {WIDTH} {tall:g}" width="{WIDTH}" height="{tall:g}" role="img" '
        f'font-family="system-ui, sans-serif" aria-label="{escape(clean(title))}">{body.strip()}'
    )


def shorten(words: str, length: int) -> str:
    """Cut the middle out of a text longer than `length`, because host names differ at both ends."""
    if len(words) <= length:
        return words
    head = (length - 1) // 2
    return f"{words[:head]}…{words[len(words) - (length - 1 - head) :]}"


def short(value: float, _: object = None) -> str:
    """Return a number as text for an axis, e.g. 1.2k or 3.4M; `_` is not used."""
    for size, mark in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{mark}"
    return f"{value:.3g}"


def span(seconds: float) -> tuple[float, str]:
    """Return the unit to show a duration in, as (seconds per unit, name of the unit)."""
    if seconds >= 3 * 3600:
        return 3600.0, "h"
    return (60.0, "min") if seconds >= 180 else (1.0, "s")


# --- throughput ---------------------------------------------------------------------------------


def throughput(title: str, points: Sequence[tuple[float, ...]]) -> Plot:
    """Plot rows/s above, and tokens/s in and out below, over seconds of work.

    `points` are (end of the interval in seconds, rows/s, prompt tokens/s, output tokens/s), at
    least one.
    """
    unit, name = span(points[-1][0])
    edges = [0.0, *(point[0] / unit for point in points)]
    kinds = {2: (GREEN, "tokens in"), 3: (ORANGE, "tokens out")}

    def draw(panel: Panel) -> None:
        panel.title(title)
        upper, lower = panel.axes(LEFT, 66, RIGHT, 176), panel.axes(LEFT, 226, RIGHT, 326)
        _rates(upper, edges, points, {1: (BLUE, "rows/s")})
        _rates(lower, edges, points, kinds)
        upper.tick_params(bottom=False, labelbottom=False)
        lower.set_xlabel(f"working time, {name}")
        panel.text(LEFT - 8, 56, "rows/s")
        panel.text(LEFT - 8, 216, "tokens/s")
        panel.legend(RIGHT, 206, list(kinds.values()), "upper right")

    return Plot(372, draw)


def _rates(
    axes: Axes,
    edges: Sequence[float],
    points: Sequence[tuple[float, ...]],
    kinds: Mapping[int, tuple[str, str]],
) -> None:
    """Draw a step line for each of `kinds`, {index into a point: (colour, name)}.

    The rates of point i apply from `edges[i]` to `edges[i + 1]`.
    """
    for kind, (colour, words) in kinds.items():
        rates = [point[kind] for point in points]
        axes.stairs(
            rates,
            edges,
            baseline=None,
            color=colour,
            linewidth=2,
            clip_on=False,
            gid=re.sub(r"\W", "-", words),
        )
    high = max(max(point[kind] for point in points) for kind in kinds) or 1.0
    axes.set(xlim=(0, edges[-1]), ylim=(0, high * 1.05))
    axes.grid(axis="x", visible=False)
    axes.locator_params("y", nbins=4)
    axes.locator_params("x", nbins=8)
    axes.yaxis.set_major_formatter(FuncFormatter(short))
    axes.xaxis.set_major_formatter(FuncFormatter(short))


# --- task times ---------------------------------------------------------------------------------


def durations(title: str, stages: Mapping[str, tuple[float, ...]]) -> Plot:
    """Plot a box per stage: 25-75 % of its tasks, with a line for 5-95 % and a dot for the longest.

    `stages` is {stage: seconds of its tasks as (p5, p25, median, p75, p95, longest)}.
    """
    names = sorted(stages, key=(*STAGES, *stages).index)
    low = max(1e-3, min(values[0] for values in stages.values()))
    high = max(low * 1.01, *(values[5] for values in stages.values()))
    wide = high / low > 20
    bottom = 50 + 40 * len(names)

    def draw(panel: Panel) -> None:
        panel.title(title)
        axes = panel.axes(90, 44, WIDTH - 96, bottom)
        if wide:
            axes.set_xscale("log")
            axes.minorticks_off()
            low_decade, high_decade = math.floor(math.log10(low)), math.ceil(math.log10(high))
            axes.set_xticks([10.0**power for power in range(low_decade, high_decade + 1)])
            axes.set_xlim(10.0**low_decade, 10.0**high_decade)
        else:
            axes.set_xlim(0, high)
            axes.locator_params("x", nbins=6)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _boxes(axes, [stages[name] for name in names], axes.get_xlim()[0])
        axes.set_yticks(range(len(names)), [clean(name) for name in names], color=INK, size=12)
        axes.set_ylim(len(names) - 0.5 + 3 / 40, -0.5 - 3 / 40)
        axes.grid(axis="y", visible=False)
        note = "seconds per task (log scale)" if wide else "seconds per task"
        axes.set_xlabel(f"{note}: box 25-75 %, line 5-95 %, dot maximum; right: median")
        for row, name in enumerate(names):
            panel.text(WIDTH - 88, 71 + 40 * row, f"{stages[name][2]:.3g} s")

    return Plot(bottom + 46, draw)


def _boxes(axes: Axes, quantiles: Sequence[Sequence[float]], least: float) -> None:
    """Draw the box, line and dot of each stage; `quantiles` are as in `durations`.

    The axis starts at `least`. Smaller values are drawn at `least`, for example 0 on a log scale.
    `Axes.bxp` is not used: it reads every setting of matplotlib, which loads pyplot and a backend.
    """
    p5, p25, median, p75, p95, longest = np.maximum(quantiles, least).T
    rows = np.arange(len(quantiles))
    style: dict[str, Any] = {"linewidth": 2, "clip_on": False}
    axes.hlines(rows, p5, p95, BLUE, **style)
    boxes = axes.barh(rows, p75 - p25, 0.45, p25, color=BLUE, alpha=0.75)
    for row, box in enumerate(boxes):
        box.set(gid=f"box-{row}", clip_on=False)
    axes.vlines(median, rows - 0.225, rows + 0.225, INK, **style)
    axes.plot(longest, rows, "o", markersize=7, color=RED, markeredgecolor="none", clip_on=False)


# --- the shard map ------------------------------------------------------------------------------


def shard_map(title: str, cells: Sequence[tuple[int, ...]], working: int = 0) -> Plot:
    """Plot a cell for each group of neighbouring shards, filled from the left once committed.

    `cells` are (shards, committed, failed rows, committed rows). The first `working` shards that
    are not committed are shown as in progress: engines take shards roughly in order.
    """
    columns = min(len(cells), max(10, math.ceil(math.sqrt(len(cells) * 4))))
    size = min(CELL, (RIGHT - LEFT) / columns // MAP_STEP * MAP_STEP)
    rows = -(-len(cells) // columns)
    a_cell = cells[0][0]
    what = f"one cell is {a_cell:,} shards" if a_cell > 1 else "one cell per shard"
    names = {
        COMMITTED: "committed",
        FEW: "some rows failed",
        FAILED: f"{MANY:.0%} or more failed",
        **({WORK: "in progress (estimate)"} if working else {}),
        PENDING: "pending",
    }

    def draw(panel: Panel) -> None:
        panel.title(f"{title}: {what}")
        entries = [(COLOURS[kind], words) for kind, words in names.items()]
        panel.legend(LEFT, 41, entries, "upper left")
        axes = panel.axes(LEFT, 66, LEFT + columns * size, 66 + rows * size)
        axes.set(xlim=(0, columns * size), ylim=(rows * size, 0))
        axes.axis("off")
        # One path of lines as thick as a cell: rectangles would take ten times the text. Pending
        # cells lie below the others.
        lines: dict[str, list[Line]] = {kind: [] for kind in (PENDING, *COLOURS)}
        for row in range(rows):
            last = min(columns, len(cells) - row * columns)
            lines[PENDING].append(_along(row, 0, last * size, size))
        for kind, row, start, end in _spans(cells, columns, size, working):
            lines[kind].append(_along(row, start, end, size))
        for kind, kind_lines in lines.items():
            _lines(axes, kind_lines, COLOURS[kind], size, kind)
        upright = [((c * size, 0.0), (c * size, rows * size)) for c in range(1, columns)]
        across = [((0.0, r * size), (columns * size, r * size)) for r in range(1, rows)]
        _lines(axes, upright + across, WHITE, 1.5 if size > 12 else 0.7, "grid")
        for row in range(0, rows, max(1, math.ceil(16 / size))):
            first = short(row * columns * a_cell)
            panel.text(LEFT - 8, 66 + row * size + min(size, 12), first, ha="right")

    return Plot(66 + rows * size + 20, draw)


def _along(row: int, start: float, end: float, size: float) -> Line:
    """Return a line from `start` to `end` through the middle of a row of cells, in pixels."""
    y = row * size + size / 2
    return (start, y), (end, y)


def _lines(axes: Axes, lines: Sequence[Line], colour: str, width: float, name: str) -> None:
    """Draw straight lines as one path; `name` becomes its id in the SVG."""
    if lines:
        corners = [point for line in lines for point in line]
        path = Path(corners, [Path.MOVETO, Path.LINETO] * len(lines))
        axes.add_patch(
            PathPatch(
                path,
                fill=False,
                edgecolor=colour,
                linewidth=width,
                capstyle="butt",
                clip_on=False,
                gid=name,
            )
        )


def _spans(
    cells: Sequence[tuple[int, ...]], columns: int, size: float, working: int
) -> Iterator[tuple[str, int, float, float]]:
    """Yield (kind, row, left, right) of the coloured stretches of the shard map, in pixels.

    Neighbouring stretches of one kind are joined; pending ones are left out. `size` is the side of
    a cell, `working` as in `shard_map`.
    """
    pieces: list[tuple[str, int, float, float]] = []
    for index, (shards, committed, failed, done) in enumerate(cells):
        row, column = divmod(index, columns)
        busy = min(working, shards - committed)
        working -= busy
        bad = FAILED if failed >= MANY * done else FEW
        kinds = (bad if failed else COMMITTED, WORK, PENDING)
        counts = (committed, busy, shards - committed - busy)
        at, start = 0, column * size
        for kind, number in zip(kinds, counts, strict=True):
            at += number
            end = round((column + at / shards) * size / MAP_STEP) * MAP_STEP
            if end > start:
                pieces.append((kind, row, start, end))
            start = end
    for (kind, row), group in groupby(pieces, key=lambda piece: piece[:2]):
        joined = list(group)
        if kind != PENDING:
            yield kind, row, joined[0][2], joined[-1][3]


# --- balance ------------------------------------------------------------------------------------


def engines(title: str, workers: Sequence[WorkerStats]) -> Plot:
    """Plot a bar for each engine's rows, most rows first, and the mean of all engines as a line.

    Only the first 24 engines are shown.
    """
    shown = sorted(workers, key=lambda worker: -worker.rows)[:BARS]
    mean = sum(worker.rows for worker in workers) / len(workers)
    right, bottom = WIDTH - 150, 48 + 22 * len(shown)
    hidden = len(workers) - len(shown)
    names = [shorten(clean(worker.name), 30) for worker in shown]

    def draw(panel: Panel) -> None:
        panel.title(title + (f" ({hidden} more not shown)" if hidden else ""))
        axes = panel.axes(220, 40, right, bottom)
        bars = axes.barh(range(len(shown)), [worker.rows for worker in shown], 16 / 22, color=BLUE)
        for row, bar in enumerate(bars):
            bar.set(gid=f"engine-{row}", clip_on=False)
        axes.axvline(mean, color=INK, linewidth=1, dashes=(4, 3), gid="mean")
        axes.set_yticks(range(len(shown)), names, color=INK)
        axes.set(xlim=(0, max(1, shown[0].rows)), ylim=(len(shown) - 0.5 + 4 / 22, -0.5 - 4 / 22))
        axes.grid(visible=False)
        axes.locator_params("x", nbins=5)
        axes.xaxis.set_major_formatter(FuncFormatter(short))
        axes.set_xlabel("rows per engine; dashed line: mean")
        for row, worker in enumerate(shown):
            note = f"{short(worker.rows)} rows, {worker.shards:,} shards"
            panel.text(right + 10, 59 + 22 * row, note)

    return Plot(bottom + 46, draw)


# --- runs ---------------------------------------------------------------------------------------


def run_bars(
    title: str, names: Sequence[str], parts: Mapping[str, Sequence[float]], share: bool
) -> Plot:
    """Plot a stacked bar per run, oldest first; `parts` is {name: value in each run}.

    `share`: the values of a run add up to 1, and are shown in percent.
    """
    colours = [BLUE, ORANGE, GREEN, RED, SKY, PURPLE, INK, GREY]
    if not share:
        colours = [BLUE, RED]
    bottom = 240

    def draw(panel: Panel) -> None:
        panel.title(title)
        entries = [
            (colour, shorten(clean(name), 18)) for colour, name in zip(colours, parts, strict=False)
        ]
        for row in range(0, len(entries), 4):
            panel.legend(LEFT, 41 + 5 * row, entries[row : row + 4], "upper left")
        top = 70 + 5 * ((len(entries) - 1) // 4) * 4
        axes = panel.axes(LEFT, top, RIGHT, bottom)
        floor = np.zeros(len(names))
        for number, (colour, values) in enumerate(zip(colours, parts.values(), strict=False)):
            bars = axes.bar(range(len(names)), values, 0.7, floor, color=colour)
            for run, bar in enumerate(bars):
                bar.set(gid=f"part-{number}-run-{run}")
            floor = floor + np.asarray(values)
        # Bars of a few runs are not wider than those of seven.
        axes.set_xlim(-0.6, max(len(names), FEW_RUNS) - 0.4)
        axes.set_ylim(0, 1 if share else max(1.0, float(floor.max()) * 1.05))
        axes.grid(axis="x", visible=False)
        formatter = FuncFormatter(lambda value, _: f"{value:.0%}" if share else short(value))
        axes.yaxis.set_major_formatter(formatter)
        axes.locator_params("y", nbins=5)
        last = [shorten(clean(name[-RUN_NAME:]), RUN_NAME) for name in names]
        axes.set_xticks(range(len(names)), last, rotation=30, ha="right", size=9)

    return Plot(bottom + 74, draw)
