"""Trials of engine settings: which are tried, what is measured, what is written back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.engines import FakeEngine
from helpers.small import input_rows, make_job
from typer.testing import CliRunner

from prefect_raybatch.cli import commands as cli
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.ledger.records import Receipt
from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.runs import tune
from prefect_raybatch.runs.run import default_run_key
from prefect_raybatch.runs.tune import (
    Trial,
    Tuned,
    conclusion,
    job_file,
    search,
    settings,
    spread,
    steady,
)
from prefect_raybatch.stages.block import passes_by

Axes = dict[str, Callable[[Any], list[Any]]]
AXES: Axes = {
    "engine.max_num_seqs": lambda v: [n for n in (v * 2, v // 2) if 32 <= n <= 1024],
    "engine.replicas": lambda v: [n for n in (v + 1, v - 1) if 1 <= n <= 4],
}


def tried(
    rate: Callable[[int, int], float], ends: float = 1e9, cost: float = 60.0
) -> tuple[list[Trial], Trial]:
    """What is tried where `rate(max_num_seqs, replicas)` is measured, each trial taking `cost`."""
    now = [0.0]

    def bench(changes: Mapping[str, Any]) -> Trial:
        now[0] += cost
        seqs = changes.get("engine.max_num_seqs", 256)
        return Trial(changes, rate(seqs, changes.get("engine.replicas", 1)))

    found: list[Trial] = []
    starts = {"engine.max_num_seqs": 256, "engine.replicas": 1}
    trials = list(search(starts, AXES, bench, ends, found.append, lambda: now[0]))
    assert trials == found and trials[0].changes == {}
    assert len({tuple(sorted(t.changes.items())) for t in trials}) == len(trials)
    return trials, max(trials, key=lambda trial: trial.rows_per_s)


def test_it_climbs_along_a_field_and_then_the_next():
    trials, best = tried(lambda seqs, replicas: min(seqs, 800) * min(replicas, 3))
    assert best.changes == {"engine.max_num_seqs": 1024, "engine.replicas": 3}
    assert len(trials) == 6  # 256, 512, 1024, then 2, 3 and 4 engines: no way back


def test_it_turns_round_where_more_is_worse():
    _, best = tried(lambda seqs, replicas: 1000.0 / seqs)
    assert best.changes == {"engine.max_num_seqs": 32}


def test_noise_changes_nothing():
    trials, _ = tried(lambda seqs, replicas: 100.0 + (seqs > 256) + 2 * (replicas > 1))
    assert [t.changes for t in trials] == [
        {},
        {"engine.max_num_seqs": 512},
        {"engine.max_num_seqs": 128},
        {"engine.replicas": 2},
    ]


def test_no_trial_is_begun_that_time_does_not_allow():
    assert len(tried(lambda seqs, replicas: seqs, ends=150.0)[0]) == 2
    assert len(tried(lambda seqs, replicas: seqs, ends=10.0)[0]) == 1  # one there is always


def test_shards_are_spread_over_the_input():
    assert spread(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert sorted(spread(13)) == list(range(13)) and spread(1) == [0]


def test_the_rate_is_that_of_the_steady_state():
    def receipt(started: float, ended: float) -> Receipt:
        return Receipt(0, "a", stats=ShardStats(rows=100, started=started, ended=ended))

    assert steady([receipt(0, 50), receipt(40, 60), receipt(50, 70)]) == (10.0, 300)
    assert steady([receipt(10, 20)]) == (10.0, 100)


def tuned(**more: Any) -> Tuned:
    trials = (
        Trial({}, 100.0, 20.0, 3000),
        Trial({"engine.max_num_seqs": 512}, 125.0, 20.0, 3700, replicas=2, engines=2),
        Trial({"engine.replicas": 9}, error="InsufficientResources: too small"),
    )
    values = {"rows": 1_000_000, "seconds": 8020.0, **more}
    return Tuned(trials, trials[1], **values)


def test_the_job_file_has_the_settings_and_what_was_tried():
    value = {"name": "x", "engine": {"model": "demo", "max_num_seqs": 256}, "sampling": {"n": 1}}
    text = job_file(value, tuned())
    assert yaml.safe_load(text) == {
        **value,
        "engine": {"model": "demo", "max_num_seqs": 512},
    }
    assert "# as the job is  100.0  1.00  3,000  20" in text
    assert "# engine.max_num_seqs: 512  125.0  1.25  3,700  20  best" in text
    assert "too small" in text and "1,000,000 rows would take" in text


def test_a_deadline_says_how_many_engines():
    trials = tuned().trials
    found = tune.tuned_of(trials, trials[1], 1_000_000, 3620.0)
    # 8,000 s of work in 3,600 s: 2 * 8000 / 3600 * 1.1 = 4.9 engines
    assert found.needs == 5
    assert settings(found) == {"engine.max_num_seqs": 512, "engine.replicas": 5}
    assert "needs engine.replicas: 5" in "\n".join(conclusion(found))
    met = tune.tuned_of(trials, trials[1], 1_000_000, 9000.0)
    assert met.needs is None and "is met" in "\n".join(conclusion(met))
    never = tune.tuned_of(trials, trials[1], 1_000_000, 15.0)
    assert never.needs is None and "no number of them helps" in "\n".join(conclusion(never))


class Slow(FakeEngine):
    """The more sequences at once, the faster."""

    def __call__(self, table: pa.Table) -> pa.Table:
        seqs = self.spec.arguments["max_num_seqs"]
        if not passes_by(table):
            time.sleep(20 / seqs)
        return super().__call__(table)


@pytest.fixture
def job(tmp_path: Path) -> BatchJob:
    (tmp_path / "in").mkdir()
    for part in range(4):
        table = input_rows(part * 1000, 1000)
        pq.write_table(table, tmp_path / f"in/{part}.parquet")
    return make_job(
        source={"uri": str(tmp_path / "in")},
        engine={
            "model": "demo",
            "max_model_len": 64,
            "max_num_seqs": 64,
            "batch_size": 50,
            "num_cpus": 1,
        },
        output={"uri": str(tmp_path / "out")},
    )


def test_trials_on_the_real_path_leave_nothing_behind(job, tmp_path, local_ray, monkeypatch):
    monkeypatch.setattr(tune, "axes", lambda job, have: {tune.MAX_NUM_SEQS: lambda v: [256]})
    seen: list[Trial] = []
    found = tune.tune(job, 30.0, 1.5, 36000.0, seen.append, engine=Slow)
    assert list(found.trials) == seen and len(seen) == 2, seen
    assert not any(trial.error for trial in seen)
    first, second = found.trials
    assert second.changes == {tune.MAX_NUM_SEQS: 256}
    # Four times as fast, unless this machine is busy with something else.
    better = second.rows_per_s > first.rows_per_s * tune.BETTER
    assert found.best == (second if better else first)
    assert found.rows == 4000 and found.needs is None
    assert not list((tmp_path / "out").rglob("*"))  # no file, no folder
    assert default_run_key(job).startswith(job.name)  # no run of ours to continue


def test_nothing_that_works_is_an_error(job, tmp_path, local_ray, monkeypatch):
    class Broken(FakeEngine):
        def __call__(self, table: pa.Table) -> pa.Table:
            from prefect_raybatch.stages.block import lost_all

            return lost_all(table, Loss("ValueError", "no such thing", fatal=True))

    with pytest.raises(ConfigError, match=r"no setting worked.*no such thing"):
        tune.tune(job, 0.1, 1.0, engine=Broken)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_the_command_writes_a_job_that_can_be_read(tmp_path, monkeypatch):
    path = tmp_path / "job.yaml"
    text = "name: x\nsource: {uri: in}\nprompt: {template: '{a}'}\n"
    path.write_text(text + "engine: {model: demo}\noutput: {uri: out}\nlimits: {deadline: 6h}\n")
    asked: list[Any] = []

    def fake(job: BatchJob, minutes: float, seconds: float, limit: float, show: Any) -> Tuned:
        asked.extend((minutes, seconds, limit))
        return tuned(deadline=limit, needs=5)

    monkeypatch.setattr(tune, "tune", fake)
    done = CliRunner().invoke(cli.app, ["tune", str(path), "--minutes", "2"])
    assert done.exit_code == 0, done.output
    assert asked == [2.0, 30.0, 21600.0]
    assert "512" in done.output and "10 % to spare" in done.output
    made = BatchJob.from_yaml(tmp_path / "job.tuned.yaml")
    assert (made.engine.max_num_seqs, made.engine.replicas) == (512, 5)
    assert path.read_text().startswith("name: x")
