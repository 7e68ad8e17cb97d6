"""Trials of engine settings: which are tried, what is measured, what is written back."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.engines import FakeEngine
from helpers.small import input_rows, make_job
from rich.console import Console
from typer.testing import CliRunner

from prefect_raybatch.api import default_run_key
from prefect_raybatch.api import tune as api_tune
from prefect_raybatch.cli import commands as cli
from prefect_raybatch.cli import show
from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import edited
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.ledger.precision import PrecisionTry
from prefect_raybatch.ledger.records import Receipt
from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.model.memory import experts_of
from prefect_raybatch.runs import alterations, tune
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
from prefect_raybatch.sizing.agreement import lower_bound
from prefect_raybatch.sizing.sizes import Capacity
from prefect_raybatch.stages.block import is_passthrough

Axes = dict[str, Callable[[Any], list[Any]]]
AXES: Axes = {
    "engine.max_num_seqs": lambda v: [n for n in (v * 2, v // 2) if 32 <= n <= 1024],
    "engine.replicas": lambda v: [n for n in (v + 1, v - 1) if 1 <= n <= 4],
}


def tried(
    rate: Callable[[int, int], float],
    seconds: float = 1e9,
    cost: float = 60.0,
    cold: float = 0.0,
    kept: int = 0,
) -> tuple[list[Trial], Trial]:
    """What is tried where `rate(max_num_seqs, replicas)` is measured, each trial taking `cost`
    seconds, and the first one's start `cold` more."""
    now = [0.0]

    def bench(changes: Mapping[str, Any]) -> Trial:
        start = 0.0 if changes else cold
        now[0] += cost + start
        seqs = changes.get("engine.max_num_seqs", 256)
        return Trial(changes, rate(seqs, changes.get("engine.replicas", 1)), start)

    found: list[Trial] = []
    starts = {"engine.max_num_seqs": 256, "engine.replicas": 1}
    trials = list(search(starts, AXES, bench, seconds, found.append, kept, lambda: now[0]))
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
    assert len(tried(lambda seqs, replicas: seqs, seconds=150.0)[0]) == 2
    assert len(tried(lambda seqs, replicas: seqs, seconds=10.0)[0]) == 1  # one there is always


def test_a_first_start_that_compiles_kernels_takes_no_time_from_the_trials():
    assert len(tried(lambda seqs, replicas: seqs, seconds=150.0, cold=140.0)[0]) == 2


def test_time_is_kept_for_what_may_change_answers():
    """Neighbours of good sizes would else use it up, and fp8 bring more than any of them."""
    assert len(tried(lambda seqs, replicas: seqs, seconds=250.0)[0]) == 4
    assert len(tried(lambda seqs, replicas: seqs, seconds=250.0, kept=1)[0]) == 3
    assert len(tried(lambda seqs, replicas: seqs, seconds=250.0, kept=4)[0]) == 2  # half at most


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
    assert never.needs is None and "no number meets" in "\n".join(conclusion(never))


def agreed(agreed: int, rows: int = 400, error: str = "") -> PrecisionTry:
    bound = lower_bound(agreed, rows, 0.95) if rows else 0.0
    return PrecisionTry({}, rows, agreed, bound, 0.95, (), error)


OPTIONS: list[dict[str, Any]] = [
    {"engine.quantization": "fp8"},
    {"engine.speculative_config": {"method": "ngram"}},
    {"engine.tensor_parallel_size": 2},
]


def test_what_may_change_answers_is_tried_on_top_of_the_best():
    trials = [Trial({}, 100.0), Trial({"engine.max_num_seqs": 512}, 120.0)]
    now = [0.0]

    def bench(changes: Mapping[str, Any]) -> Trial:
        now[0] += 60.0
        return Trial(changes, 150.0)

    seen: list[Trial] = []
    made = tune.altered(trials, OPTIONS, bench, 130.0, seen.append, lambda: now[0])
    assert made == seen and [t.may_alter for t in made] == [True, True]
    assert [t.changes for t in made] == [
        {"engine.max_num_seqs": 512, **OPTIONS[0]},
        {"engine.max_num_seqs": 512, **OPTIONS[1]},
    ]
    left = tune.alteration_sentences([*trials, *made], OPTIONS, 0.99)[-1]
    assert left == "there was no time for engine.tensor_parallel_size: 2"
    assert tune.altered([Trial({}, error="no")], OPTIONS, bench, 1e9, seen.append) == []


