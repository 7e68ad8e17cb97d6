"""Plots of known figures: well-formed, as many marks as data, harmless text, bounded size."""

from __future__ import annotations

import base64
import json
import math
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from helpers.reports import COMMIT, REPORT
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.harmless import clean
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.records import Part
from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.report import drawing, plots
from prefect_raybatch.report import report as reports
from prefect_raybatch.report.charts import (
    CELLS,
    POINTS,
    cells,
    charts,
    duration_quantiles,
    throughput_points,
)
from prefect_raybatch.report.records import Charts, NodeStats, RunReport, WorkerStats
from prefect_raybatch.report.tally import Tally

DRAWS = True

SVG = "{http://www.w3.org/2000/svg}"


def parsed(text: str) -> ET.Element:
    return ET.fromstring(text)


def words(text: str) -> str:
    return " ".join("".join(e.itertext()) for e in parsed(text).iter(f"{SVG}text"))


def lines(text: str, name: str) -> list[list[tuple[float, float]]]:
    """The lines drawn under a name, each with its points."""
    found = []
    for group in parsed(text).iter(f"{SVG}g"):
        if group.get("id") == name:
            for path in group.iter(f"{SVG}path"):
                for part in path.attrib["d"].split("M")[1:]:
                    numbers = [float(n) for n in re.findall(r"-?[\d.]+", part)]
                    found.append(list(zip(numbers[::2], numbers[1::2], strict=True)))
    return found


def drawn(
    charts: Charts, workers: tuple[WorkerStats, ...] = (), working: int = 0
) -> tuple[str, ...]:
    return tuple(plots.chart_plots(charts, workers, working).values())


def rates(*points: tuple[float, ...]) -> str:
    return drawn(Charts(throughput=points))[0]


def times(stages: dict[str, tuple[float, ...]]) -> str:
    return drawn(Charts(durations=stages))[0]


def shard_map(cells: list[tuple[int, ...]], working: int = 0) -> str:
    return drawn(Charts(cells=tuple(cells)), (), working)[0]


def balance(*workers: WorkerStats) -> str:
    return drawn(Charts(), workers)[0]


def areas(text: str) -> dict[str, float]:
    """Cells of each kind of a shard map, from what is drawn."""
    found: dict[str, float] = {}
    for kind in drawing.COLOURS:
        if spans := lines(text, kind):
            found[kind] = sum(end[0] - start[0] for start, end in spans)
    # What is pending lies under the others.
    pending = found.pop(drawing.PENDING) - sum(found.values())
    return {**found, drawing.PENDING: pending} if pending else found


# --- from commits to figures --------------------------------------------------------------------


def test_rates_are_the_amounts_over_the_time_of_work():
    start, end = np.array([100.0, 110.0]), np.array([110.0, 120.0])
    amounts = np.array([[50.0, 100.0], [500.0, 1000.0], [5.0, 10.0]])
    points = throughput_points(start, end, amounts)
    assert len(points) == 10 and points[-1][0] == 20
    assert [p[1] for p in points] == [5.0] * 5 + [10.0] * 5
    assert points[0][1:] == (5.0, 50.0, 0.5)


def test_pauses_between_attempts_take_no_room():
    start, end = np.array([100.0, 90_000.0]), np.array([110.0, 90_010.0])
    points = throughput_points(start, end, np.ones((3, 2)) * 30)
    assert points[-1][0] == 20
    assert {p[1] for p in points} == {3.0}


@given(
    st.lists(
        st.tuples(st.floats(1, 1e6), st.floats(0.01, 1e4), st.integers(0, 10_000)),
        min_size=1,
        max_size=60,
    )
)
def test_no_row_is_lost_or_doubled_in_the_rates(shards):
    start = np.array([s for s, _, _ in shards])
    end = start + np.array([length for _, length, _ in shards])
    rows = np.array([n for _, _, n in shards], float)
    points = throughput_points(start, end, np.stack([rows, rows, rows]))
    times = [0.0, *(p[0] for p in points)]
    drawn = sum(p[1] * (b - a) for p, a, b in zip(points, times, times[1:], strict=False))
    assert drawn == pytest.approx(rows.sum(), rel=0.02, abs=1)
    assert len(points) <= POINTS


