"""Runs that learn how to arrange their engines: night after night, killed, failed, and edited."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.nights import InThisProcess, Killed, Nights

from prefect_raybatch.api import dry_run, plan_run
from prefect_raybatch.cluster import connect
from prefect_raybatch.errors import EngineFailure
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.arrangement import Arrangement, read_arrangement
from prefect_raybatch.ledger.layout import ARRANGEMENT, REPORT
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Receipt, Unit
from prefect_raybatch.report.records import RunReport, put_report, read_report
from prefect_raybatch.report.report import arrangement_text, markdown
from prefect_raybatch.sizing import cost
from prefect_raybatch.sizing.sizes import Capacity
from prefect_raybatch.storage import open_store

H100 = Capacity(16.0, 1.0, 1, "local", (1.0,), ("H100",), 16.0)
SHARDS, TRIAL = 55, 11  # of a night, and of its trial
SECONDS = 40.0  # of a shard in one engine
ONE, TWO = Arrangement(1, 256), Arrangement(2, 256)


class Timed(InThisProcess):
    """Says of each shard when it was in an engine: as many at once as there are engines."""

    nights: TimedNights

    def __call__(self, units: Sequence[Unit], isolated: bool) -> Iterator[Receipt]:
        nights, engines = self.nights, self.size.pool.engines_per_gpu
        nights.passes.append((Arrangement(engines, self.size.max_num_seqs), len(units)))
        if nights.broken == engines:
            raise EngineFailure("the engines died")
        speed, busy = nights.speed[engines]
        slots = [nights.clock + 100.0 + i * SECONDS / speed for i in range(engines)]
        for receipt in super().__call__(units, isolated):
            at = slots.index(min(slots))
            began, slots[at] = slots[at], slots[at] + SECONDS * engines / speed
            nights.clock = max(slots)
            up = slots[at] - began
            figures = {"up_s": up, "idle_s": 0.0, "peak_flops": up, "peak_bytes": up, "gpu": busy}
            times = {"started": began, "ended": slots[at]}
            stats = replace(receipt.stats, **figures, **times, prompt_tokens=400.0)
            yield replace(receipt, stats=stats, where={"engine": f"host:{at}"})


@dataclass
class TimedNights(Nights):
    """`speed` is {engines: (speed of all of them, share in which the GPU is busy)}; engines of the
    number `broken` die. `passes` are (arrangement, units) of each pass."""

    capacity: Capacity | None = H100
    pipeline: Any = Timed
    speed: dict[int, tuple[float, float]] = field(
        default_factory=lambda: {1: (1.0, 0.3), 2: (1.8, 0.97), 4: (1.9, 0.99)}
    )
    broken: int = 0
    clock: float = 1e9
    passes: list[tuple[Arrangement, int]] = field(default_factory=list)

    def learning_job(self, **engine: Any) -> BatchJob:
        fixed = {"max_num_seqs": 256, "max_concurrent_batches": 1}
        return self.job(reuse=None, engine={**fixed, **engine})

    def run(self, number: int, **engine: Any) -> RunReport:
        self.passes.clear()
        return self.night(f"nightly-{number:02}", self.learning_job(**engine))

    def decided(self, number: int) -> tuple[Arrangement, Arrangement | None]:
        note = read_arrangement(self.store(number))
        assert note is not None
        return note.incumbent, note.challenger

    def store(self, number: int) -> Any:
        return open_store(str(self.folder / "out" / f"nightly-{number:02}"))

    def edit(self, number: int, **changes: Any) -> None:
        """Change the arrangement in a night's report, with a checksum that is right."""
        report = read_report(self.store(number))
        assert report.arrangement is not None
        put_report(
            self.store(number),
            replace(report, arrangement=replace(report.arrangement, **changes)),
        )


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TimedNights:
    """A job whose cost model takes Python for fast, so that it chooses one engine."""
    wrong = {name: 1e-6 for name in ("host_step", "host_sequence", "host_row")}
    monkeypatch.setattr(cost, "FITTED", replace(cost.FITTED, **wrong))
    made = TimedNights(tmp_path)
    made.write(*[f"word{i}" for i in range(4 * SHARDS)])
    return made


