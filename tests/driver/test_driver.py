"""The loop from receipts to commits, with a pass that kills, fails and loses rows on demand."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.small import Passes, SmallRun, small_run
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_raybatch.driver import driver as driver_module
from prefect_raybatch.driver.driver import SPLIT, STRIKES, Driver, Progress, split_unit
from prefect_raybatch.driver.stops import Stop
from prefect_raybatch.errors import (
    AccessDenied,
    CorruptRun,
    CredentialsUnusable,
    EngineFailure,
    EngineStartError,
    ErrorBudgetExceeded,
    ImagesUnavailable,
    RunDrained,
    SourceError,
    StoreError,
    UnsafeStore,
    is_transient,
)
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger import checkpoints
from prefect_raybatch.ledger.failures import (
    ENGINE_DIED,
    ENGINES_DIED,
    FEW_ALONE,
    FailureKey,
    Loss,
)
from prefect_raybatch.ledger.increments import RequestWeights
from prefect_raybatch.ledger.layout import CHECKPOINTS, commit_path
from prefect_raybatch.ledger.records import Commit, Receipt, Unit
from prefect_raybatch.result.finalize import finalize


def driver_of(run: SmallRun, **kwargs: Any) -> Driver:
    limits = Limits(**kwargs.pop("limits", {"max_failed_fraction": 0.5}))
    return Driver(run.plan, run.shards, run.ledger, limits, **kwargs)


def drive(run: SmallRun, passes: Any, suspects: int = 64, **kwargs: Any) -> Progress:
    driver = driver_of(run, **kwargs)
    driver.resume()
    return driver.run(passes, getattr(passes, "quarantine", no_quarantine), suspects)


def no_quarantine(unit: Unit, reason: str) -> Receipt:
    raise AssertionError(f"{unit} goes to quarantine: {reason}")


def commits(run: SmallRun) -> list[Commit]:
    return [run.ledger.read_commit(run.plan, shard) for shard in range(run.plan.shards)]


def check_whole(run: SmallRun) -> None:
    """Every row of the run is there exactly once, by pieces and not by the records' word."""
    result = finalize(run.ledger, run.plan, run.shards, "_row", 1 << 20)
    assert result.tally.rows == run.plan.rows


# --- all is well --------------------------------------------------------------------------------


def test_each_shard_is_sent_once_and_committed_once(tmp_path):
    run = small_run(tmp_path, rows=22, per_shard=5)
    passes = Passes(run)
    seen: list[int] = []
    progress = drive(run, passes, observe=lambda p: seen.append(p.done))
    assert passes.calls == [(tuple(run.whole(s) for s in range(5)), False)]
    assert (progress.done, progress.passes, progress.engine_deaths) == (22, 1, 0)
    assert seen == [5, 10, 15, 20, 22]
    assert progress.resumed_shards == 0 and progress.seconds_left == 0
    check_whole(run)


def test_a_second_driver_sends_only_what_is_pending_and_counts_what_was_done(tmp_path):
    run = small_run(tmp_path)
    run.commit(2)
    passes = Passes(run)
    progress = drive(run, passes)
    assert [u.shard for u in passes.calls[0][0]] == [0, 1, 3]
    assert (progress.resumed_shards, progress.done) == (1, 20)
    idle = Passes(run)
    assert drive(run, idle).done == 20
    assert idle.calls == []  # nothing pending: no pass, so no engine


def test_commits_of_this_attempt_and_of_earlier_ones_get_into_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "FOLD", 3)
    run = small_run(tmp_path)
    run.commit(2)
    drive(run, Passes(run))
    (file,) = run.store.list(CHECKPOINTS)
    plan, *lines = gzip.decompress(run.store.read(file.path)).splitlines()
    assert plan.decode() == run.plan.hash
    assert [int(line.split()[0]) for line in lines] == [2, 0, 1]  # the fourth is too little


@pytest.mark.parametrize(("started", "first"), [(50.0, 50.0), (None, 100.0)])
def test_the_rate_counts_from_the_start_of_the_engines_work(tmp_path, monkeypatch, started, first):
    now = [100.0]
    monkeypatch.setattr(driver_module, "time", SimpleNamespace(time=lambda: now[0]))
    run = small_run(tmp_path)
    run.commit(3)
    rates: list[tuple[float, float | None]] = []

    def passes(units, isolated):
        for unit in units:
            now[0] += 10.0
            receipt = run.receipt(unit)
            yield replace(receipt, stats=replace(receipt.stats, started=started))

    progress = drive(run, passes, observe=lambda p: rates.append((p.rate, p.seconds_left)))
    assert list(progress.recent) == [(first, 5), (110.0, 5), (120.0, 5)]
    spans = [now - first for now in (110.0, 120.0, 130.0)]
    rate = [rows / span for rows, span in zip((5, 10, 15), spans, strict=True)]
    assert rates == [(rate[0], 10 / rate[0]), (rate[1], 5 / rate[1]), (rate[2], 0.0)]
    nothing = Progress(20, 4)
    assert (nothing.rate, nothing.seconds_left) == (0.0, None)