def test_shards_without_times_are_in_no_rate():
    assert throughput_points(np.zeros(2), np.zeros(2), np.ones((3, 2))) == ()
    assert throughput_points(np.array([]), np.array([]), np.ones((3, 0))) == ()


def test_durations_are_quantiles_of_what_is_known():
    found = duration_quantiles({"read": np.array([math.nan]), "engine": np.arange(101.0)})
    assert found == {"engine": (5.0, 25.0, 50.0, 75.0, 95.0, 100.0)}


@given(shards=st.integers(1, 30_000), seed=st.integers(0, 99))
def test_cells_hold_each_shard_once(shards, seed):
    done = np.array(random.Random(seed).sample(range(shards), min(shards, 500)))
    found = cells(shards, done, np.ones(done.size, int), np.full(done.size, 10))
    assert len(found) <= CELLS
    assert [sum(column) for column in zip(*found, strict=True)] == [
        shards,
        done.size,
        done.size,
        10 * done.size,
    ]
    assert len({cell[0] for cell in found[:-1]}) <= 1  # equal, but for the last


def test_charts_of_a_tally_and_back_from_a_report():
    made = Tally()
    for shard in range(3):
        began = 10.0 * shard + 1
        stats = ShardStats(rows=5, started=began, ended=began + 8, engine_s=8.0)
        made.add(replace(COMMIT, shard=shard, stats=stats, good=Positions.spans((0, 5))))
    found = charts(made, 4)
    assert [cell[1] for cell in found.cells] == [1, 1, 1, 0]
    assert found.durations == {"engine": (8.0,) * 6}
    whole = replace(REPORT, charts=found)
    assert RunReport.from_bytes(whole.to_bytes()).charts == found
    for bad in ({"cells": [[1, 2]]}, {"throughput": [["x"] * 4]}, {"cells": [[1] * 4] * 20_000}):
        value = json.loads(whole.to_bytes())
        with pytest.raises(CorruptRun, match=rf"charts\.{next(iter(bad))}"):
            RunReport.from_bytes(
                json.dumps({**value, "charts": {**value["charts"], **bad}}).encode()
            )


def test_a_report_with_spoilt_charts_is_corrupt():
    data = REPORT.to_bytes().replace(b'"cells":[]', b'"cells":[[1,null,0,0]]')
    assert data != REPORT.to_bytes()
    with pytest.raises(CorruptRun, match=r"charts\.cells\.0\.1 is 'None'"):
        RunReport.from_bytes(data)


# --- drawing ------------------------------------------------------------------------------------

POINTS_3 = ((10.0, 100.0, 9000.0, 700.0), (20.0, 120.0, 9500.0, 800.0), (30.0, 0.0, 0.0, 0.0))


def test_throughput_has_a_step_for_each_point_of_each_kind():
    text = rates(*POINTS_3)
    for name, kind in (("rows-s", 1), ("tokens-in", 2), ("tokens-out", 3)):
        (line,) = lines(text, name)
        steps = [(x2 - x, y) for (x, y), (x2, y2) in pairwise(line) if y == y2 and x != x2]
        assert [width for width, _ in steps] == pytest.approx([676 / 3] * 3)
        drops = [steps[-1][1] - y for _, y in steps]  # the last rate is 0, at the bottom
        rate = [point[kind] for point in POINTS_3]
        assert [d / drops[0] for d in drops] == pytest.approx([r / rate[0] for r in rate])
    assert "working time, s" in words(text)
    assert "tokens in tokens out" in words(text) and "Throughput over time" in words(text)


@pytest.mark.parametrize(("end", "unit"), [(100, "s"), (600, "min"), (20_000, "h")])
def test_time_has_a_unit_that_suits(end, unit):
    assert f"working time, {unit}" in words(rates((end, 1.0, 1.0, 1.0)))


