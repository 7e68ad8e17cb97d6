"""Events, the page and the asset, counted with a fake clock and seen on a real Prefect server."""

from __future__ import annotations

import base64
import re
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from helpers.heard import caught_events, counts, wait_for
from helpers.nights import Nights
from helpers.pager import automations_script, pager
from helpers.prefect_server import artifacts_of, events_of
from helpers.reports import COMMIT, full, report
from helpers.small import make_job, small_run
from hypothesis import given
from hypothesis import strategies as st
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.states import Cancelled, Cancelling, Failed, Running, Scheduled

from prefect_raybatch.api import plan_run
from prefect_raybatch.cli import show as show_module
from prefect_raybatch.cli.show import TerminalProgress
from prefect_raybatch.compile.job import cluster_spec, size_spec
from prefect_raybatch.driver.driver import PhaseProgress, Progress
from prefect_raybatch.driver.heartbeat import (
    ENDED,
    INFERRING,
    MAKING,
    STARTING,
    UNHEARD,
    WAITING,
    Heartbeat,
)
from prefect_raybatch.errors import (
    CostExceeded,
    EngineStartError,
    ErrorBudgetExceeded,
    StoreUnavailable,
)
from prefect_raybatch.flow import assets, events, page, tasks
from prefect_raybatch.flow.artifacts import ARTIFACT_KINDS, artifact_key, tune_key
from prefect_raybatch.flow.cancelling import ENDED_BY_ITSELF
from prefect_raybatch.flow.events import LiveEvents, RunEvents
from prefect_raybatch.flow.page import Page
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import edited
from prefect_raybatch.ledger.layout import heartbeat_path
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.report import plots
from prefect_raybatch.report.drift import LEAST_RUNS
from prefect_raybatch.runs.run import Run
from prefect_raybatch.runs.run_history import history_of, usual_time

DRAWS = True

ROOT = Path(__file__).parents[2]


def page_of(job: BatchJob, run: Run, **options: Any) -> Page:
    """Return the page of a run, with the parts of its job."""
    parts = (job.output, job.limits, cluster_spec(job), size_spec(job))
    return Page(run, *parts, **options)


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    return caught_events(monkeypatch)


def names(found: list[dict[str, Any]]) -> Counter[str]:
    return Counter(event["event"] for event in found)


# --- how many -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [0.1, 8, 24 * 30])
def test_a_run_of_100_000_shards_makes_few_events(emitted, hours):
    live = LiveEvents(RunEvents("k", "j"), "/run", 10**9)
    shards = 100_000
    live.started(Heartbeat(0.0, shards=shards))
    for number in range(1, shards + 1):
        live.see(Heartbeat(0.0, shards=shards, committed=number), number * hours * 3600 / shards)
    found = names(emitted)
    assert found["raybatch.shard.committed"] <= 401 and len(emitted) <= 1000
    assert found["raybatch.shard.committed"] >= min(60, hours * 3600 / 5)
    new = [e["payload"]["new"] for e in emitted if "new" in e["payload"]]
    assert sum(new) == shards  # coalesced, not dropped


def test_small_runs_tell_each_commit_but_not_more_often_than_every_few_seconds(emitted):
    live = LiveEvents(RunEvents("k", "j"), "/run", 10**9)
    live.started(Heartbeat(0.0, shards=10, committed=2))
    for number, at in [(3, 0.0), (4, 1.0), (5, 2.0), (6, 7.0), (9, 8.0), (10, 8.5)]:
        live.see(Heartbeat(0.0, shards=10, committed=number), at)
    told = [e["payload"] for e in emitted if e["event"] == "raybatch.shard.committed"]
    assert [(p["committed"], p["new"]) for p in told] == [(3, 1), (6, 3), (10, 4)]


def test_stalls_and_a_high_quarantine_are_told_once_each(emitted, caplog):
    live = LiveEvents(RunEvents("k", "j"), "/run", 5)
    for failed, alarms in [(5, 0), (5, 1), (6, 1), (7, 2), (8, 0), (9, 1)]:
        live.see(
            Heartbeat(0.0, failed=failed, alarms=alarms, about="engines: none", quiet=61.0), 0.0
        )
    assert names(emitted) == {"raybatch.run.stalled": 3, "raybatch.quarantine.high": 1}
    assert emitted[0]["payload"]["about"] == "engines: none"
    assert emitted[0]["resource"]["prefect.resource.id"] == "raybatch.run.k"
    assert "limits.warn_failed" in caplog.text


def test_a_deadline_at_risk_is_told_once(emitted):
    def told(beats, worked=0.0):
        emitted.clear()
        live = LiveEvents(RunEvents("k", "j"), "/run", 9, deadline=100.0)
        live.started(Heartbeat(0.0, shards=20, committed=2), worked)
        for at, committed, left in beats:
            live.see(Heartbeat(0.0, shards=20, committed=committed, seconds_left=left), at)
        return [e["payload"]["about"] for e in emitted if e["event"].endswith("deadline.risk")]

    assert told([(0.0, 2, None), (20.0, 3, 500.0), (40.0, 9, 50.0), (90.0, 20, 0.0)]) == []
    late = [(0.0, 2, None), (30.0, 7, 71.0), (40.0, 8, 80.0)]
    allowed = "limits.deadline is 1 min 40 s"
    assert told(late) == [f"30 s elapsed, about 1 min 11 s left; {allowed}"]
    assert told([(0.0, 2, None), (30.0, 7, 60.0)], worked=20.0) != []
    nothing = "1 min 41 s elapsed, time left unknown"
    assert told([(0.0, 2, None), (101.0, 2, None)]) == [f"{nothing}; {allowed}"]