def test_a_pass_over_some_shards_leaves_the_others_and_what_it_lost(tmp_path):
    run = small_run(tmp_path, rows=25, per_shard=5)
    first, whole = Passes(run), Passes(run)

    def loses(units, isolated):
        yield run.receipt(units[0])
        yield Receipt.of_lost(units[1], "attempt", Loss(ENGINE_DIED, "it died"))

    driver = driver_of(run)
    driver.resume()
    for run_pass, shards in ((first, [3]), (loses, [1, 3, 4]), (first, [3, 4]), (first, [3])):
        driver.run_once(run_pass, shards)
        assert not driver.progress.recent, "the rate of these engines is not that of the next"
    assert first.calls == [((run.whole(3),), False), ((run.whole(4),), False)]
    driver.run(whole, whole.quarantine)
    # The first pass of all is not isolated, though other passes were before it.
    assert whole.calls == [((run.whole(0), run.whole(2)), False)]
    check_whole(run)


def test_receipts_of_parts_in_any_order_and_twice_commit_once(tmp_path):
    run = small_run(tmp_path, rows=10, per_shard=10)
    parts = [run.receipt(Unit(0, at, n)) for at, n in ((6, 4), (0, 2), (2, 4))]
    again = run.receipt(Unit(0, 1, 5))  # a task that ran again with other cuts

    def passes(units, isolated):
        yield from (parts[0], parts[0], parts[1], again, parts[2], again, parts[1])

    assert drive(run, passes).done == 10
    assert set(commits(run)[0].pieces) == {p for r in parts for p in r.pieces}
    check_whole(run)


def test_receipts_of_committed_shards_are_ignored(tmp_path):
    run = small_run(tmp_path)
    first = run.commit(0)
    late = run.receipt(run.whole(0), failed=range(5))

    def passes(units, isolated):
        for unit in units:
            yield late
            yield run.receipt(unit)
            yield run.receipt(unit)

    progress = drive(run, passes)
    assert progress.tally.failed == 0 and progress.done == 20
    assert commits(run)[0] == first


# --- engines die --------------------------------------------------------------------------------


def test_units_of_a_dead_engine_run_again_one_at_a_time(tmp_path):
    run = small_run(tmp_path, rows=40, per_shard=5)
    passes = Passes(run, poison={(2, 3)}, window=4)
    once = passes.__call__

    def dies_once(units, isolated):
        if passes.calls:
            passes.poison.clear()
        return once(units, isolated)

    progress = drive(run, dies_once)
    assert [(len(units), isolated) for units, isolated in passes.calls] == [(8, False), (4, True)]
    assert progress.engine_deaths == 4 and progress.tally.failed == 0
    assert progress.passes == 2 and progress.losses == {"EngineDied: segmentation fault": 4}
    check_whole(run)


@pytest.mark.parametrize("silent", [False, True], ids=["lost receipt", "no receipt"])
@pytest.mark.parametrize(
    "poison", [{(1, 37)}, {(1, 0), (1, 99)}, {(1, 50), (1, 51)}, {(0, 7), (2, 3)}]
)
def test_a_poison_row_is_cut_down_to_and_all_others_are_kept(tmp_path, poison, silent):
    run = small_run(tmp_path, rows=300, per_shard=100)
    passes = Passes(run, poison=poison, silent=silent, window=3)
    progress = drive(run, passes)
    assert progress.done == 300
    assert {(u.shard, u.offset) for u, _ in passes.quarantined} == poison
    assert all(u.rows == 1 for u, _ in passes.quarantined)
    assert all(reason.startswith("EngineDied") for _, reason in passes.quarantined)
    for commit in commits(run):
        dead = sorted(p for s, p in poison if s == commit.shard)
        assert commit.failed.numbers.tolist() == dead
    check_whole(run)


@pytest.mark.parametrize("deaths", [1, 2, 4])
def test_a_row_is_given_as_many_chances_as_the_limit_says(tmp_path, deaths):
    run = small_run(tmp_path, rows=20, per_shard=10)
    passes = Passes(run, poison={(1, 4)})
    drive(run, passes, limits={"engine_deaths": deaths, "max_failed_fraction": 0.5})
    alone = [units for units, isolated in passes.calls if Unit(1, 4, 1) in units and isolated]
    assert len(alone) == deaths
    assert len(passes.quarantined) == 1


def test_reasons_for_losses_are_counted_so_many_and_so_much_of_each(tmp_path, caplog):
    run = small_run(tmp_path, rows=4, per_shard=2)
    kinds = [f"E{n}" for n in range(22)]
    told = [(shard, kind) for shard, kind in zip([0, 1] * 11, kinds, strict=True)]
    told += [(0, "E3"), (0, "E21")]

    def passes(units, isolated):
        for shard, kind in told:
            yield Receipt.of_lost(run.whole(shard), "a", Loss(kind, "x" * 300))
        told.clear()
        if isolated:
            yield from (run.receipt(unit) for unit in units)

    progress = drive(run, passes)
    kept = {f"{kind}: {'x' * (198 - len(kind))}": 1 for kind in kinds[:20]}
    assert progress.losses == {**kept, f"E3: {'x' * 196}": 2}
    lost = [r.getMessage() for r in caplog.records if "was lost" in r.getMessage()]
    assert lost == [f"shard {shard} was lost: E{shard}: {'x' * 300}" for shard in (0, 1)]