def test_task_times_have_a_box_a_stage():
    stages = {"read": (0.01, 0.02, 0.05, 0.1, 0.2, 1.0), "engine": (30.0, 35, 40, 44, 50, 90.0)}
    text = times(dict(sorted(stages.items())))
    assert words(text).index("read") < words(text).index("engine")  # as the rows go
    assert len(re.findall(r'<g id="box-\d+">', text)) == 2
    assert len(re.findall(f"<use [^>]*{drawing.RED.lower()}", text)) == 2
    assert "log scale" in words(text) and "40 s" in words(text)
    even = times({"engine": (30.0, 35, 40, 44, 50, 90.0)})
    assert "log scale" not in words(even)
    parsed(times({"engine": (0.0,) * 6}))  # nothing measurable
    assert "nan" not in times({"read": (0.0, 0.0, 0.5, 1.0, 1.0, 9.0)})  # 0 on a log scale


def test_the_map_fills_cells_as_shards_are_committed():
    text = shard_map(
        [(1, 1, 0, 10)] * 5 + [(1, 1, 1, 200)] + [(1, 1, 5, 10)] + [(1, 0, 0, 0)] * 6, 2
    )
    found = areas(text)
    cell = found[drawing.FEW]
    assert {kind: area / cell for kind, area in found.items()} == {
        drawing.COMMITTED: 5,
        drawing.FEW: 1,
        drawing.FAILED: 1,
        drawing.WORK: 2,
        drawing.PENDING: 4,
    }
    assert "in progress (estimate)" in words(text)
    half = shard_map([(100, 50, 0, 10)])
    assert areas(half) == {drawing.COMMITTED: 12, drawing.PENDING: 12}
    assert "in work" not in words(half) and "100 shards" in words(half)


@settings(deadline=None, max_examples=10)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 3)), min_size=1),
    st.integers(0, 40),
)
def test_the_map_shows_every_cell_whole(values, working):
    given = [(n, min(done, n), bad if done else 0, 10 * done) for n, done, bad in values]
    found = areas(shard_map(given, working))
    assert all(area > 0 for area in found.values())
    columns = max(10, math.ceil(math.sqrt(len(given) * 4)))
    size = min(24.0, 676 / min(len(given), columns) // 0.25 * 0.25)
    assert sum(found.values()) == pytest.approx(len(given) * size)
    open_cells = sum(1 - done / n for n, done, _, _ in given)
    shown = found.get(drawing.PENDING, 0) + found.get(drawing.WORK, 0)
    assert shown == pytest.approx(open_cells * size, abs=0.125 * len(given) + 1e-6)


def test_engines_have_a_bar_each_up_to_a_number():
    def bars(text: str) -> int:
        return len(re.findall(r'<g id="engine-\d+">', text))

    workers = [WorkerStats(f"node:{i}", 2, 100 + i, 0.0, 1.0) for i in range(30)]
    text = balance(*workers)
    assert bars(text) == 24
    assert "6 more not shown" in words(text)
    assert "node:29" in words(text) and "129 rows, 2 shards" in words(text)
    assert bars(balance(*workers[:3])) == 3


def test_names_of_others_are_text_and_nothing_else():
    evil = '</text><script>alert("1")</script>\x00\ud800 & $x^2$'
    text = balance(WorkerStats(evil, 1, 5, 0.0, 1.0), WorkerStats("host:2", 1, 5, 0.0, 1.0))
    assert "<script" not in text
    assert "script" not in {e.tag.removeprefix(SVG) for e in parsed(text).iter()}
    text.encode()  # no lone surrogate
    assert "</text><scrip" in words(text)
    assert "& $x^2$" in words(text)  # no formula
    assert "</scr" in clean(evil)
    title = drawing.svg(evil, [drawing.Plot(10, lambda panel: panel.title(evil))])
    assert "script" not in {e.tag.removeprefix(SVG) for e in parsed(title).iter()}


def test_the_same_figures_give_the_same_file():
    """Also where the user's own code has set other styles, and at another time."""
    code = """
import sys, matplotlib
if len(sys.argv) > 1:
    matplotlib.rcParams.update({"axes.facecolor": "black", "font.size": 30, "axes.grid": False})
    matplotlib.rcParams.update({"svg.fonttype": "path", "xtick.labelsize": 3, "lines.marker": "x"})
before = matplotlib.rcParams.copy()  # looking at them one by one would load a backend
from prefect_raybatch.report.records import Charts
from prefect_raybatch.report import plots
charts = Charts(((10.0, 5.0, 50.0, 5.0),), {"engine": (1.0,) * 6}, ((1,) * 4,))
print("".join(plots.chart_plots(charts).values()))
assert "matplotlib.pyplot" not in sys.modules
assert dict(matplotlib.rcParams.copy()) == dict(before)
"""
    made = []
    for more in ([], ["other"]):
        done = subprocess.run([sys.executable, "-c", code, *more], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        made.append(done.stdout)
    assert made[0] == made[1]
    assert "Throughput over time</text>" in made[0] and "date" not in made[0]


def test_plots_in_a_page_share_no_names():
    found = drawn(
        Charts(POINTS_3, {"engine": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)}, ((1, 1, 0, 5),)),
        tuple(WorkerStats(f"host:{n}", 1, 5, 0.0, 1.0) for n in (1, 2)),
    )
    names = re.findall(r' id="([^"]+)"', "".join(found))
    assert len(found) == 4 and len(set(names)) == len(names)


def test_a_quarter_of_a_million_shards_stay_small():
    """The worst case for the map: every cell differs from its neighbours."""
    rng = random.Random(5)
    number = 250_000
    shard = np.array([s for s in range(number) if rng.random() < 0.7])
    failed = np.array([rng.choice((0, 0, 1, 900)) for _ in shard])
    found = cells(number, shard, failed, np.full(shard.size, 100))
    assert len(found) == CELLS
    text = shard_map(list(found), 64)
    parsed(text)
    assert len(text) < 70_000
    points = [(float(i + 1), *(rng.random() * 1e6 for _ in range(3))) for i in range(POINTS)]
    report = replace(
        REPORT,
        charts=Charts(tuple(points), {"engine": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)}, found),
        workers=tuple(WorkerStats(f"{i:0200}", 1, i, 1.0, 1.0) for i in range(64)),
        nodes=tuple(NodeStats(f"{i:0200}", 1, 1, 1, {}) for i in range(64)),
        failures={f"engine|{'E' * 90}|{i:0500}": 1 for i in range(20)},
        parts=tuple(Part(f"data/part-{i:05}.parquet", 1, 1, "0" * 64) for i in range(20_000)),
    )
    page = reports.markdown(report, plots.image_lines(report))
    assert page.count("data:image/svg+xml;base64,") == 4
    assert len(page) < 200_000  # what a Prefect artifact may have at most
    assert len(plots.combined_plot(report) or "") < 200_000
    assert len(plots.live(report.charts, 64) or "") < 200_000
    assert len(report.to_bytes()) < 4 << 20