def test_a_faster_arrangement_is_tried_adopted_and_kept(nights):
    first = nights.run(1)
    assert nights.passes == [(ONE, SHARDS)] and nights.decided(1) == (ONE, None)
    assert first.arrangement is not None and first.arrangement.uncounted == ""
    assert first.arrangement.busy == pytest.approx(0.3, abs=0.01)
    # 40 s of one GPU for 400 prompt tokens and 4 answers of a token each
    assert first.arrangement.score == pytest.approx(1000 * 40 / 404, rel=0.01)

    second = nights.run(2)
    assert nights.passes == [(TWO, TRIAL), (ONE, SHARDS - TRIAL)] and nights.decided(2) == (
        ONE,
        TWO,
    )
    assert "a fifth of the shards tries 2 engines of 256 sequences, which should be" in markdown(
        second
    )
    assert second.arrangement is not None and second.arrangement.trial is not None
    assert second.arrangement.trial.gain == pytest.approx(0.8, abs=0.02)
    assert second.arrangement.trial.bound > 0.7
    assert second.arrangement.score == pytest.approx(first.arrangement.score, rel=0.02)
    assert second.good == 4 * SHARDS

    third = nights.run(3)
    assert nights.passes == [(TWO, SHARDS)] and nights.decided(3) == (TWO, None)
    assert "it won its trial in run nightly-02" in arrangement_text(third)
    fourth = nights.run(4)  # four engines would not be 5 % faster
    assert nights.decided(4) == (TWO, None)
    assert "2 engines of 256 sequences, as in 1 earlier run" in arrangement_text(fourth)


def test_a_job_may_keep_from_learning_and_its_own_sizes_stay(nights):
    nights.run(1)
    assert nights.run(2, learn=False).arrangement is None
    assert nights.passes == [(ONE, SHARDS)] and not nights.store(2).holds(ARRANGEMENT)
    nights.run(3, engines_per_gpu=1)
    assert nights.passes == [(ONE, SHARDS)] and not nights.store(3).holds(ARRANGEMENT)


def test_the_plan_says_what_a_run_will_use_and_why(nights, monkeypatch):
    monkeypatch.setattr(connect, "glance", lambda where: H100)
    job = nights.learning_job()

    def learned() -> list[tuple[str, str]]:
        found = dry_run(job).figures
        return [(one.value, one.why) for one in found if one.name == "engines a GPU, learned"]

    assert learned() == []  # there is no earlier run
    nights.run(1)
    ((value, why),) = learned()
    assert value == "1 engine of 256 sequences"
    assert why.startswith(
        "by the cost model; a fifth of the shards tries 2 engines of 256 sequences, which should"
    )
    nights.run(2)
    assert learned() == [("2 engines of 256 sequences", "it won its trial in run nightly-02")]


def test_learning_is_no_part_of_the_fingerprint(nights):
    learns, not_so = (plan_run(nights.learning_job(learn=on), f"k{on}") for on in (True, False))
    plans = [Ledger(open_store(run.uri)).load_plan() for run in (learns, not_so)]
    assert plans[0].fingerprint == plans[1].fingerprint


def test_a_run_killed_in_its_trial_goes_on_without_it_and_bars_it(nights):
    nights.run(1)
    nights.stop_after = 7
    with pytest.raises(Killed):
        nights.run(2)
    assert nights.passes == [(TWO, TRIAL)]
    kept = nights.store(1).read(REPORT)
    nights.store(1).put(REPORT, b"{}")  # what was read is not read again
    nights.stop_after = None
    report = nights.run(2)
    assert nights.passes == [(ONE, SHARDS - 7)] and report.good == 4 * SHARDS
    assert report.arrangement is not None
    assert report.arrangement.uncounted == "2 attempts worked on it"
    nights.store(1).put(REPORT, kept)
    nights.run(3)
    assert nights.decided(3) == (ONE, None)