def test_a_death_that_costs_several_blocks_is_counted_once(tmp_path):
    run = small_run(tmp_path)
    told = [Loss(ENGINE_DIED, "SIGSEGV", counted=n > 0) for n in range(4)]

    def passes(units, isolated):
        for unit in units:
            if told:
                lost = Receipt.of_lost(unit, "a", told.pop(0))
                yield Receipt.from_json(lost.to_json())
            else:
                yield run.receipt(unit)

    assert drive(run, passes).engine_deaths == 1


class GivesUp(Passes):
    """Engines die of every unit but those of one shard, and a pass is given up after so many."""

    WELL, MOST = 70, 20

    def __call__(self, units: Any, isolated: bool) -> Any:
        self.calls.append((tuple(units), isolated))
        most = self.MOST if isolated else 4
        for number, unit in enumerate(units):
            if unit.shard >= self.WELL:
                yield self.run.receipt(unit)
            elif number >= most:
                for left in units:
                    yield Receipt.of_lost(left, "a", Loss(ENGINES_DIED, "again and again"))
                return


def test_rows_that_kill_are_found_where_each_pass_is_given_up_before_the_others(tmp_path):
    """All rows of the first shards kill. What a pass did not come to is not cut or blamed."""
    run = small_run(tmp_path, rows=80, per_shard=1)
    passes = GivesUp(run)
    passes.WELL = 24
    progress = drive(run, passes, limits={"engine_deaths": 1, "max_failed_fraction": 0.5})
    assert progress.done == 80 and progress.tally.failed == 24
    alone = [len(units) for units, isolated in passes.calls if isolated]
    assert alone[:2] == [80, FEW_ALONE], "of the first no unit is blamed"
    assert len(passes.quarantined) == 24


def test_engines_that_die_in_every_pass_end_the_run(tmp_path):
    run = small_run(tmp_path, rows=3000, per_shard=1)
    passes = GivesUp(run)
    passes.WELL, passes.MOST = 9999, 0
    with pytest.raises(EngineFailure, match="no shard was committed in 3 passes"):
        drive(run, passes)
    assert len(passes.calls) == STRIKES + 1, "the one that only says that fewer are to be tried"


def test_rows_that_passed_are_not_sent_again(tmp_path):
    run = small_run(tmp_path, rows=64, per_shard=64)
    passes = Passes(run, poison={(0, 20)})
    drive(run, passes)
    sent = [units for units, _ in passes.calls]
    assert sent[:2] == [(Unit(0, 0, 64),)] * 2
    assert sent[2] == tuple(split_unit(Unit(0, 0, 64)))
    assert sent[3] == (Unit(0, 20, 1), Unit(0, 21, 1), Unit(0, 22, 1), Unit(0, 23, 1))
    assert sent[4] == (Unit(0, 20, 1),)


def test_more_than_can_have_been_in_flight_is_not_isolated_at_first(tmp_path):
    """One at a time over thousands of shards that never ran would take the night."""
    run = small_run(tmp_path, rows=20, per_shard=1)
    passes = Passes(run, poison={(0, 0)}, window=10)
    drive(run, passes, suspects=3)
    flags = [(len(units), isolated) for units, isolated in passes.calls]
    # The second pass dies like the first; then one at a time is the only way on.
    assert flags == [(20, False), (10, False), (10, True), (1, True)]


@pytest.mark.parametrize(
    ("lost", "suspects", "isolated"),
    [(5, {"suspects": 5}, True), (6, {"suspects": 5}, False), (64, {}, True), (65, {}, False)],
)
def test_as_many_units_as_may_be_in_flight_are_isolated(tmp_path, lost, suspects, isolated):
    run = small_run(tmp_path, rows=66, per_shard=1)
    calls: list[tuple[int, bool]] = []

    def passes(units, alone):
        calls.append((len(units), alone))
        if len(calls) > 1:
            raise InterruptedError  # it is known how the second pass goes
        for unit in units[lost:]:
            yield run.receipt(unit)

    driver = driver_of(run)
    driver.resume()
    with pytest.raises(InterruptedError):
        driver.run(passes, no_quarantine, **suspects)
    assert calls == [(66, False), (lost, isolated)]


def test_nothing_gets_through_is_an_infrastructure_error(tmp_path):
    run = small_run(tmp_path)
    everything = {(s, p) for s in range(4) for p in range(5)}
    passes = Passes(run, poison=everything)
    with pytest.raises(EngineFailure, match=f"in {STRIKES} passes.*segmentation fault"):
        drive(run, passes)
    assert len(passes.calls) == STRIKES
    assert not run.ledger.committed(run.plan).any()
    assert not passes.quarantined  # no row is blamed for a machine


@pytest.mark.parametrize("poison", [{(3, 0), (3, 1)}, {(2, 1), (3, 0), (3, 1)}, {(3, 1)}])
def test_what_an_earlier_attempt_left_may_be_nothing_but_rows_that_kill(tmp_path, poison):
    run = small_run(tmp_path, rows=8, per_shard=2)
    for shard in {0, 1, 2, 3} - {shard for shard, _ in poison}:
        run.commit(shard)
    passes = Passes(run, poison=poison)
    progress = drive(run, passes, limits={"max_failed_fraction": 0.9})
    assert progress.done == 8
    assert {(u.shard, u.offset) for u, _ in passes.quarantined} == poison
    check_whole(run)