def test_a_cost_near_its_limit_is_told_once(emitted):
    def told(*beats: tuple[int, float | None, float | None]) -> list[str]:
        emitted.clear()
        live = LiveEvents(RunEvents("k", "j"), "/run", 9, max_cost=40.0)
        live.started(Heartbeat(0.0, shards=20, committed=2))
        for committed, so_far, end in beats:
            beat = Heartbeat(0.0, shards=20, committed=committed, cost_run=so_far, cost_end=end)
            live.see(beat, 0.0)
        return [e["payload"]["about"] for e in emitted if e["event"] == "raybatch.cost.high"]

    assert told((2, None, None), (3, 1.0, 400.0), (9, 31.9, 40.0)) == []
    limit = "limits.max_cost is 40.00, at which the run ends. Commits are kept"
    (expected,) = told((9, 1.0, 41.0), (10, 33.0, 42.0))
    assert expected.startswith(f"1.00 spent, about 41.00 at the end; {limit}")
    (spent,) = told((2, 32.0, None))
    assert spent.startswith(f"32.00 spent; {limit}")


def test_twice_the_usual_time_is_told_once(emitted):
    def told(usual: float | None, *seconds: float) -> list[str]:
        emitted.clear()
        live = LiveEvents(RunEvents("k", "j"), "/run", 9)
        live.usual = usual
        live.started(Heartbeat(0.0, shards=20))
        for at in seconds:
            live.see(Heartbeat(0.0, shards=20, committed=3, engines={"ALIVE": 1}), at)
        return [e["payload"]["about"] for e in emitted if e["event"] == "raybatch.time.high"]

    assert told(None, 0.0, 1e6) == told(20.0, 0.0, 79.0) == told(100.0, 0.0, 199.0) == []
    (slow,) = told(100.0, 0.0, 200.0, 300.0)
    assert slow.startswith("3 min 20 s elapsed; a run of this job usually takes 1 min 40 s.")
    assert "3 of 20 shards are committed, 1 engine alive, 0 deaths" in slow
    assert "cancel the run and retry it" in slow


def test_the_usual_time_is_that_of_the_runs_of_the_job(tmp_path):
    nights = Nights(tmp_path)
    nights.write("a", "b")
    job = nights.job(reuse=None)
    for key in ("n1", "n2"):
        nights.night(key, job)
    plan_run(job, "n3")
    (page,) = history_of(job.output.uri, job=job.name)
    assert [line.good is None for line in page.runs] == [True, False, False]
    timed = zip(page.runs, (7.0, 10.0, 20.0), strict=True)  # these take hundredths of a second
    page = replace(page, runs=tuple(replace(line, elapsed=seconds) for line, seconds in timed))
    assert usual_time(page, "n3") == 15.0
    assert usual_time(page, page.runs[1].run_key) == 20.0
    (none,) = history_of(str(tmp_path / "none"), job=job.name)
    assert usual_time(none, "n3") is None


@pytest.mark.parametrize("phase", [MAKING, UNHEARD])
def test_a_deadline_counts_from_where_an_attempt_begins(emitted, phase):
    live = LiveEvents(RunEvents("k", "j"), "/run", 9, deadline=100.0)
    live.started(Heartbeat(0.0, shards=20))
    for at, what in [(0.0, phase), (500.0, phase), (501.0, WAITING), (600.0, WAITING)]:
        live.see(Heartbeat(0.0, shards=20, phase=what), at)
    assert names(emitted).get("raybatch.deadline.risk") is None
    live.see(Heartbeat(0.0, shards=20, phase=WAITING), 602.0)
    assert names(emitted)["raybatch.deadline.risk"] == 1


@pytest.mark.parametrize(
    ("error", "tries", "told"),
    [
        (ErrorBudgetExceeded("too many"), 1, ["raybatch.budget.exceeded", "raybatch.run.failed"]),
        (CostExceeded("too dear"), 1, ["raybatch.cost.exceeded", "raybatch.run.failed"]),
        (EngineStartError("no"), 1, ["raybatch.run.failed"]),
        (StoreUnavailable("away"), 1, []),
        (StoreUnavailable("away"), 4, ["raybatch.run.failed"]),
    ],
)
def test_a_failure_is_told_when_nobody_will_try_again(emitted, error, tries, told, monkeypatch):
    monkeypatch.setattr(events.task_run, "get_run_count", lambda: tries, raising=False)
    assert RunEvents("k", "j").failed(error, 3) == bool(told)
    assert [event["event"] for event in emitted] == told


