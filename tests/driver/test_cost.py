"""What a run costs: GPU time by the job's prices, and the limit that ends a run."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from helpers.heard import Heard
from helpers.nights import Nights
from helpers.small import job_dict, make_job, small_run

from prefect_raybatch.api import finalize_run, plan_run
from prefect_raybatch.compile.job import cluster_spec, compile_job, prices_of
from prefect_raybatch.driver import monitor as watching
from prefect_raybatch.driver.cost import CostMeter, Spent, check_cost, spent_on
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import Heartbeat
from prefect_raybatch.driver.monitor import ASK_ENGINES, Monitor
from prefect_raybatch.errors import ConfigError, CostExceeded
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import edited
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.layout import heartbeat_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.report.report import result_rows
from prefect_raybatch.report.run_history import headlines, history_rows
from prefect_raybatch.report.verdict import verdict_of
from prefect_raybatch.runs.costs import meter_for, with_cost
from prefect_raybatch.runs.estimate import CostEstimate, estimate, with_first, with_judge
from prefect_raybatch.runs.run_history import history_of
from prefect_raybatch.runs.status import report_of, status
from prefect_raybatch.sizing.prices import gpu_price
from prefect_raybatch.sizing.sizes import Capacity, pool_for
from prefect_raybatch.storage import open_store
from prefect_raybatch.words import money

H100S = Capacity(32.0, 2.0, 1, "here", (2.0,), ("H100",), 16.0)
PRICED = {"price_per_gpu_hour": 3600.0, "currency": "EUR"}  # 1 a GPU-second


# --- the price ----------------------------------------------------------------------------------


def estimate_of(job: BatchJob) -> CostEstimate:
    """Return the estimated cost of 400 rows of a job with prices."""
    spec = compile_job(job)
    parts = (spec.cluster, spec.sizes, spec.output, spec.limits.max_cost)
    found = estimate(*parts, H100S, 400)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("cluster", "cards", "price"),
    [
        ({}, ("H100",), None),
        ({"price_per_gpu_hour": 2.5}, ("H100",), 2.5),
        ({"price_per_gpu_hour": 2.5}, (), 2.5),
        ({"price_by_card": {"h100": 4.0}}, ("H100",), 4.0),
        ({"price_by_card": {"H100": 4.0}}, ("NVIDIA H100 80GB HBM3",), 4.0),
        ({"price_by_card": {"L4": 0.6}, "price_per_gpu_hour": 2.0}, ("T4",), 2.0),
        ({"price_by_card": {"L4": 0.6, "T4": 0.3}}, ("T4", "L4"), 0.6),
        ({"price_by_card": {"L4": 0.6}}, ("T4", "L4"), None),
        ({"price_by_card": {"L4": 0.6}}, (), None),
    ],
)
def test_the_price_of_a_card(cluster, cards, price):
    found = gpu_price(cluster_spec(make_job(cluster=cluster)), replace(H100S, accelerators=cards))
    assert found.hour == price
    assert bool(found.why) == (price is None and bool(cluster))


def test_a_job_says_which_of_the_cards_its_engines_take():
    prices = {"price_by_card": {"L4": 0.6, "H100": 4.0}}
    job = make_job(cluster=prices, engine={"accelerator_type": "L4"})
    assert gpu_price(cluster_spec(job), replace(H100S, accelerators=("H100", "L4"))).hour == 0.6


def test_a_limit_without_a_price_is_refused_with_what_to_set():
    with pytest.raises(ConfigError, match=r"limits\.max_cost.*cluster\.price_per_gpu_hour"):
        BatchJob.from_dict(job_dict(limits={"max_cost": 5}))
    for wrong in ({"price_per_gpu_hour": 0}, {"price_by_card": {"L4": -1}}):
        with pytest.raises(ConfigError, match="greater than 0"):
            BatchJob.from_dict(job_dict(cluster=wrong))
    for wrong in ("euro", "eur", "", "€"):
        with pytest.raises(ConfigError, match=r"cluster\.currency.*such as EUR"):
            BatchJob.from_dict(job_dict(cluster={"currency": wrong}))
    unpriced = {"price_by_card": {"L4": 0.6}}
    job = make_job(cluster=unpriced, limits={"max_cost": 5}, engine={"device": "gpu"})
    with pytest.raises(ConfigError, match="price_by_card has no price for H100"):
        spec = compile_job(job)
        meter_for(spec.cluster, spec.limits, H100S, pool_for(spec.sizes, H100S), Spent())


# --- the meter ----------------------------------------------------------------------------------


def test_gpus_count_from_when_engines_are_made_until_they_are_gone():
    meter = CostMeter(3600.0, gpus_an_engine=0.5, fewest=4)
    meter.see(0.0, {})
    meter.see(10.0, {"PENDING_CREATION": 4})  # nothing was held until now
    assert meter.gpu_seconds == 0
    meter.see(20.0, {"ALIVE": 4})
    assert (meter.gpu_seconds, meter.cost, meter.gpus) == (20.0, 20.0, 2.0)
    assert meter.at_end(30.0) == 80.0 and meter.at_end(None) is None
    meter.see(30.0, {})
    meter.see(99.0, {})
    assert meter.gpu_seconds == 40.0


def test_what_was_spent_before_the_attempt_counts_as_its_own():
    meter = CostMeter(3600.0).continue_from(CostMeter(), 20.0)
    assert (meter.gpu_seconds, meter.cost) == (20.0, 20.0)
    assert CostMeter(3600.0).continue_from(meter).gpu_seconds == 20.0


def test_a_pool_that_waits_for_room_pays_for_what_it_has():
    meter = CostMeter(3600.0, gpus_an_engine=1.0, fewest=1)
    meter.see(0.0, {"ALIVE": 2, "PENDING_CREATION": 6})
    meter.see(10.0, {})
    assert meter.gpu_seconds == 20.0


def test_what_had_no_price_counts_at_the_present_one():
    assert Spent(7200.0, 3.0, 3600.0).cost_at(2.0) == 5.0
    assert Spent(3600.0, 3.0).cost_at(None) == 3.0
    assert Spent(3600.0, 0.0, 3600.0).cost_at(None) is None and Spent().cost_at(None) is None
    assert CostMeter(None, 1.0, 1).total_cost is None
    assert CostMeter(2.0, 1.0, 1, Spent(3600.0, 3.0)).total_cost == 3.0


def test_gpus_held_beside_the_engines_count_while_they_are_held():
    meter = CostMeter(3600.0, gpus_an_engine=1.0)
    with meter.holding(4.0):
        meter.see(0.0, {"ALIVE": 1})
    assert meter.gpus == 5.0
    meter.see(0.5, {})
    meter.see(99.0, {})
    assert (meter.gpu_seconds, meter.gpus) == (2.5, 0.0)


def meter_of(price: float | None, tokens: float = 0.0, **of_meter) -> CostMeter:
    """Return a meter that has seen two engines for 0.617 s, in which the tokens cost `tokens`."""
    meter = CostMeter(price, **of_meter)
    meter.tokens_cost = lambda: tokens
    meter.see(1.0, {"ALIVE": 2})
    meter.see(1.61728395, {"ALIVE": 2})
    return meter


SPENT, GPU = {"before": Spent(5.0, 5.0)}, {"gpus_an_engine": 1.0}


@pytest.mark.parametrize(
    ("price", "tokens", "of_meter", "gpu_seconds", "cost", "cost_run", "cost_end"),
    [
        (3600.0, 0.0, {}, 0.0, 0.0, 0.0, 0.0),  # engines without GPUs
        (3600.0, 0.0, GPU, 1.235, 1.234568, 1.234568, 4.234568),
        (3600.0, 0.0, {**GPU, **SPENT}, 1.235, 1.234568, 6.234568, 9.234568),
        (None, 0.0, {**GPU, **SPENT}, 1.235, None, 5.0, None),
        (None, 2.5, SPENT, 0.0, 2.5, 7.5, None),
        (3600.0, 2.5, GPU, 1.235, 3.734568, 3.734568, 6.734568),
    ],
)
def test_a_beat_says_what_is_spent_and_what_the_gpus_held_will_cost(
    price, tokens, of_meter, gpu_seconds, cost, cost_run, cost_end
):
    meter = meter_of(price, tokens, **of_meter)
    of_attempt = {"gpu_seconds": gpu_seconds, "cost": cost, "cost_run": cost_run}
    assert meter.figures(1.5) == {**of_attempt, "cost_end": cost_end}
    assert meter.figures(None) == {**of_attempt, "cost_end": None}


@pytest.mark.parametrize(("price", "cost"), [(None, None), (3600.0, 0.0)])
def test_a_meter_that_has_seen_no_engine_holds_nothing(price, cost):
    nothing = {"gpu_seconds": 0.0, "cost": cost, "cost_run": cost, "cost_end": cost}
    assert CostMeter(price).figures(10.0) == nothing
    pending = CostMeter(price, gpus_an_engine=1.0)
    pending.see(0.0, {"PENDING_CREATION": 3})
    assert pending.figures(10.0) == nothing, "no number of engines is promised"


def test_small_sums_keep_their_digits():
    assert [money(v) for v in (0, 1234.5, 0.001234)] == ["0.00", "1,234.50", "0.00123"]


# --- beats --------------------------------------------------------------------------------------


def test_a_driver_tells_its_costs_and_notices_the_limit(tmp_path):
    run, now = small_run(tmp_path), [0.0]
    limits = Limits(max_cost=30)
    made = Monitor("me", run.plan, run.store, limits, Heard(), lambda: {"ALIVE": 2}, lambda: now[0])
    made.meter = CostMeter(3600.0, 1.0, 2, Spent(5.0, 5.0), "EUR")
    made(Progress(20, 4))
    for now[0] in (0.0, ASK_ENGINES):
        made.look()
    beat = made.beat()
    assert (beat.gpu_seconds, beat.cost, beat.cost_run) == (20.0, 20.0, 25.0)
    assert beat.cost_end is None  # no rate is known
    assert Heartbeat.from_bytes(beat.to_bytes(), "beat") == beat and made.spent is None
    now[0] = 2 * ASK_ENGINES
    made.look()
    error = made.spent
    assert str(error) == (
        "the run has cost 45.00 EUR, and limits.max_cost allows 30.00 EUR. 0 of 4 shards are "
        "committed and kept. Raise the limit and run the same command again to continue"
    )
    made.look()
    assert made.spent is error, "the first one stands"


@pytest.mark.parametrize(
    ("limit", "cost", "committed"),
    [(1.0, 5.0, 4), (5.0, 4.99, 3), (5.0, None, 3), (None, 5.0, 3)],
    ids=["whole", "below", "unknown", "no limit"],
)
def test_a_run_goes_on_if_it_is_whole_or_below_its_limit(limit, cost, committed):
    check_cost(Limits(max_cost=limit), cost, shards=4, committed=committed)


def test_a_run_that_has_reached_its_limit_is_over():
    with pytest.raises(CostExceeded, match=r"cost 5\.00, and .* allows 5\.00\. 3 of 4 shards are"):
        check_cost(Limits(max_cost=5), 5.0, shards=4, committed=3)


def test_the_last_beats_of_all_attempts_add_up(tmp_path):
    run = small_run(tmp_path)
    for name, seconds, cost in (("a", 10.0, 2.0), ("b", 20.0, None), ("c", 30.0, 3.0)):
        run.ledger.note_attempt(name, {"started": name})
        beat = Heartbeat(1.0, gpu_seconds=seconds, cost=cost)
        run.store.put(heartbeat_path(name), beat.to_bytes())
    run.ledger.note_attempt("d", {"started": "d"})  # without a beat
    run.ledger.note_attempt("e", {"started": "e"})
    run.store.put(heartbeat_path("e"), Heartbeat(1.0, gpu_seconds=40.0).to_bytes())
    assert spent_on(run.ledger, run.plan) == Spent(100.0, 5.0, 60.0)


def test_status_counts_killed_attempts_by_their_last_beats(tmp_path):
    run = small_run(tmp_path, cluster={"price_per_gpu_hour": 3.0})
    beats = {
        "a": Heartbeat(1.0, gpu_seconds=3600.0, cost=2.0),
        "b": Heartbeat(1.0, gpu_seconds=1200.0),
    }
    for name, beat in beats.items():
        run.ledger.note_attempt(name, {"started": name})
        run.store.put(heartbeat_path(name), beat.to_bytes())
    found = status(str(tmp_path))
    assert (found.cost, round(found.gpu_hours, 3)) == (3.0, 1.333)
    assert report_of(str(tmp_path)).cost["total"] == 3.0


# --- whole runs ---------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster with two GPUs, whose engines are looked at all the time."""
    monkeypatch.setattr("helpers.nights.CPU", H100S)
    monkeypatch.setattr(watching, "LOOK", 0.01)
    monkeypatch.setattr(watching, "ASK_ENGINES", 0.0)