@pytest.mark.parametrize("rows", [7, 8])  # one or two rows in the last shard; two are split first
def test_rows_of_committed_shards_tell_a_broken_machine_from_rows_that_kill(tmp_path, rows):
    run = small_run(tmp_path, rows=rows, per_shard=2)
    for shard in (0, 1, 2):
        run.commit(shard)
    passes = Passes(run, poison={(s, p) for s in range(4) for p in range(2)})
    with pytest.raises(EngineFailure, match=f"in {STRIKES} passes"):
        drive(run, passes)
    assert not passes.quarantined
    probed = {u for units, isolated in passes.calls if isolated for u in units if u.shard != 3}
    assert probed == {Unit(0, 1, 1), Unit(1, 1, 1), Unit(2, 1, 1)}


def test_rows_that_killed_engines_before_are_no_probes(tmp_path):
    run = small_run(tmp_path, rows=5, per_shard=1)
    for shard in range(4):
        run.commit(shard, failed=[0])
    passes = Passes(run, poison={(shard, 0) for shard in range(5)})
    assert drive(run, passes, limits={"max_failed_rows": 5}).done == 5
    assert [unit for unit, _ in passes.quarantined] == [Unit(4, 0, 1)]


@pytest.mark.parametrize(
    ("shards", "why", "text"),
    [
        (4, None, "20 units of work are left. Last reason: no receipt came back"),
        (1, Loss("OSError", "busy"), "1 unit of work is left. Last reason: OSError: busy"),
    ],
    ids=["silence", "losses"],
)
def test_three_passes_without_progress_are_an_infrastructure_error(
    tmp_path, caplog, shards, why, text
):
    run = small_run(tmp_path, rows=5 * shards, per_shard=5)

    def passes(units, isolated):
        yield from (Receipt.of_lost(unit, "a", why) for unit in units if why)

    with pytest.raises(EngineFailure) as caught:
        drive(run, passes)
    assert str(caught.value) == f"no shard was committed in 3 passes; {text}"
    whole = {4: "4 of 4 shards", 1: "1 of 1 shard"}[shards]
    assert [r.getMessage() for r in caplog.records if "after pass" in r.getMessage()] == [
        f"{whole} not committed after pass {number}; running them again" for number in (1, 2)
    ]


@pytest.mark.parametrize(
    ("committed", "text"),
    [
        (0, "0 of 4 shards are committed; 4 are left"),
        (1, "1 of 4 shards is committed; 3 are left"),
        (3, "3 of 4 shards are committed; 1 is left"),
    ],
)
@pytest.mark.parametrize("once", [False, True], ids=["run", "run_once"])
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_drained_run_commits_what_is_in_flight_and_says_what_is_left(
    tmp_path, committed, text, once, when
):
    run = small_run(tmp_path)
    asked_to_drain, calls = [when == "before"], []

    def passes(units, isolated):
        calls.append(len(units))
        asked_to_drain[0] = True
        for unit in units[:committed]:
            yield run.receipt(unit)

    if when == "before":
        for shard in range(committed):
            run.commit(shard)
    driver = driver_of(run, draining=lambda: asked_to_drain[0])
    driver.resume()
    with pytest.raises(RunDrained) as caught:
        if once:
            driver.run_once(passes, range(4))
        else:
            driver.run(passes, no_quarantine)
    assert str(caught.value) == f"drained: {text}. Run the same command again to finish them"
    assert calls == ([4] if when == "during" else [])
    assert run.ledger.committed(run.plan).sum() == committed


def test_a_run_whose_last_pass_is_complete_is_not_drained(tmp_path):
    run = small_run(tmp_path)
    passes = Passes(run)
    assert drive(run, passes, draining=lambda: bool(passes.calls)).done == 20


def test_a_pass_that_gets_anything_through_starts_the_strikes_anew(tmp_path):
    run = small_run(tmp_path)
    calls: list[int] = []

    def one_in_two(units, isolated):
        calls.append(len(units))
        if len(calls) % 2 == 0:
            yield run.receipt(units[0])
            units = units[1:]
        for unit in units:
            yield Receipt.of_lost(unit, "a", Loss("OSError", "busy"))

    assert drive(run, one_in_two).done == 20
    assert len(calls) == 8


def test_what_the_store_lost_is_neither_cut_nor_quarantined(tmp_path):
    run = small_run(tmp_path, rows=20, per_shard=20)
    sent: list[Any] = []

    def passes(units, isolated):
        sent.append(tuple(units))
        lost = len(sent) < STRIKES
        why = Loss("StoreUnavailable", "no answer")
        yield Receipt.of_lost(units[0], "a", why) if lost else run.receipt(units[0])

    progress = drive(run, passes)
    assert sent == [(Unit(0, 0, 20),)] * STRIKES
    assert progress.engine_deaths == 0 and progress.done == 20