def test_each_change_says_what_it_brought_and_what_it_changes():
    plain = Trial({}, 100.0)
    fp8 = Trial(OPTIONS[0], 140.0, may_alter=True, agreement=agreed(380))
    guessed = Trial(OPTIONS[1], 160.0, may_alter=True, agreement=agreed(400))
    slower = Trial(OPTIONS[2], 90.0, may_alter=True)
    said = tune.alteration_sentences([plain, fp8, guessed, slower], OPTIONS, 0.99)
    assert said[0].startswith("engine.quantization: fp8 brought 1.40 times; 380 of 400 sampled ")
    assert said[0].endswith("at least 92.82% of all; limits.min_agreement 0.99: not taken")
    assert "brought 1.60 times; 400 of 400" in said[1] and said[1].endswith("may be taken")
    assert said[2].endswith("brought 0.90 times, so its answers were not compared")
    assert [tune.keeps(t, 0.99) for t in (plain, fp8, guessed, slower)] == [
        True,
        False,
        True,
        False,
    ]
    for wrong, told in (
        (Trial(OPTIONS[0], error="no fp8", may_alter=True), "did not work: no fp8"),
        (
            Trial(OPTIONS[0], 140.0, may_alter=True, agreement=agreed(0, 0, "died")),
            "compared: died",
        ),
    ):
        assert told in tune.alteration_sentences([plain, wrong], OPTIONS[:1], 0.99)[0]
    found = Tuned((plain, fp8, guessed), guessed, 100, 10.0)
    assert [row["same answers"] for row in tune.table(found)] == [
        "",
        "95.0%, at least 92.8%",
        "100.0%, at least 99.3%",
    ]
    died = Trial(OPTIONS[0], error="EngineStartError: no fp8\non this card", may_alter=True)
    more = Trial({"engine.max_num_seqs": 9}, error="InsufficientResources: no room")
    notes = tuple(tune.alteration_sentences([plain, died], OPTIONS[:1], 0.99))
    failed = Tuned((plain, more, died), plain, 100, 10.0, notes=notes)
    assert [row[""] for row in tune.table(failed)] == ["best", "did not work", "did not work"]
    assert "engine.max_num_seqs: 9 did not work: InsufficientResources: no room" in (
        tune.conclusion(failed)
    )
    assert yaml.safe_load(job_file({"name": "as it was"}, failed)) == {"name": "as it was"}
    made = yaml.safe_load(job_file({"engine": {"model": "demo"}}, found))
    assert made["engine"]["speculative_config"] == {"method": "ngram"}


def test_which_changes_are_tried_follows_from_job_and_cluster(monkeypatch):
    gpus = Capacity(8, 4, 1, "here", gpus_by_node=(4,))
    cpus = Capacity(8, 0, 1, "here")

    def names(capacity: Capacity, experts: int = 0, **groups: Any) -> list[Any]:
        found = alterations.alterations(compile_job(make_job(**groups)), capacity, experts)
        return [change for one in found for change in one.items()]

    long = {"sampling": {"max_tokens": 64}}
    ngram = ("engine.speculative_config", alterations.NGRAM)
    fp8 = ("engine.quantization", "fp8")
    assert names(gpus, **long) == [fp8, ngram]
    assert names(cpus, **long) == [ngram] and names(gpus, sampling={"max_tokens": 4}) == [fp8]
    choice = {"choice": ["a", "b"]}
    assert names(cpus, sampling={"max_tokens": 64, **choice}) == []
    for form in (choice, {**choice, "disable_any_whitespace": True}):
        assert names(cpus, sampling={"max_tokens": 64, "structured_outputs": form}) == []
    monkeypatch.setattr(alterations, "SUFFIX_PACKAGE", "json")  # one that is there
    assert names(cpus, **long) == [ngram, ("engine.speculative_config", alterations.SUFFIX)]
    engine = {"quantization": "awq", "speculative_config": {"method": "eagle"}}
    tensor = "engine.tensor_parallel_size"
    alone = ("engine.engines_per_gpu", 1)  # the best so far may be several on a GPU
    assert names(gpus, 8, engine=engine, **long) == [(tensor, 2), alone, (tensor, 4), alone]
    for given, two, four in ((4, 2, 1), (1, 1, 1), ([2, 6], [1, 3], [1, 1])):
        many = names(gpus, 8, engine={**engine, "replicas": given}, **long)
        assert many[2::3] == [("engine.replicas", two), ("engine.replicas", four)]
    piped = {**engine, "pipeline_parallel_size": 2}
    assert names(gpus, 8, engine=piped, **long) == [(tensor, 2), alone]
    assert names(gpus, 8, engine={"task": "embed"}) == []
    # On top of a best that packs engines each is still a job.
    packed = {"engine.engines_per_gpu": 2, "engine.max_num_seqs": 512}
    for option in alterations.alterations(compile_job(make_job(**long)), gpus, 8):
        engine_of = edited(make_job(**long), {**packed, **option}, "tuned").engine
        assert engine_of.engines_per_gpu == (1 if tensor in option else 2)
    assert experts_of({"text_config": {"num_local_experts": 8}}) == 8 and experts_of({}) == 0