def priced(nights: Nights, **limits: float) -> BatchJob:
    engine = {"device": "gpu", "replicas": 2, "max_model_len": 256, "engines_per_gpu": 1}
    given = {"max_failed_rows": 0, **limits}
    return nights.job(engine=engine, cluster=PRICED, limits=given, reuse=None)


def slowly(progress: Progress) -> None:
    time.sleep(0.1)


def test_a_run_stops_at_its_limit_is_resumed_and_reports_what_it_cost(tmp_path, gpus):
    nights = Nights(tmp_path)
    nights.write(*(f"t{i}" for i in range(40)))
    job = priced(nights)
    run = plan_run(job, "monday")
    limited = priced(nights, max_cost=0.05)

    def after_two(progress: Progress) -> None:
        nights.alive = 2 * (progress.done >= 8)
        slowly(progress)

    with pytest.raises(CostExceeded, match=r"allows 0\.05 EUR.*of 10 shards are committed"):
        nights.infer(limited, run, after_two)
    done = status(run.uri)
    assert 2 <= done.committed < 10 and done.cost >= 0.05
    with pytest.raises(CostExceeded):  # before anything starts
        nights.infer(limited, run)
    assert status(run.uri).committed == done.committed
    report = nights.drive(job, run)
    assert report.good == 40 and report.cost["total"] > done.cost
    assert report.cost["saved_by_resume"] > 0
    assert report.cost["total"] == pytest.approx(report.cost["per_answered_row"] * 40, rel=1e-6)
    assert status(run.uri).cost == pytest.approx(report.cost["total"], rel=1e-4)
    spent = money(report.cost["total"], "EUR")
    assert f"cost {spent}." in verdict_of(report) and ("Cost", spent) in result_rows(report)
    (page,) = history_of(job.output.uri)
    assert history_rows(page)[0]["cost"] == spent and f"cost {spent}" in headlines(page)[0]

    # The next night is estimated by this one.
    found = estimate_of(job)
    assert "EUR: " in found.line()
    assert found.by == "monday" and found.cost == pytest.approx(10 * report.cost["total"], rel=1e-3)
    small = priced(nights, max_cost=found.cost / 2)
    assert "may stop the run before it is complete" in (estimate_of(small).warning or "")
    elsewhere = small.model_copy(
        update={"output": small.output.model_copy(update={"uri": str(tmp_path / "new")})}
    )
    assert "no earlier run" in estimate_of(elsewhere).why
    on_cpu = edited(small, {"engine.device": "cpu"}, "test")
    text = estimate_of(on_cpu).warning
    assert text == "limits.max_cost has no effect: the engines use no GPU"