def test_a_store_that_stays_away_ends_a_run_that_had_worked(tmp_path):
    run = small_run(tmp_path)
    calls: list[int] = []

    def passes(units, isolated):
        calls.append(len(units))
        assert len(calls) <= 1 + STRIKES, "it goes on for ever"
        if len(calls) == 1:
            yield run.receipt(units[0])
        for unit in units[len(calls) == 1 :]:
            yield Receipt.of_lost(unit, "a", Loss("StoreUnavailable", "no answer"))

    with pytest.raises(EngineFailure, match=r"in 3 passes; 3 units .*no answer"):
        drive(run, passes)
    assert calls == [4, 3, 3, 3]


def test_a_death_is_seen_whatever_the_pass_before_lost_the_shard_to(tmp_path):
    """The process of a row ends without a word, once the store is back."""
    run = small_run(tmp_path, rows=20, per_shard=5)
    poisoned = Passes(run, poison={(1, 3)}, silent=True)

    def passes(units, isolated):
        if not isolated:
            yield Receipt.of_lost(run.whole(1), "a", Loss("StoreUnavailable", "no answer"))
        yield from poisoned(units, isolated)

    passes.quarantine = poisoned.quarantine
    assert drive(run, passes).done == 20
    assert poisoned.quarantined == [(Unit(1, 3, 1), "EngineDied: no receipt came back")]


def test_what_was_lost_with_a_node_is_neither_cut_nor_blamed(tmp_path):
    run = small_run(tmp_path, rows=4, per_shard=1)
    calls: list[Any] = []

    def passes(units, isolated):
        calls.append((tuple(units), isolated))
        for unit in units:
            lost = len(calls) < STRIKES + 1 and unit.shard == 2
            gone = Receipt.of_lost(unit, "a", Loss("NodeLost", "a node of the cluster went"))
            yield gone if lost else run.receipt(unit)

    progress = drive(run, passes, limits={"engine_deaths": 1, "max_failed_fraction": 0.5})
    assert calls[1:] == [((run.whole(2),), True)] * STRIKES
    assert (progress.done, progress.tally.failed) == (4, 0)


@pytest.mark.parametrize("last", ["the node", "the row", "the row, without a word"])
def test_of_a_shard_in_parts_each_is_lost_to_its_own_cause(tmp_path, last):
    """A row that kills, beside one whose node was lost in as many passes and more."""
    run = small_run(tmp_path, rows=8, per_shard=4)
    killer, unlucky = Unit(1, 1, 1), Unit(1, 3, 1)
    alone: list[tuple[Unit, ...]] = []
    quarantined: list[tuple[Unit, str]] = []

    def passes(units, isolated):
        if units == [killer, unlucky] or units == [unlucky]:
            alone.append(tuple(units))
        for unit in units if last == "the node" else reversed(units):
            dies = unit.overlaps(killer)
            if dies and (unit.rows > 1 or last != "the row, without a word"):
                yield Receipt.of_lost(unit, "a", Loss("EngineDied", "segmentation fault"))
            elif unit == unlucky and len(alone) < 4:
                yield Receipt.of_lost(unit, "a", Loss("NodeLost", "a node of the cluster went"))
            elif not dies:
                yield run.receipt(unit)

    def quarantine(unit, why):
        quarantined.append((unit, why.kind))
        return Passes(run).quarantine(unit, why)

    passes.quarantine = quarantine
    progress = drive(run, passes, limits={"engine_deaths": 2, "max_failed_fraction": 0.5})
    assert (progress.done, progress.tally.failed) == (8, 1)
    assert quarantined == [(killer, "EngineDied")]
    # The first time both were among four rows; the unlucky one comes through at last.
    assert alone == [(killer, unlucky), (unlucky,), (unlucky,), (unlucky,)]
    check_whole(run)


def test_a_block_that_hung_is_cut_until_its_rows_fail_alone(tmp_path):
    run = small_run(tmp_path, rows=40, per_shard=20)
    bad = set(range(4, 9))

    def passes(units, isolated):
        for unit in units:
            rows = range(unit.offset, unit.offset + unit.rows)
            found = bad & set(rows) if unit.shard == 1 else set()
            if len(found) > 1:
                hung = Loss("BlockHung", "output.postprocess a:b (3 rows in a row)")
                yield Receipt.of_lost(unit, "a", hung)
            else:
                yield run.receipt(unit, found)

    progress = drive(run, passes, limits={"max_failed_rows": 5})
    assert (progress.done, progress.tally.failed, progress.engine_deaths) == (40, 5, 0)
    check_whole(run)


def test_units_are_isolated_so_many_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(driver_module, "ALONE", 3)
    run = small_run(tmp_path, rows=10, per_shard=1)
    passes = Passes(run, poison={(0, 0), (5, 0)}, window=10)
    progress = drive(run, passes, suspects=3)
    assert progress.done == 10 and len(passes.quarantined) == 2
    assert [len(units) for units, isolated in passes.calls if not isolated] == [10, 8, 5]
    assert all(len(units) <= 3 for units, isolated in passes.calls if isolated)
    check_whole(run)