class Slow(FakeEngine):
    """The more sequences at once, the faster; by far the fastest in fp8."""

    def __call__(self, table: pa.Table) -> pa.Table:
        seqs = self.spec.arguments["max_num_seqs"]
        fp8 = self.spec.arguments.get("quantization") == "fp8"
        if not is_passthrough(table):
            time.sleep((2 if fp8 else 20) / seqs)
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


@pytest.mark.whole
def test_trials_on_the_real_path_leave_nothing_behind(job, tmp_path, local_ray, monkeypatch):
    monkeypatch.setattr(api_tune, "axes", lambda job, have: {tune.MAX_NUM_SEQS: lambda v: [256]})
    fp8 = {"engine.quantization": "fp8"}
    monkeypatch.setattr(api_tune, "alterations", lambda job, have, experts: [fp8])
    monkeypatch.setattr(tune, "BETTER", 0.0)  # so that answers are compared at any speed
    seen: list[Trial] = []
    found = api_tune.tune(job, 30.0, 1.5, 36000.0, seen.append, engine=Slow)
    assert [t.changes for t in found.trials] == [t.changes for t in seen] and len(seen) == 3, seen
    assert not any(trial.error for trial in seen)
    first, second, third = found.trials
    assert second.changes == {tune.MAX_NUM_SEQS: 256}
    # How fast each was is this machine's affair.
    faster = max(first, second, key=lambda trial: trial.rows_per_s)
    assert third.changes == {**faster.changes, **fp8}
    assert third.may_alter and not (first.may_alter or second.may_alter)
    assert third.agreement is not None and not third.agreement.error
    assert third.agreement.agreed == third.agreement.rows == 1200
    assert found.best == max(found.trials, key=lambda trial: trial.rows_per_s)
    assert "engine.quantization: fp8 brought" in found.notes[0]
    assert found.rows == 4000 and found.needs is None
    assert not list((tmp_path / "out").rglob("*"))  # no file, no folder
    assert default_run_key(job).startswith(job.name)  # no run of ours to continue


def test_nothing_that_works_is_an_error(job, tmp_path, local_ray, monkeypatch):
    class Broken(FakeEngine):
        def __call__(self, table: pa.Table) -> pa.Table:
            from prefect_raybatch.stages.block import lost_block_like

            return lost_block_like(table, Loss("ValueError", "no such thing", fatal=True))

    with pytest.raises(ConfigError, match=r"no setting worked.*no such thing"):
        api_tune.tune(job, 0.1, 1.0, engine=Broken)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_a_narrow_terminal_shows_settings_whole(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(show, "out", Console(file=shown, width=80, highlight=False))
    fp8 = Trial({"engine.speculative_config": {"method": "ngram"}}, 130.0, may_alter=True)
    fp8 = replace(fp8, agreement=agreed(1200, 1200))
    show.show_rows(tune.table(replace(tuned(), trials=(Trial({}, 100.0), fp8))))
    assert "…" not in shown.getvalue()


def test_the_command_writes_a_job_that_can_be_read(tmp_path, monkeypatch):
    path = tmp_path / "job.yaml"
    text = "name: x\nsource: {uri: in}\nprompt: {template: '{a}'}\n"
    path.write_text(text + "engine: {model: demo}\noutput: {uri: out}\nlimits: {deadline: 6h}\n")
    asked: list[Any] = []

    def fake(job: BatchJob, minutes: float, seconds: float, limit: float, show: Any) -> Tuned:
        asked.extend((minutes, seconds, limit))
        return tuned(deadline=limit, needs=5)

    monkeypatch.setattr(api_tune, "tune", fake)
    done = CliRunner().invoke(cli.app, ["tune", str(path), "--minutes", "2"])
    assert done.exit_code == 0, done.output
    assert asked == [2.0, 30.0, 21600.0]
    assert "512" in done.output and "10 % to spare" in done.output
    made = BatchJob.from_yaml(tmp_path / "job.tuned.yaml")
    assert (made.engine.max_num_seqs, made.engine.replicas) == (512, 5)
    assert path.read_text().startswith("name: x")