def test_engines_of_a_trial_that_die_cost_no_row_and_are_barred(nights):
    nights.run(1)
    nights.broken = 2
    report = nights.run(2)
    assert nights.passes == [(TWO, TRIAL), (ONE, SHARDS)] and report.good == 4 * SHARDS
    assert report.arrangement is not None and report.arrangement.trial is not None
    assert report.arrangement.trial.error == "EngineFailure"
    assert "2 engines of 256 sequences did not work: EngineFailure" in arrangement_text(report)
    nights.broken = 0
    for number in range(3, 10):
        nights.run(number)
        assert nights.decided(number) == (ONE, None)
    nights.run(10)
    assert nights.decided(10) == (ONE, TWO)  # after seven runs


def test_a_run_killed_after_its_trial_failed_does_not_try_again(nights):
    nights.run(1)
    nights.broken, nights.stop_after = 2, 5
    with pytest.raises(Killed):
        nights.run(2)
    nights.broken, nights.stop_after = 0, None
    nights.run(2)
    assert nights.passes == [(ONE, SHARDS - 5)]


def test_an_adopted_arrangement_is_given_up_after_a_slow_run(nights):
    for number in (1, 2):
        nights.run(number)
    nights.speed[2] = (0.8, 0.97)
    nights.run(3)
    assert nights.decided(3) == (TWO, None)
    report = nights.run(4)
    assert nights.decided(4) == (ONE, None)
    assert "run nightly-03 was 25% slower with 2 engines of 256 sequences" in arrangement_text(
        report
    )


def test_an_adopted_arrangement_is_given_up_after_a_failed_run(nights, monkeypatch):
    for number in (1, 2):
        nights.run(number)
    nights.broken = 2
    with pytest.raises(EngineFailure):
        nights.run(3)
    assert nights.decided(3) == (TWO, None)
    from prefect_raybatch.runs import arrangement

    lines = arrangement.line_of

    def failed(root: Any, key: str) -> Any:
        """A command records the end of its attempts, which these tests do not make."""
        line = lines(root, key)
        return (
            replace(line, failure="inference: EngineFailure: it failed")
            if line.state != "completed"
            else line
        )

    monkeypatch.setattr(arrangement, "line_of", failed)
    report = nights.run(4)
    assert nights.decided(4) == (ONE, None) and nights.passes == [(ONE, SHARDS)]
    assert "run nightly-03 failed with 2 engines of 256 sequences" in arrangement_text(report)


def test_records_that_are_damaged_or_missing_only_leave_less_to_learn_from(nights):
    for number in (1, 2):
        nights.run(number)
    nights.store(2).put(REPORT, b'{"arrangement": 3}')
    nights.run(3)
    assert nights.decided(3) == (ONE, TWO)  # what the first night says
    nights.store(1).delete([REPORT])
    nights.store(3).put(REPORT, b"")
    nights.run(4)
    assert nights.decided(4) == (ONE, None)


def test_a_run_whose_own_decision_is_damaged_goes_on_by_the_cost_model(nights):
    nights.run(1)
    nights.stop_after = 3
    with pytest.raises(Killed):
        nights.run(2)
    nights.store(2).put(ARRANGEMENT, b"{}")
    nights.stop_after = None
    assert nights.run(2).arrangement is None
    assert nights.passes == [(ONE, SHARDS - 3)]


def test_an_edited_report_cannot_ask_for_what_does_not_fit(nights):
    for number in (1, 2):
        nights.run(number)
    report = read_report(nights.store(2))
    assert report.arrangement is not None
    nothing = Arrangement(0, 0)
    note = replace(report.arrangement.decided, incumbent=nothing, challenger=nothing)
    nights.edit(2, decided=note)
    nights.run(3)
    assert nights.decided(3) == (ONE, TWO)  # by the first night


def test_another_card_falls_back_to_the_cost_model(nights):
    for number in (1, 2):
        nights.run(number)
    nights.capacity = replace(H100, accelerators=("H200",))
    nights.run(3)
    assert nights.decided(3) == (ONE, None)
    assert nights.passes == [(ONE, SHARDS)]