@settings(max_examples=25)
@given(
    rows=st.integers(3, 60),  # more than can be poison: else it is the machine that is to blame
    per_shard=st.integers(1, 40),
    window=st.integers(1, 5),
    suspects=st.integers(1, 8),
    data=st.data(),
)
def test_whatever_rows_kill_and_fail_the_rest_is_kept(
    tmp_path_factory, rows, per_shard, window, suspects, data
):
    run = small_run(tmp_path_factory.mktemp("run"), rows=rows, per_shard=per_shard)
    places = [(s, p) for s in range(run.plan.shards) for p in range(run.shards[s].rows)]
    # At least one row lives: where none does, the infrastructure is to blame (tested above).
    poison = data.draw(st.sets(st.sampled_from(places), max_size=min(2, rows - 1)), "poison")
    failed = data.draw(st.sets(st.sampled_from(places), max_size=3), "failed") - poison
    passes = Passes(run, poison, failed, window=window)
    progress = drive(run, passes, suspects=suspects, limits={"max_failed_fraction": 1.0})
    assert progress.done == rows
    found = {(c.shard, p) for c in commits(run) for p in c.failed.numbers.tolist()}
    assert found == poison | failed
    check_whole(run)


@given(offset=st.integers(0, 100), rows=st.integers(2, 5000))
def test_a_cut_is_a_partition_that_makes_progress(offset, rows):
    parts = split_unit(Unit(3, offset, rows))
    assert 2 <= len(parts) <= SPLIT
    at = offset
    for part in parts:
        assert part.shard == 3 and part.offset == at and part.rows >= 1
        at += part.rows
    assert at == offset + rows


# --- budgets ------------------------------------------------------------------------------------


def test_the_shard_that_would_cross_the_limit_is_not_committed(tmp_path):
    run = small_run(tmp_path)
    passes = Passes(run, failed={(0, 1), (1, 0), (2, 1), (2, 2)})
    with pytest.raises(ErrorBudgetExceeded) as caught:
        drive(run, passes, limits={"max_failed_rows": 3})
    assert str(caught.value) == (
        "4 of 15 rows tried failed, more than limits.max_failed_rows 3 (3 rows) allows; 5 were not "
        "tried. Most common:\n"
        "  4 rows: engine: ValueError: refused\n"
        "Examples:\n"  # of the shard that is not committed
        "  row 11: engine: ValueError: refused\n"
        "  row 12: engine: ValueError: refused\n"
        "2 of 4 shards are committed and kept. Fix the cause or raise the limit, then run the job "
        "again."
    )
    assert run.ledger.committed(run.plan).tolist() == [True, True, False, False]


def test_failed_requests_count_as_the_rows_that_wait_for_them_in_all_shards(tmp_path):
    run = small_run(tmp_path, rows=4, per_shard=1)
    waiting = RequestWeights(40, run.shards.starts, np.array([10, 10, 10, 10]))
    for most, committed in ((19, 1), (29, 2)):  # the second attempt resumes
        with pytest.raises(ErrorBudgetExceeded) as caught:
            passes = Passes(run, failed={(shard, 0) for shard in range(4)})
            drive(run, passes, limits={"max_failed_rows": most}, waiting=waiting)
        allowed = f"limits.max_failed_rows {most} ({most} rows) allows"
        failed = f"{10 * committed + 10} of 40 rows failed, more than {allowed}. Most common:"
        assert str(caught.value).startswith(failed)
        assert run.ledger.committed(run.plan).sum() == committed
    driver = driver_of(run, limits={"max_failed_rows": 19}, waiting=waiting)
    with pytest.raises(ErrorBudgetExceeded, match="20 of 40 rows failed"):
        driver.resume()


def test_the_five_most_common_failures_are_named(tmp_path):
    run = small_run(tmp_path, rows=40, per_shard=40)
    failures = {FailureKey("engine", f"Error{n}", "why"): n for n in range(1, 8)}

    def passes(units, isolated):
        yield replace(run.receipt(units[0], range(28)), failures=failures)

    with pytest.raises(ErrorBudgetExceeded) as caught:
        drive(run, passes, limits={"max_failed_rows": 2})
    named = [line for line in str(caught.value).splitlines() if "Error" in line and "why" in line]
    assert named == [f"  {n} rows: engine: Error{n}: why" for n in (7, 6, 5, 4, 3)]


@pytest.mark.parametrize(
    ("away", "fetches", "kind"),
    [
        (2, {"fetches_images": True}, ErrorBudgetExceeded),
        (3, {"fetches_images": True}, ImagesUnavailable),
        (5, {"fetches_images": True}, ImagesUnavailable),
        (5, {}, ErrorBudgetExceeded),
    ],
)
def test_images_that_cannot_be_fetched_now_leave_a_run_to_a_retry(tmp_path, away, fetches, kind):
    run = small_run(tmp_path)

    def outage(units, isolated):
        for unit in units:
            kinds = {"ImageUnavailable": away, "BadImage": 5 - away}
            failures = {FailureKey("prepare", name, "503"): n for name, n in kinds.items() if n}
            yield replace(run.receipt(unit, range(5)), failures=failures)

    with pytest.raises(kind) as caught:
        drive(run, outage, limits={"max_failed_rows": 2}, **fetches)
    assert is_transient(caught.value) == (kind is ImagesUnavailable)