def test_pictures_are_stacked_into_one():
    one, two = parsed(rates(*POINTS_3)), parsed(shard_map([(1, 1, 0, 10)]))
    data = plots.live(Charts(throughput=POINTS_3, cells=((1, 1, 0, 10),)))
    assert data is not None
    text = base64.b64decode(data.removeprefix("data:image/svg+xml;base64,")).decode()
    assert words(text).index("Throughput over time") < words(text).index("Shard map")
    heights = [float(picture.attrib["height"]) for picture in (one, two)]
    assert float(parsed(text).attrib["height"]) == sum(heights) + 14
    assert plots.live(Charts(cells=((1, 0, 0, 0),))) is None  # nothing committed yet
    assert plots.combined_plot(REPORT) is None and plots.image_lines(REPORT) == []


def test_only_what_is_known_is_drawn():
    assert plots.chart_plots(Charts()) == {}
    some = plots.chart_plots(Charts(cells=((1, 0, 0, 0),)))
    assert list(some) == ["shards"]
    assert set(some) <= set(plots.NAMES)


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999, "999"), (1200, "1.2k"), (2.5e6, "2.5M"), (3e9, "3G")]
)
def test_figures_of_axes_are_short(value, text):
    assert drawing.short(value) == text


def test_long_names_keep_both_ends():
    assert drawing.shorten("abcdefghij", 10) == "abcdefghij"
    assert drawing.shorten("ip-10-0-0-1.ec2.internal:4000", 11) == "ip-10…:4000"