@pytest.mark.parametrize(("most", "told"), [(10, ""), (8, "stop the judge"), (5, "stop the run")])
def test_both_models_of_a_cascade_and_the_judge_count_against_the_limit(most, told):
    first, larger = CostEstimate(9, 4.0, by="sampled rows"), CostEstimate(3, 2.0, by="sampled rows")
    both = with_first(larger, first, most, "")
    found = with_judge(both, first, 3.0, most, "")
    assert found is not None
    assert (told in (found.warning or "")) if told else found.warning is None
    no_effect = CostEstimate(3, why="the engines use no GPU", warning="no effect")
    assert with_first(no_effect, first, most, "") == replace(no_effect, warning=None)
    for unknown in (None, CostEstimate(9, why="no GPU")):
        assert with_first(larger, unknown, most, "") == larger


def test_what_reuse_has_saved_is_told_in_money(tmp_path, gpus):
    nights = Nights(tmp_path, alive=2)
    nights.write(*(f"t{i}" for i in range(8)))
    job = priced(nights).model_copy(update={"reuse": "latest"})
    run = plan_run(job, "monday")
    first = finalize_run(job, run, nights.infer(job, run, slowly))
    nights.write(*(f"t{i}" for i in range(9)))
    run = plan_run(job, "tuesday")
    second = finalize_run(job, run, nights.infer(job, run, slowly))
    assert first.cost["total"] > 0 and second.reuse["reused"] == 8
    ledger = Ledger(open_store(first.run))
    plan = need_plan(ledger)
    ten = with_cost(
        replace(first, reuse={"saved_seconds": 10.0}), ledger, plan, prices_of(job.cluster)
    )
    assert ten.cost["saved_by_reuse"] == pytest.approx(10.0, rel=0.02)  # 1 a second
    # of a night that started no engine, or for moments only
    again = Ledger(open_store(second.run))
    more = replace(second, reuse={**second.reuse, "saved_seconds": 10.0})
    more = with_cost(more, again, need_plan(again), prices_of(job.cluster))
    assert more.cost["saved_by_reuse"] == pytest.approx(10.0, rel=0.02)
    spent = spent_on(ledger, plan)
    assert spent.cost == pytest.approx(first.cost["total"], rel=1e-4)