@pytest.mark.parametrize(("away", "rows"), [(1, "1 row"), (2, "2 rows")])
def test_images_that_are_away_are_told_with_the_limit_that_they_cross(tmp_path, away, rows):
    run = small_run(tmp_path, rows=10, per_shard=5)

    def outage(units, isolated):
        failures = {FailureKey("prepare", "ImageUnavailable", "503"): away}
        yield replace(run.receipt(units[1], range(away)), failures=failures)

    with pytest.raises(ImagesUnavailable) as caught:
        drive(run, outage, limits={"max_failed_rows": 0}, fetches_images=True)
    assert str(caught.value) == (
        f"the images of {rows} in shard 1 cannot be fetched now, and limits.max_failed_rows 0 "
        "(0 rows) allows fewer rows to fail"
    )


def test_images_that_were_away_earlier_are_no_reason_for_a_retry(tmp_path):
    run = small_run(tmp_path)

    def outage_at_first(units, isolated):
        for unit in units:
            error, failed = (("ImageUnavailable", 2), ("ValueError", 1))[min(unit.shard, 1)]
            receipt = run.receipt(unit, range(failed))
            yield replace(receipt, failures={FailureKey("prepare", error, "503"): failed})

    for _ in range(2):  # the second attempt resumes
        with pytest.raises(ErrorBudgetExceeded):
            drive(run, outage_at_first, limits={"max_failed_rows": 2}, fetches_images=True)


@pytest.mark.parametrize("limit", [5, 19])
def test_a_request_whose_image_is_away_counts_as_its_rows(tmp_path, limit):
    run = small_run(tmp_path, rows=2, per_shard=2)

    def outage(units, isolated):
        for unit in units:
            receipt = run.receipt(unit, range(2))
            yield replace(receipt, failures={FailureKey("prepare", "ImageUnavailable", "503"): 2})

    waiting = RequestWeights(20, run.shards.starts, np.array([10, 10]))
    with pytest.raises(ImagesUnavailable, match=rf"of 20 rows .* {limit / 20} \({limit} rows\)"):
        limits = {"max_failed_fraction": limit / 20}
        drive(run, outage, limits=limits, waiting=waiting, fetches_images=True)


def test_who_watches_is_told_of_the_failed_rows_that_are_not_committed(tmp_path):
    run = small_run(tmp_path, rows=100, per_shard=50)
    seen, stops = [], []
    passes = Passes(run, failed={(1, p) for p in range(1, 50)})
    driver = driver_of(
        run,
        limits={"max_failed_fraction": 0.1},
        observe=lambda p: seen.append((p.done, p.tally.failed, p.held_back)),
        on_stop=stops.append,
    )
    driver.resume()
    with pytest.raises(ErrorBudgetExceeded, match="49 of 100 rows tried failed"):
        driver.run(passes, passes.quarantine)
    assert seen == [(50, 0, 0), (50, 0, 49)]
    (stop,) = stops
    assert (stop.failed, stop.held_back, stop.allowed, stop.shard) == (49, 49, 10, 1)
    assert [one.row for one in stop.sample] == list(range(51, 71))  # of bounded size
    assert (stop.sample[0].stage, stop.sample[0].error) == ("engine", "ValueError")
    assert Stop.from_note({"stopped": json.loads(json.dumps(stop.to_dict()))}) == stop


def test_failed_rows_that_cannot_be_read_leave_the_error_as_it_is(tmp_path, monkeypatch):
    run = small_run(tmp_path)
    passes = Passes(run, failed={(0, 1)})
    driver = driver_of(run, limits={"max_failed_rows": 0})
    driver.resume()
    read = run.store.read

    def away(path: str, *most: int) -> bytes:
        if "pieces" in path:
            raise StoreError("gone")
        return read(path, *most)

    monkeypatch.setattr(run.store, "read", away)
    with pytest.raises(ErrorBudgetExceeded, match="1 of 5 rows tried failed"):
        driver.run(passes, passes.quarantine)


@pytest.mark.parametrize("stopped", [None, 3, {}, {"failed": 1}, {"sample": [1]}])
def test_a_note_without_a_readable_stop_has_none(stopped):
    assert Stop.from_note({"stopped": stopped}) is None and Stop.from_note({}) is None


def test_a_fraction_is_of_planned_rows_not_of_those_done(tmp_path):
    run = small_run(tmp_path)
    progress = drive(run, Passes(run, failed={(0, 1)}), limits={"max_failed_fraction": 0.05})
    assert progress.tally.failed == 1


def test_after_raising_the_limit_the_run_goes_on(tmp_path):
    run = small_run(tmp_path)
    bad = {(0, 1), (1, 0), (1, 1)}
    with pytest.raises(ErrorBudgetExceeded):
        drive(run, Passes(run, failed=bad), limits={"max_failed_rows": 2})
    again = Passes(run, failed=bad)
    assert drive(run, again, limits={"max_failed_rows": 3}).tally.failed == 3
    assert [u.shard for u in again.calls[0][0]] == [1, 2, 3]
    check_whole(run)