def test_the_closing_line_is_said_once_whatever_the_driver_does_after_it(
    tmp_path, emitted, monkeypatch
):
    """Of a run that is followed, the driver's last beat comes after its last commit."""
    now, lines = [0.0], list[str]()
    shown = page_of(make_job(), Run(str(tmp_path), "k", "h", 20, 4, False), clock=lambda: now[0])
    shown.log = type("Log", (), {"info": lambda self, text: lines.append(text)})()
    monkeypatch.setattr(Page, "show", lambda self, artifact, kind: None)
    monkeypatch.setattr(Page, "image", lambda self, beat: None)
    for done, phase in (
        (0, STARTING),
        (10, INFERRING),
        (20, INFERRING),
        (20, UNHEARD),
        (20, ENDED),
    ):
        now[0] += 20.0
        shown.counts = counts(rows=20, shards=4, done=done, committed=done // 5)
        shown.on_heartbeat(Heartbeat(0.0, phase=phase))
        shown.tick()
    assert [line.partition(" (")[0] for line in lines] == [
        "0 of 20 rows",
        "10 of 20 rows",
        "20 of 20 rows",
    ]


def test_a_steady_run_asks_the_api_less_than_once_a_second(tmp_path, emitted, monkeypatch):
    """8 hours of it, by a clock that is turned by hand."""
    now = [0.0]
    run = Run(str(tmp_path), "k", "h", 1_000_000, 100_000, False)
    shown = page_of(make_job(), run, clock=lambda: now[0])
    calls: Counter[str] = Counter()
    progress = Progress(1_000_000, 100_000)
    stats = ShardStats(rows=10, started=1.0, ended=2.0)
    progress.add(replace(COMMIT, stats=stats), 1.0)
    shown.log = type("Log", (), {"info": lambda self, text: calls.update(["line"])})()
    monkeypatch.setattr(Page, "show", lambda self, artifact, kind: calls.update([kind]))
    monkeypatch.setattr(plots, "live", lambda charts, working: "data:,")  # 960 would take a minute
    for second in range(8 * 3600):
        now[0] = float(second)
        done = round(1_000_000 * second / (8 * 3600))
        shown.counts = counts(rows=1_000_000, shards=100_000, done=done, committed=done // 10)
        shown.progress = progress
        shown.on_heartbeat(Heartbeat(0.0, phase=INFERRING))
        shown.tick()
    assert calls["progress"] <= 8 * 720 and calls["live"] <= 8 * 360 and calls["line"] <= 8 * 240
    assert 8 * 100 < calls["plots"] <= 8 * 120
    assert (calls.total() + len(emitted)) / (8 * 3600) < 0.5
    assert len(emitted) <= 1000


def test_what_the_api_refuses_is_tried_again_and_keeps_nothing_else_away(
    tmp_path, emitted, monkeypatch
):
    now, away = [0.0], [True]
    shown = page_of(make_job(), Run(str(tmp_path), "k", "h", 100, 10, False), clock=lambda: now[0])
    shown.log = type("Log", (), {"info": lambda self, text: None})()
    seen: list[str] = []

    def show(self: Page, artifact: Any, kind: str) -> None:
        if kind == "progress" and away[0]:
            raise ValueError("database is locked")
        seen.append(kind)

    monkeypatch.setattr(Page, "show", show)
    shown.counts = counts()  # the same for ever: what is shown once is not shown again
    shown.on_heartbeat(Heartbeat(0.0, phase=INFERRING))
    with pytest.raises(ValueError, match="locked"):
        shown.tick()
    assert "live" in seen and "progress" not in seen
    now[0], away[0] = 1.0, False
    shown.tick()
    assert "progress" not in seen  # a server in trouble is asked no more often
    now[0] = page.PROGRESS_EVERY
    shown.tick()
    now[0] = 2 * page.PROGRESS_EVERY
    shown.tick()
    assert seen.count("progress") == 1


@pytest.fixture
def followed() -> BatchJob:
    """A job whose driver is elsewhere."""
    return make_job(cluster={"job_server": "http://127.0.0.1:8265"})


def test_a_follower_shows_what_the_driver_elsewhere_says(tmp_path, emitted, followed):
    store = small_run(tmp_path).store
    now = [0.0]
    run = Run(str(tmp_path), "k", "h", 100, 10, False)
    shown = page_of(followed, run, clock=lambda: now[0])
    shown.counts = counts()
    beat = Heartbeat(time.time(), phase=WAITING, alarms=1, about="an engine hangs", passes=3)
    store.put(heartbeat_path("elsewhere"), beat.to_bytes())
    assert shown.state(1.0).phase != WAITING
    seen = shown.state(20.0)
    assert (seen.phase, seen.about, seen.passes, seen.done) == (WAITING, "an engine hangs", 3, 40)
    old = Heartbeat(time.time() - 3600, phase=WAITING)  # of an attempt that is gone
    store.put(heartbeat_path("elsewhere"), old.to_bytes())
    assert shown.state(40.0).phase == UNHEARD


@pytest.mark.parametrize(("done", "phase"), [(40, UNHEARD), (100, ENDED)])
def test_a_driver_elsewhere_that_has_ended_is_one_of_before_unless_all_is_done(
    tmp_path, followed, done, phase
):
    store = small_run(tmp_path).store
    shown = page_of(followed, Run(str(tmp_path), "k", "h", 100, 10, False), clock=lambda: 0.0)
    shown.counts = counts(done=done)
    store.put(heartbeat_path("elsewhere"), Heartbeat(time.time(), phase=ENDED).to_bytes())
    assert shown.state(20.0).phase == phase


def test_of_a_driver_that_nothing_is_heard_of_it_is_not_said_that_its_engines_start(
    tmp_path, followed
):
    """A flow that found its cluster and its job again said it, before it had asked for a word."""
    run = Run(str(tmp_path), "k", "h", 100, 10, False)
    for job, phase in ((followed, UNHEARD), (make_job(), STARTING)):
        shown = page_of(job, run, clock=lambda: 0.0)
        shown.counts = counts()
        assert shown.state(1.0).phase == phase


def test_what_a_driver_here_said_last_holds_until_it_says_something_else(tmp_path):
    """While the run ends, which may take longer than a page waits for a word of others."""
    run = Run(str(tmp_path), "k", "h", 100, 10, False)
    shown = page_of(make_job(), run, clock=lambda: 0.0)
    shown.counts = counts()
    shown.on_heartbeat(Heartbeat(0.0, phase=WAITING, alarms=1, about="an engine hangs"))
    assert shown.state(page.REMOTE_AFTER + 1).about == "an engine hangs"


def test_commits_before_the_page_looks_for_the_first_time_are_told(tmp_path, emitted):
    """It looks a second after the run begins; on a busy machine a small run was over by then."""
    shown = page_of(make_job(), Run(str(tmp_path), "k", "h", 100, 10, False), clock=lambda: 0.0)
    shown.log = type("Log", (), {"info": lambda self, text: None})()
    shown.show = lambda artifact, kind: None
    progress, good = Progress(100, 10), replace(COMMIT, failed=Positions())
    progress.add(good, 1.0)  # of an attempt before
    progress.recent.clear()
    shown(progress)
    for shard in range(1, 10):
        progress.add(replace(good, shard=shard), 1.0)
        shown(progress)
    shown.tick()
    told = [(e["event"], e["payload"]["committed"]) for e in emitted]
    assert told == [("raybatch.run.started", 1), ("raybatch.shard.committed", 10)]
    assert emitted[1]["payload"]["new"] == 9


def test_a_driver_elsewhere_that_has_committed_since_its_last_word_starts_no_engines(
    tmp_path, followed
):
    """A flow that followed a job again said "100 of 3,000 rows, starting engines"."""
    store = small_run(tmp_path).store
    run = Run(str(tmp_path), "k", "h", 100, 10, False)
    for knew, phase in ((0, INFERRING), (10, STARTING)):
        shown = page_of(followed, run, clock=lambda: 0.0)
        progress = Progress(100, 10)
        progress.add(replace(COMMIT, stats=ShardStats(rows=10, started=1.0, ended=2.0)), 1.0)
        shown(progress)
        beat = Heartbeat(time.time(), phase=STARTING, about="imports 3 s", done=knew)
        store.put(heartbeat_path("elsewhere"), beat.to_bytes())
        seen = shown.state(20.0)
        assert (seen.phase, seen.about == "") == (phase, phase == INFERRING), knew


# --- the asset's key ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "key"),
    [
        ("s3://b/out", "s3://b/out/j/"),
        ("s3://b/out/{run_date:%Y/%m}/x", "s3://b/out/j/"),
        ("s3://b/out/night-{run_key}", "s3://b/out/j/"),
        ("/srv/out/", "file:///srv/out/j/"),
        ("file:///srv/out", "file:///srv/out/j/"),
    ],
)
def test_the_asset_key_is_the_same_each_night(output, key):
    assert assets.asset_key(output, "j") == key
    assert assets.Asset(key=key)


def test_characters_that_an_asset_key_may_not_hold_are_replaced():
    key = assets.asset_key("/srv/o ut/{a}#%20", "k")
    assert re.fullmatch(r"file:///srv/o_ut/_a___20/k/~[0-9a-f]{8}/", key)
    assert assets.Asset(key=key)


def test_a_long_path_keeps_its_end():
    key = assets.asset_key("/" + "x" * 600, "k")
    assert len(key) <= 512 and "xx/k/" in key and assets.Asset(key=key)


def test_two_places_never_share_an_asset_key():
    long = "/" + "x" * 600
    places = ["/o/a b", "/o/a_b", "/o/a#b", "s3://o/a b", long, "/y" + long]
    assert len({assets.asset_key(place, "k") for place in places}) == len(places)


def test_what_a_job_reads_comes_before_its_result(tmp_path):
    def keys(**source):
        found = assets.source_keys(make_job(source=source).source)
        assert all(assets.Asset(key=key) for key in found)
        return found

    assert keys(uri="s3://lake/in/{run_date}/*.parquet") == ["s3://lake/in"]
    assert keys(uri=["/a/x.csv", "/a/y.csv"]) == ["file:///a/x.csv", "file:///a/y.csv"]
    assert keys(uri="postgresql://db:5432/shop", query="select 1") == ["postgresql://db:5432/shop"]
    assert keys(uri="hf://datasets/team/rows", split="a") == ["hf://datasets/team/rows"]
    assert keys(uri="/srv/saved", format="huggingface") == ["file:///srv/saved"]
    # The result of a run is the asset of the job that wrote it.
    first = small_run(tmp_path / "key", key="key", name="first", output={"uri": str(tmp_path)})
    assert keys(uri=first.store.uri) == [assets.asset_key(str(tmp_path), "first")]


# --- a real server ------------------------------------------------------------------------------


def steady(seconds: float, shards: int, failed: int = 0) -> Any:
    """An `infer_run` that commits at an even pace."""

    def infer_run(job: Any, run: Run, observe: Any) -> Progress:
        from prefect_raybatch.ledger.records import Commit

        progress = Progress(run.rows, run.shards)
        observe(progress)
        for shard in range(shards):
            time.sleep(seconds / shards)
            few = failed if shard == 0 else 0
            bad, none = Positions.spans((0, few)) if few else Positions(), Positions()
            stats = ShardStats(rows=10, started=time.time() - 0.05, ended=time.time())
            good = Positions.spans((few, 10))
            commit = Commit(shard, "a", "t", "h", good, bad, none, (), stats, {}, {}, 0.0)
            progress.add(commit, time.time())
            observe(progress)
        observe.on_heartbeat(
            Heartbeat(time.time(), phase=WAITING, alarms=1, about="hangs", quiet=99.0)
        )
        return progress

    return infer_run


def test_events_artifacts_and_asset_are_on_the_server_and_survive_a_retry(
    prefect_api, tmp_path, monkeypatch
):
    run = Run(str(tmp_path), "night-7", "h", 100, 10, False)
    done = report("night-7")
    tries: list[int] = []
    good = steady(1.0, 10, failed=3)

    def infer_run(job: Any, run: Run, observe: Any) -> Progress:
        tries.append(1)
        if len(tries) == 1:
            steady(0.5, 5)(job, run, observe)
            raise StoreUnavailable("away")
        return good(job, run, observe)

    monkeypatch.setattr("prefect_raybatch.api.submission.infer_run", infer_run)
    monkeypatch.setattr("prefect_raybatch.flow.tasks.finalize", lambda *_: done)

    @flow
    def night() -> None:
        job = make_job(name="night-7")
        progress = tasks.infer_shards.with_options(retry_delay_seconds=0)(job, run)
        tasks.finalize_run(job, run, progress)

    state = night(return_state=True)
    assert state.is_completed() and len(tries) == 2
    wanted = {
        "raybatch.run.started",
        "raybatch.run.stalled",
        "raybatch.quarantine.high",
        "raybatch.shard.committed",
        "raybatch.run.completed",
    }

    def told() -> list[dict[str, Any]]:
        found = events_of("raybatch.run.night-7")
        return found if {event["event"] for event in found} >= wanted else []

    found = wait_for(told)
    assert {e["event"] for e in found} == wanted
    flow_run = f"prefect.flow-run.{state.state_details.flow_run_id}"
    for event in found:
        assert flow_run in {r["prefect.resource.id"] for r in event["related"]}, event["event"]
    (made,) = wait_for(
        lambda: [
            event
            for event in events_of(f"file://{Path('out').absolute()}/night-7/")
            if event["payload"].get("run_key") == "night-7"
        ]
    )
    assert made["event"] == "prefect.asset.materialization.succeeded"
    kept = {"rows": 99, "run_key": "night-7", "quarantined": 1, "location": "/nowhere/k/data/"}
    assert kept.items() <= made["payload"].items()
    every = artifacts_of("raybatch-night-7-")
    by_key = {a.key: a for a in every}
    assert len(every) == len(by_key)  # the second try went on with the first one's
    assert by_key["raybatch-night-7-progress"].data == 100.0
    live = by_key["raybatch-night-7-live"].data
    assert "100 of 100" in live and "waiting: hangs" in live and "| failed | 3 |" in live
    image = by_key["raybatch-night-7-plots"]
    assert image.type == "image" and titles(image.data) == ["Throughput over time", "Shard map"]


def picture(uri: str) -> str:
    """The SVG that a data URI holds."""
    return base64.b64decode(uri.removeprefix("data:image/svg+xml;base64,")).decode()


def titles(uri: str) -> list[str]:
    """The plots that a picture shows."""
    return [name for name in plots.NAMES.values() if f">{name}" in picture(uri)]


def test_the_report_shows_its_plots_on_the_server(prefect_api, tmp_path, monkeypatch):
    done = full(run_key="night-8", run="/nowhere/k", notes=("a note",))
    monkeypatch.setattr("prefect_raybatch.flow.tasks.finalize", lambda *_: done)
    run = Run(str(tmp_path), "night-8", "h", 100, 10, True)

    @flow
    def night() -> None:
        tasks.finalize_run(make_job(name="night-8"), run)

    assert night(return_state=True).is_completed()
    made = {a.key: a for a in artifacts_of("raybatch-night-8-")}
    text = made["raybatch-night-8-report"].data
    images = re.findall(r"!\[[^\]]+\]\((data:[^)]+)\)", text)
    assert len(images) == 4 and all(picture(uri).startswith("<svg") for uri in images)
    assert "| running sequences per engine (mean) | 200.0 |" in text
    assert titles(made["raybatch-night-8-plots"].data) == list(plots.NAMES.values())


def test_finishing_goes_on_with_the_artifacts_of_its_flow_run(prefect_api, tmp_path, monkeypatch):
    """The plots of a run at work become those of the whole, and a second try adds no versions."""
    run = Run(str(tmp_path), "night-9", "h", 100, 10, False)
    done = full(run_key="night-9", run="/nowhere/k")
    tries: list[int] = []
    monkeypatch.setattr("prefect_raybatch.api.submission.infer_run", steady(0.2, 10, failed=3))
    monkeypatch.setattr("prefect_raybatch.flow.tasks.finalize", lambda *_: done)

    def fails_once(*_: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise StoreUnavailable("away")

    monkeypatch.setattr(tasks, "materialize_result", fails_once)
    job = make_job(name="night-9")

    @flow
    def night() -> None:
        progress = tasks.infer_shards(job, run)
        tasks.finalize_run.with_options(retry_delay_seconds=0)(job, run, progress)

    assert night(return_state=True).is_completed() and len(tries) == 2
    every = artifacts_of("raybatch-night-9-")
    kinds = ["failures", "live", "plots", "progress", "report", "stages"]
    assert sorted(a.key for a in every) == [f"raybatch-night-9-{kind}" for kind in kinds]
    by_key = {a.key: a for a in every}
    assert titles(by_key["raybatch-night-9-plots"].data) == list(plots.NAMES.values())
    assert by_key["raybatch-night-9-plots"].description == "Plots of the run. Run `night-9`."


def test_the_morning_page_is_one_artifact_of_the_job_and_tells_of_drift(
    prefect_api, tmp_path, monkeypatch, emitted
):
    """Also of a night that failed; what goes wrong with it is never worth a run."""
    nights = Nights(tmp_path)
    nights.write(*(f"t{i}" for i in range(300)))
    source = {"uri": str(tmp_path / "in.parquet"), "rows_per_shard": 100}
    choice = {"choice": ["yes", "no"]}
    job = nights.job(name="morning", source=source, sampling=choice, reuse=None)
    monkeypatch.setattr(nights, "answer", lambda prompt: "yes")
    for number in range(LEAST_RUNS):
        nights.night(f"m{number}", job)
    job = edited(job, {"prompt.template": "Another question: {text}"}, "test")
    monkeypatch.setattr(nights, "answer", lambda prompt: "no")
    run = plan_run(job, "changed")
    progress = nights.infer(job, run)

    @flow
    def night(run: Run, progress: Any = None) -> None:
        tasks.finalize_run.with_options(retry_delay_seconds=0)(job, run, progress)

    assert night(run, progress, return_state=True).is_completed()
    (drift,) = [event for event in emitted if event["event"] == "raybatch.answers.drifted"]
    assert drift["resource"]["prefect.resource.name"] == "changed"
    about = drift["payload"]["about"]
    assert about.endswith("; the job changed in prompt.template since then"), about
    assert drift["payload"]["before"] == f"m{LEAST_RUNS - 1}"
    assert drift["payload"]["moved"] == {"labels": 1.0}
    made = {a.key: a for a in artifacts_of("raybatch-morning-history")}
    assert set(made) == {"raybatch-morning-history", "raybatch-morning-history-plots"}
    assert (
        f"changed: the labels differ from the {LEAST_RUNS} runs before in 100.0% of answers"
        in made["raybatch-morning-history"].data
    )
    assert ">Rows per run" in picture(made["raybatch-morning-history-plots"].data)
    # Collected again it is no news; a night that fails is on the page as well.
    assert night(plan_run(job, "changed"), return_state=True).is_completed()
    assert len([e for e in emitted if e["event"] == "raybatch.answers.drifted"]) == 1
    # A tenth of the usual rows is told, though nobody set a limit.
    nights.write(*(f"t{i}" for i in range(30)))
    nights.night("few", job)  # as by a flow that was killed before it sent an event
    assert night(plan_run(job, "few"), return_state=True).is_completed()
    (few,) = [event for event in emitted if event["event"] == "raybatch.rows.low"]
    assert few["resource"]["prefect.resource.name"] == "few" and few["payload"]["rows"] == 30
    assert few["payload"]["about"] == (
        "Far fewer rows than usual: 30; the median of the last 7 completed runs is 300. "
        "Check the input."
    )
    pages = [a.data for a in artifacts_of("raybatch-morning-history") if a.type == "markdown"]
    assert any("Last run: 30 of 30 rows" in page and "usual: 30; " in page for page in pages)
    failed = night(plan_run(job, "failing"), return_state=True)
    assert failed.is_failed()
    pages = [a.data for a in artifacts_of("raybatch-morning-history") if a.type == "markdown"]
    assert any("failing failed" in page for page in pages)


# --- keys of artifacts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "key"),
    [
        ("monday", "raybatch-monday"),
        ("demo-600-7", "raybatch-demo-600-7"),
        ("Industries", "raybatch-industries--a8da9932"),
    ],
)
def test_plain_names_of_jobs_are_their_own_artifact_keys(job, key):
    assert artifact_key(job) == key


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
ALIKE = st.sampled_from(["a.b", "a-b", "a_b", "A-b", "a--b", "a-b-", "a-b.", "a-b--", "n-20260301"])
STAMPED = st.sampled_from(["n-20260301T020000Z", "n-20260301t020000z", "N-20260301T020000Z"])


@given(st.sets(NAMES | ALIKE | STAMPED, min_size=2, max_size=12))
def test_two_jobs_never_share_an_artifact_key(names):
    keys = {artifact_key(name) for name in names}
    assert len(keys) == len(names)
    assert all(re.fullmatch(r"[a-z0-9-]+", key) for key in keys)


@pytest.mark.parametrize("kind", ARTIFACT_KINDS)
def test_what_was_tuned_has_a_key_that_no_run_has(kind):
    assert tune_key("nightly") == "raybatch-tune-nightly"
    taken = f"{artifact_key('tune-x')}-{kind}"
    assert tune_key(f"x-{kind}") != taken and tune_key(f"x.{kind}") != taken
    assert tune_key(f"x-{kind}") != tune_key(f"x.{kind}")


def test_the_terminal_hears_what_the_page_hears(tmp_path, capsys):
    show = TerminalProgress(quiet=False)
    run, observers = Run(str(tmp_path), "k", "h", 100, 10, False), [show, lambda progress: None]
    shown = page_of(make_job(), run, observers=observers)
    shown.on_heartbeat(Heartbeat(0.0, phase=INFERRING))
    shown(Progress(100, 10))
    assert capsys.readouterr().err == "inferring\n"
    shown.on_heartbeat(Heartbeat(0.0, phase=INFERRING))
    assert capsys.readouterr().err == ""
    shown.on_heartbeat(Heartbeat(0.0, phase=WAITING))  # said though nothing was committed
    assert capsys.readouterr().err == "waiting\n"


def test_a_line_is_not_printed_again_while_it_says_the_same(monkeypatch, capsys):
    """Heartbeats come each second, but the server is asked how long it is silent each ten."""
    monkeypatch.setattr(show_module, "LINE_EVERY", 0.0)
    show = TerminalProgress(quiet=False)
    show(Progress(100, 10))
    capsys.readouterr()
    for silent in (21, 21, 21, 31, 31):
        show.on_heartbeat(Heartbeat(0.0, phase=WAITING, about=f"no answer for {silent} s"))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["waiting: no answer for 21 s", "waiting: no answer for 31 s"]
    show.on_judge("run")  # the progress of another run, which may begin with the same line
    show(Progress(100, 10))
    show.on_heartbeat(Heartbeat(0.0, phase=WAITING, about="no answer for 31 s"))
    assert capsys.readouterr().err.splitlines()[-1] == "waiting: no answer for 31 s"


def test_requests_that_this_attempt_answered_are_not_told_as_done_before(capsys):
    """When the rows begin to look answers up, the last beat is that of the ended requests."""
    show = TerminalProgress(quiet=False)
    show.on_heartbeat(Heartbeat(0.0, phase=ENDED))
    show(Progress(40, 1, before=PhaseProgress(40)))
    explained = "a step is an answer of the first phase, or a finished row of the second\n"
    assert capsys.readouterr().err == f"{explained}40 of 80 steps done\n"


def test_failed_rows_that_no_commit_counts_are_shown(tmp_path):
    beat = Heartbeat(0.0, phase=INFERRING, rows=100, done=40, failed=1, held_back=7)
    assert page.progress_line(beat).endswith("8 (7 not committed yet) failed")
    assert {"": "failed", "now": "8 (7 not committed yet)"} in page.live_rows(beat)
    # Also of a driver elsewhere, whose commits are all that is seen from here.
    shown = page_of(make_job(), Run(str(tmp_path), "k", "h", 100, 10, False), clock=lambda: 0.0)
    shown.counts = counts()
    shown.on_heartbeat(beat)
    assert shown.state(1.0).held_back == 7


def test_plots_say_what_is_in_work_and_wait_for_the_first_commit(tmp_path):
    run = Run(str(tmp_path), "k", "h", 100, 10, False)
    shown = page_of(make_job(), run)
    beat = Heartbeat(0.0, phase=INFERRING, engines={"ALIVE": 1})
    assert shown.image(beat) is None
    progress = Progress(100, 10)
    shown.progress = progress
    assert shown.image(beat) is None
    stats = ShardStats(rows=10, started=1.0, ended=2.0)
    progress.add(replace(COMMIT, shard=0, stats=stats), 1.0)
    assert "in progress (estimate)" in picture(shown.image(beat) or "")
    assert "in progress (estimate)" not in picture(shown.image(replace(beat, engines={})) or "")


@pytest.mark.whole
def test_calls_of_a_steady_run_at_the_client(prefect_api, tmp_path, monkeypatch):
    """Everything that goes over HTTP while commits flow: artifacts, logs, states, events' kin."""
    seconds, calls, began = 14.0, [], list[float]()
    for kind in (httpx.Client, httpx.AsyncClient):
        send = kind.send

        def counted(self, request, *args, _send=send, **kwargs):
            calls.append((time.monotonic(), request.method, request.url.path))
            return _send(self, request, *args, **kwargs)

        monkeypatch.setattr(kind, "send", counted)
    commits = steady(seconds, 1400)

    def infer_run(job: Any, run: Run, observe: Any) -> Progress:
        began.append(time.monotonic())  # what starts a flow run takes as long as it takes
        return commits(job, run, observe)

    monkeypatch.setattr("prefect_raybatch.api.submission.infer_run", infer_run)
    run = Run(str(tmp_path), "steady", "h", 14_000, 1400, False)

    @flow
    def night() -> None:
        tasks.infer_shards(make_job(), run)

    assert night(return_state=True).is_completed()
    # The first seconds have what makes the artifacts.
    steadily = [c for c in calls if began[0] + 5 < c[0] < began[0] + 13]
    print(Counter(path.rsplit("/", 1)[0] for _, _, path in steadily), len(steadily) / 8)
    assert len(steadily) / 8 <= 1.0


@flow(name="batch_inference")
def one_of_ours() -> None:
    pass


@flow(name="of somebody else")
def another() -> None:
    pass


def in_state(name: str, state: Any, which: Any = one_of_ours) -> UUID:
    """A new flow run that gets into this state."""
    with get_client(sync_client=True) as client:
        made = client.create_flow_run(which, name=name, state=Running())
        client.set_flow_run_state(made.id, state, force=True)
        return made.id


def beats_of(run: UUID, *tags: str) -> None:
    """A heartbeat as Prefect's engine sends them, of a flow run with these tags."""
    with get_client(sync_client=True) as client:
        known = client.read_flow_run(run)
    emit_event(
        "prefect.flow-run.heartbeat",
        {"prefect.resource.id": f"prefect.flow-run.{run}", "prefect.resource.name": known.name},
        related=[
            {
                "prefect.resource.id": f"prefect.flow.{known.flow_id}",
                "prefect.resource.role": "flow",
                "prefect.resource.name": "batch_inference",
            },
            *(
                {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}
                for tag in tags
            ),
        ],
    )


@pytest.mark.whole
def test_each_automation_is_created_once_and_pages_someone(prefect_api):
    script = automations_script()
    script.RINGS_ONCE = timedelta(hours=1)
    script.CANCELLING_FOR = timedelta(seconds=10)
    with pytest.raises(SystemExit, match=r"block .* does not exist"):
        script.deploy("custom-webhook/nobody")
    with pager() as pages, get_client(sync_client=True) as client:
        assert {what for _, what in script.deploy("custom-webhook/on-call", 10)} == {"created"}
        assert {what for _, what in script.deploy("custom-webhook/on-call", 10)} == {"updated"}
        known = [a for a in client.read_automations() if a.name.startswith("raybatch: ")]
        assert len(known) == 17
        try:
            gone = in_state("gone-night", Running())
            by_hand = in_state("by-hand", Running())  # without a deployment that promises more
            live = LiveEvents(RunEvents("industries-1", "industries"), "s3://b/k", 3, 60.0, 9.0)
            live.usual = 30.0
            # The server's services read automations when told of them: say it until it is heard.
            for number in range(200):
                if number % 5 == 0:
                    limit = Cancelled(message="Deployment concurrency limit reached.")
                    in_state("refused-night", limit)
                    in_state("failed-night", Failed(message="What to do: look"))
                    in_state("late-night", Scheduled(name="Late"))
                    in_state("foreign", Failed(), another)
                    in_state("cancelled-by-hand", Cancelled())
                    in_state("unheeded-night", Cancelled(message=ENDED_BY_ITSELF))
                    in_state("stuck-night", Cancelling())
                if number < 4:
                    beats_of(by_hand, "nightly")
                    beats_of(gone, "nightly", script.HEARTBEAT_TAG)
                beat = Heartbeat(
                    0.0, failed=4, rows=9, shards=5, alarms=number + 1, about="1 alive"
                )
                beat = replace(beat, cost_run=8.0)
                live.see(beat, 61.0 * number)
                live.told_high = live.told_late = live.told_dear = live.told_slow = False
                live.events.emit("answers.drifted", about="the labels differ", run="s3://b/k")
                live.outage(171.0)
                live.events.emit("accuracy.fell", about="judge: e-value 120", run="s3://b/k")
                live.events.emit(
                    "agreement.fell", about="larger model: e-value 130", run="s3://b/k"
                )
                live.events.emit("rows.low", about="60 instead of 600", run="s3://b/k")
                if len({p["subject"] for p in pages}) >= 16:
                    break
                time.sleep(1)
            state = client.read_flow_run(gone).state
            assert client.read_flow_run(by_hand).state.is_running()
        finally:
            for automation in known:
                client.delete_automation(automation.id)
    said = {page["subject"]: page["body"] for page in pages}
    # Their events came many times, as those of a busy SQLite do.
    subjects = [page["subject"] for page in pages if page["subject"].startswith("industries-1")]
    assert len(subjects) == len(set(subjects)), subjects
    assert set(said) == {
        "industries-1 stalls",
        "industries-1: many rows fail",
        "industries-1 will be late",
        "industries-1: answers have drifted",
        "industries-1: the accuracy fell",
        "industries-1: the agreement fell",
        "industries-1: far fewer rows than usual",
        "industries-1: cost near the limit",
        "industries-1: Prefect was unreachable",
        "industries-1 takes twice the usual time",
        "failed-night failed",
        "gone-night crashed",
        "late-night is late",
        "refused-night did not run",
        "unheeded-night: nobody noticed its cancellation",
        "stuck-night: nobody noticed its cancellation",
    }
    assert "1 alive" in said["industries-1 stalls"] and "s3://b/k" in said["industries-1 stalls"]
    assert "4 of 9 rows have failed" in said["industries-1: many rows fail"].replace("\n", " ")
    assert "the labels differ" in said["industries-1: answers have drifted"]
    assert "e-value 120" in said["industries-1: the accuracy fell"]
    assert "e-value 130" in said["industries-1: the agreement fell"]
    assert "What to do: look" in said["failed-night failed"]
    assert "8.00 spent; limits.max_cost is 9.00" in said["industries-1: cost near the limit"]
    assert "unreachable for 2 min 51 s" in said["industries-1: Prefect was unreachable"]
    assert "usually takes 30 s" in said["industries-1 takes twice the usual time"]
    assert "limits.deadline is 1 min 00 s" in said["industries-1 will be late"]
    assert state.is_crashed() and "no heartbeat for 10 s" in state.message
    assert "prefect flow-run retry NAME" in state.message
    assert f"prefect flow-run retry {gone}" in said["gone-night crashed"]
    for name in ("unheeded-night", "stuck-night"):
        unheeded = said[f"{name}: nobody noticed its cancellation"]
        assert "Committed shards are kept" in unheeded, unheeded
        assert re.search(r"`prefect flow-run retry [0-9a-f-]{36}`", unheeded), unheeded
    refused = said["refused-night did not run"]
    assert "because the run before it was still active" in refused
    assert re.search(r"did not run at\n\d{4}-\d\d-\d\d \d\d:\d\d", refused), refused
    assert re.search(r"`prefect flow-run retry [0-9a-f-]{36}`", refused), refused


@pytest.mark.parametrize("given", ["0", "-1", "nan", "1e9", "soon"])
def test_a_wrong_number_of_seconds_is_refused_before_prefect_is_asked(given, monkeypatch, capsys):
    script = automations_script()
    monkeypatch.setattr(script, "deploy", lambda *_: pytest.fail("it was deployed"))
    monkeypatch.setattr("sys.argv", ["automations.py", "--block", "a/b", f"--gone-after={given}"])
    with pytest.raises(SystemExit):
        script.main()
    assert "--gone-after" in capsys.readouterr().err