def test_a_run_with_all_its_shards_is_not_stopped_by_a_limit_lowered_since(tmp_path):
    run = small_run(tmp_path)
    drive(run, Passes(run, failed={(0, 1), (1, 0)}), limits={"max_failed_rows": 2})
    assert drive(run, Passes(run), limits={"max_failed_rows": 0}).tally.failed == 2


def test_a_budget_crossed_before_is_told_before_anything_starts(tmp_path):
    run = small_run(tmp_path)
    run.commit(0, failed=[1, 2, 3])
    driver = driver_of(run, limits={"max_failed_rows": 2})
    with pytest.raises(ErrorBudgetExceeded, match="3 of 5 rows tried failed"):
        driver.resume()


def test_rows_that_kill_their_engine_count_as_failed(tmp_path):
    run = small_run(tmp_path)
    with pytest.raises(ErrorBudgetExceeded, match="EngineDied"):
        drive(run, Passes(run, poison={(1, 1)}), limits={"max_failed_rows": 0})


# --- fatal receipts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "kind", "said"),
    [
        ("SourceError: in.parquet has changed", SourceError, "in.parquet has changed"),
        ("StoreError: permission denied", StoreError, "permission denied"),
        ("AccessDenied: no s3:GetObject", AccessDenied, "no s3:GetObject"),
        ("CredentialsUnusable: expired", CredentialsUnusable, "expired"),
        ("UnsafeStore: no put-if-absent", UnsafeStore, "no put-if-absent"),
        ("CorruptRun: piece", CorruptRun, "piece"),
        ("TypeError: unexpected keyword", EngineStartError, "TypeError: unexpected keyword"),
        ("EngineDied: no kernel image", EngineStartError, "EngineDied: no kernel image"),
    ],
)
def test_a_fatal_receipt_stops_the_run_with_its_error(tmp_path, reason, kind, said):
    run = small_run(tmp_path)

    def passes(units, isolated):
        yield run.receipt(units[0])
        yield Receipt.of_lost(run.whole(1), "a", Loss.parse(reason, fatal=True))
        raise AssertionError("nothing is asked for after a fatal receipt")

    with pytest.raises(kind) as caught:
        drive(run, passes)
    assert type(caught.value) is kind and said in str(caught.value)
    assert run.ledger.committed(run.plan).tolist() == [True, False, False, False]  # is kept


# --- two drivers --------------------------------------------------------------------------------


def test_another_driver_commits_in_the_middle(tmp_path):
    """Its read tasks skip what is committed, so no receipt ever comes for it."""
    run = small_run(tmp_path)
    theirs = []

    def passes(units, isolated):
        theirs.append(run.commit(1, failed=[0], attempt="theirs"))
        yield from (run.receipt(u) for u in units if u.shard != 1)

    progress = drive(run, passes)
    assert progress.passes == 1 and progress.done == 20 and progress.tally.failed == 1
    assert commits(run)[1] == theirs[0]
    check_whole(run)


def test_a_commit_of_another_driver_leaves_the_other_shards_pending(tmp_path):
    run = small_run(tmp_path)
    passes = Passes(run)

    def cut_short(units, isolated):
        receipts = passes(units, isolated)
        yield next(receipts)
        if not run.commit(1, attempt="theirs"):  # in the second pass
            yield from receipts

    progress = drive(run, cut_short)
    assert [[u.shard for u in units] for units, _ in passes.calls] == [[0, 1, 2, 3], [2, 3]]
    assert progress.done == 20
    check_whole(run)


def test_losing_the_race_for_a_commit_takes_the_winners_record(tmp_path):
    run = small_run(tmp_path)

    def passes(units, isolated):
        for unit in units:
            receipt = run.receipt(unit)
            run.commit(unit.shard, failed=[2], attempt="theirs")
            yield receipt

    progress = drive(run, passes)
    assert {c.attempt for c in commits(run)} == {"theirs"}
    assert progress.tally.failed == 4  # counted as it stands, not as we would have had it
    check_whole(run)


def test_a_part_held_of_a_shard_that_others_committed_is_forgotten(tmp_path):
    run = small_run(tmp_path, rows=10, per_shard=10)

    def passes(units, isolated):
        yield run.receipt(Unit(0, 0, 4))
        run.commit(0, attempt="theirs")

    progress = drive(run, passes)
    assert progress.done == 10 and sum(len(c.good) for c in commits(run)) == 10


def test_a_commit_of_another_plan_stops_the_driver(tmp_path):
    run = small_run(tmp_path)
    commit = run.commit(0)
    (tmp_path / commit_path(0)).write_bytes(replace(commit, plan_hash="x").to_bytes())
    with pytest.raises(CorruptRun, match="another plan"):
        driver_of(run).resume()


def test_a_driver_killed_at_any_commit_loses_and_doubles_nothing(tmp_path: Path):
    """Stopped after each number of commits in turn, then continued to the end."""

    class Killed(BaseException):
        pass

    run = small_run(tmp_path, rows=12, per_shard=3)
    for _ in range(run.plan.shards - 1):

        def kill(progress: Progress) -> None:
            raise Killed

        with pytest.raises(Killed):
            drive(run, Passes(run), observe=kill)
    assert run.ledger.committed(run.plan).sum() == 3
    assert drive(run, Passes(run)).resumed_shards == 3
    check_whole(run)
