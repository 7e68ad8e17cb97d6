"""What an engine and its node were doing, from the sample to the report."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pynvml
import pytest
from helpers import fake_vllm
from helpers.engines import Factory, FakeEngine, completion, with_answers
from helpers.nvidia import Card, show
from helpers.reports import timed_commit
from helpers.small import MODEL, SmallRun, input_rows, receipts, small_run

from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.ledger.stats import ShardStats, fold_stats
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import build, engine_table, node_table, stage_table
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.stages import engine as stage
from prefect_raybatch.stages import load as figures
from prefect_raybatch.stages.block import is_passthrough, tag
from prefect_raybatch.stages.columns import ERROR, FIGURES, PARAMS, TOKENS
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage
from prefect_raybatch.stages.load import Node, Sampler, figures_of
from prefect_raybatch.stages.vllm import stepper


@dataclass
class World:
    """A sampler over a clock, an engine and a node that are turned by hand."""

    now: float = 1000.0
    load: dict[str, float] = field(default_factory=dict)
    node: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sampler = Sampler(lambda: self.load, lambda: self.node, 2.0, lambda: self.now)

    def at(self, now: float, **load: float) -> None:
        self.now, self.load = now, load
        self.sampler.take()


# --- sampling -----------------------------------------------------------------------------------


def test_a_shard_gets_the_means_and_peaks_of_its_own_time():
    world = World(node={"cpu": 0.5, "memory": 3.0})
    world.at(1000, running=8, waiting=100, kv_cache=0.9, steps=0)
    world.at(1002, running=2, waiting=4, kv_cache=0.2, steps=20)
    world.at(1004, running=4, waiting=0, kv_cache=0.4, steps=60)
    world.at(1006, running=99, waiting=99, kv_cache=0.99, steps=60)
    assert world.sampler.stats_between(1001, 1005).to_dict() == {
        "samples": 2,
        "running": 3,
        "waiting": 2,
        "kv_cache": 0.3,
        "kv_cache_peak": 0.4,
        "steps_per_s": 15.0,  # 10 and 20 a second
        "node_cpu": 0.5,
        "node_memory_peak": 3.0,
    }


def test_a_short_shard_gets_the_latest_sample_and_an_old_one_says_nothing():
    world = World()
    assert world.sampler.stats_between(900, 1000) == ShardStats()
    world.at(1000, running=8)
    assert world.sampler.stats_between(1000.5, 1001) == ShardStats(samples=1, running=8)
    assert world.sampler.stats_between(1100, 1101) == ShardStats()


def test_what_is_not_known_is_left_out_and_not_zero():
    world = World()
    world.at(1000, running=8, waiting=0)
    world.at(1002)  # no engine: it is being started again
    found = world.sampler.stats_between(999, 1003)
    assert found == ShardStats(samples=2, running=8, waiting=0)


def test_an_engine_that_began_anew_has_no_negative_steps():
    world = World()
    world.at(1000, steps=500)
    world.at(1002, steps=4)
    assert world.sampler.stats_between(999, 1003).steps_per_s is None


def test_samples_are_taken_beside_the_work_and_one_that_fails_ends_nothing():
    taken, enough = [], threading.Event()

    def load() -> dict[str, float]:
        taken.append(1)
        if len(taken) == 1:
            raise RuntimeError("the engine is closing")
        if len(taken) > 3:
            enough.set()
        return {"running": 1}

    sampler = Sampler(load, dict, every=0.01).start()
    assert enough.wait(60)
    assert sampler.stats_between(0, 1e12).running == 1


def test_samples_are_bounded():
    world = World()
    for second in range(figures.SAMPLES_KEPT + 100):
        world.at(1000 + second, running=1)
    assert world.sampler.stats_between(0, 1e12).samples == figures.SAMPLES_KEPT


# --- the node -----------------------------------------------------------------------------------


def test_a_node_without_gpus_says_nothing_of_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = Node()()
    assert found.keys() == {"cpu", "memory"}
    assert found["memory"] > 0


def test_a_node_whose_gpu_is_lost_still_says_the_rest(monkeypatch):
    driver = show(monkeypatch, Card(load=80))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    node = Node()
    assert node()["gpu"] == 0.8
    driver.error = pynvml.NVML_ERROR_GPU_IS_LOST
    assert node().keys() == {"cpu", "memory"}


# --- the way to the commit ----------------------------------------------------------------------


def sampled(**load: float) -> Sampler:
    world = World(node={"cpu": 0.25, "memory": 2.0})
    world.at(world.now, **load)
    world.sampler.where = {"engine": "host-a:77"}
    return world.sampler


def test_the_engine_stage_tells_and_finish_puts_it_into_the_receipt(tmp_path):
    run = small_run(tmp_path)
    told_block = sampled(running=6, waiting=2).add_stats(run.block(run.whole(1)), 999.0)
    (receipt,) = receipts(run.finish()(told_block))
    assert receipt.where["engine"] == "host-a:77" and "node" in receipt.where
    assert (receipt.stats.running, receipt.stats.waiting) == (6, 2)
    assert receipt.stats.node_cpu == 0.25
    assert receipt.stats.rows == 5  # what finish counts itself stays


def test_each_shard_of_a_bundle_has_the_figures_once(tmp_path):
    run = small_run(tmp_path)
    both = pa.concat_tables([run.block(run.whole(0)), run.block(run.whole(1))])
    block = sampled(running=6).add_stats(both, 999.0)
    assert block[FIGURES].null_count == block.num_rows - 2
    shuffled = block.take([3, 9, 0, 7, 1, 5, 2, 8, 4, 6])
    made = receipts(run.finish()(sampled(running=6).add_stats(both.take([1, 5, 0]), 999.0)))
    assert [r.stats.running for r in made] == [6, 6]
    assert figures_of(shuffled)[0].running == 6


def test_a_block_without_figures_has_a_receipt_as_before(tmp_path):
    run = small_run(tmp_path)
    block = run.block(run.whole(0))
    assert FIGURES not in block.column_names
    assert figures_of(block) == (ShardStats(), {})
    assert run.receipt(run.whole(0)).stats.samples is None


def test_parts_of_a_shard_fold_by_their_samples():
    parts = [
        {"rows": 2, "samples": 3, "running": 10.0, "kv_cache": 0.5, "kv_cache_peak": 0.6},
        {"rows": 3, "samples": 1, "running": 2.0, "gpu": 0.8, "kv_cache_peak": 0.9},
        {"rows": 1},
    ]
    assert fold_stats(map(ShardStats.of, parts)).to_dict() == {
        "rows": 6,
        "samples": 4,
        "running": 8.0,
        "kv_cache": 0.5,
        "kv_cache_peak": 0.9,
        "gpu": 0.8,
    }


# --- what the report says -----------------------------------------------------------------------


def reported(run: SmallRun) -> RunReport:
    made = Tally()
    for one in run.ledger.commits(run.plan, run.ledger.listing(run.plan)):
        made.add(one)
    return build("/r", run.plan, made, "completed")


def commit_of(run: SmallRun, shard: int, engine: str, **load: float) -> None:
    sampler = sampled(**load)
    sampler.where = {"engine": engine}
    block = sampler.add_stats(run.block(run.whole(shard)), 999.0)
    (receipt,) = receipts(run.finish()(block))
    run.ledger.commit(run.plan, run.shards[shard].rows, [receipt])


def test_a_report_has_engines_nodes_and_balance(tmp_path):
    run = small_run(tmp_path)
    for shard, engine in enumerate(("a:1", "a:1", "a:2", "b:1")):
        commit_of(run, shard, engine, running=4 + shard, waiting=1, kv_cache=0.1 * shard)
    report = reported(run)
    assert [(w.name, w.shards, w.rows) for w in report.workers] == [
        ("a:1", 2, 10),
        ("a:2", 1, 5),
        ("b:1", 1, 5),
    ]
    assert report.figures["running"] == 5.5
    assert report.figures["kv_cache_peak"] == pytest.approx(0.3)
    engine = next(s for s in report.stages if s.name == "engine")
    assert engine.busiest == 1.5  # 10 rows where the mean is 20/3
    assert [(n.name, n.engines, n.rows) for n in report.nodes] == [("a", 2, 15), ("b", 1, 5)]
    assert RunReport.from_bytes(report.to_bytes()) == report
    table = {row["figure"]: row[""] for row in engine_table(report)}
    assert table["running sequences per engine (mean)"] == "5.5"
    assert table["KV cache use (peak)"] == "30%"
    assert table["engines"] == "3"
    first = node_table(report)[0]
    assert (first["CPU"], first["memory GiB"], first["GPU"]) == ("25%", "2.0", "-")
    stages = {row["stage"]: row for row in stage_table(report)}
    assert stages["engine"]["busiest"] == "1.50"
    assert stages["prepare"]["busiest"] == "-"
    assert stages["prepare"]["mean s"] == "0.25"


def test_unknown_figures_of_engines_are_left_out(tmp_path):
    run = small_run(tmp_path)
    run.commit_all()
    report = reported(run)
    assert report.figures == {} and report.workers == () and report.nodes == ()
    known = ["tokens/s in / out", "prefix cache hits"]  # a report without seconds has no rates
    for seconds, shown in ((0.0, known[1:]), (2.0, known)):
        table = engine_table(replace(report, seconds=seconds))
        assert [row["figure"] for row in table] == shown
    assert node_table(report) == []


def test_many_engines_are_shown_as_some_and_the_rest():
    made = Tally()
    for number in range(100):
        one = timed_commit(1, 2, rows=100 - number, engine_s=1.0)
        object.__setattr__(one, "where", {"engine": f"h{number}:1"})
        made.add(one)
    workers = made.workers()
    assert len(workers) == 64 and workers[-1].name == "37 others"
    assert sum(w.rows for w in workers) == sum(range(1, 101))
    assert sum(w.shards for w in workers) == 100


# --- the stepper --------------------------------------------------------------------------------


class Holding:
    """A vLLM that keeps what it is given until it is let go; `stats` are its scheduler's."""

    SLOTS = 8

    def __init__(self, core: Any = None, stats: Sequence[Any] = ()) -> None:
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=self.SLOTS)
        )
        self.engine_core = core or SimpleNamespace()
        self.seen: list[Any] = []
        self.output_processor = SimpleNamespace(
            update_scheduler_stats=self.seen.append, log_stats=True
        )
        self.log_stats, self.logger_manager = True, object()
        self.held, self.stats = list[str](), stats
        self.full, self.go = threading.Event(), threading.Event()

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        self.held.append(request_id)

    def step(self) -> list[Any]:
        for stats in self.stats:
            self.output_processor.update_scheduler_stats(stats)
        self.full.set()
        assert self.go.wait(60)
        done, self.held = self.held, []
        answer = SimpleNamespace(finish_reason="stop", token_ids=[5], text="")
        return [
            SimpleNamespace(request_id=id, finished=True, outputs=[answer], num_cached_tokens=0)
            for id in done
        ]


ROWS = 46  # the stepper hands on three times as many as there are slots: 24


@contextmanager
def at_work(monkeypatch: pytest.MonkeyPatch, vllm: Holding, **arguments: Any) -> Iterator[Any]:
    """A stepped engine over this vLLM, with `ROWS` requests of which none is answered yet."""
    fake_vllm.install_for(monkeypatch)
    monkeypatch.setattr(fake_vllm.LLMEngine, "from_engine_args", lambda arguments: vllm)
    with stepper.SteppedEngine(arguments) as made, ThreadPoolExecutor(1) as pool:
        answers = pool.submit(made.run, [stepper.Request([1])] * ROWS)
        try:
            assert vllm.full.wait(60)
            yield made
        finally:
            vllm.go.set()
        assert len(answers.result(60)) == ROWS


def test_a_core_in_this_process_tells_what_vllm_knows(monkeypatch):
    scheduler = SimpleNamespace(running=[1] * 5, kv_cache_manager=SimpleNamespace(usage=0.4))
    inside = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    with at_work(monkeypatch, Holding(inside)) as made:
        assert made.load() == {
            "steps": 0,
            "sequences": 8,
            "running": 5,
            "waiting": 19 + 22,
            "kv_cache": 0.4,
        }
    assert made.load() == {}  # closed


def test_a_core_elsewhere_tells_the_kv_cache_only_where_vllm_keeps_statistics(monkeypatch):
    with at_work(monkeypatch, Holding()) as made:
        assert made.load() == {"steps": 0, "sequences": 8, "running": 8, "waiting": 16 + 22}
    stats = SimpleNamespace(num_running_reqs=6, kv_cache_usage=0.7)
    with at_work(monkeypatch, Holding(stats=[stats])) as made:
        assert (made.load()["kv_cache"], made.load()["running"]) == (0.7, 6)


@pytest.mark.parametrize("front", [True, False])
def test_vllms_statistics_are_kept_where_it_makes_them(monkeypatch, front):
    stats = SimpleNamespace(num_running_reqs=6, kv_cache_usage=0.7)
    vllm = Holding(stats=[stats, None])
    manager, arguments = vllm.logger_manager, {"disable_log_stats": False} if front else {}
    with at_work(monkeypatch, vllm, **arguments) as made:
        assert made.load()["kv_cache"] == 0.7 and vllm.seen == [stats, None]
    assert vllm.log_stats is front and vllm.output_processor.log_stats is front
    assert vllm.logger_manager is (manager if front else None)


def test_the_stage_samples_its_engine(monkeypatch):
    class Telling(Factory):
        def __call__(self, *arguments: Any) -> Any:
            made = super().__call__(*arguments)
            made.load = lambda: {"running": 3, "waiting": 1, "steps": 10}
            return made

    monkeypatch.setattr(stepper, "SteppedEngine", Telling(lambda rs: [completion("x") for _ in rs]))
    monkeypatch.setattr(figures, "SAMPLE_EVERY", 60)
    made = EngineStage(EngineLaunch(dict(MODEL), {}, {}))
    assert isinstance(made, stage.EngineStage) and made.sampler is not None
    made.sampler.take()
    rows = tag(input_rows(0, 2), Unit(0, 0, 2))
    for name, column in {
        TOKENS: pa.array([[1], [2]], pa.list_(pa.int32())),
        PARAMS: pa.array([None, None], pa.string()),
        ERROR: pa.array([None, None], ERROR.type),
    }.items():
        rows = rows.append_column(name, column)
    stats, where = figures_of(made(rows))
    assert (stats.running, stats.waiting) == (3, 1) and stats.node_cpu is not None
    assert where["engine"].rpartition(":")[2].isdigit()


# --- with Ray -----------------------------------------------------------------------------------


class FigureEngine(FakeEngine):
    """The fake engine with figures; the first block waits for a sample."""

    def __init__(self, launch: EngineLaunch):
        super().__init__(launch)
        load = {"running": 7.0, "waiting": 3.0, "kv_cache": 0.25}
        self.sampler = Sampler(lambda: load, every=0.05).start()

    def __call__(self, table: pa.Table) -> pa.Table:
        import time

        if is_passthrough(table):
            return table
        began = time.time()
        while not self.sampler.stats_between(began, time.time()).samples:
            time.sleep(0.05)
        errors = table[ERROR].to_pylist()
        texts = [f"answer {i}" for i in table["id"].to_pylist()]
        return self.sampler.add_stats(with_answers(table, errors, texts), began)


def test_figures_arrive_from_ray_and_survive_in_the_commits(local_ray, tmp_path):
    import pyarrow.parquet as pq
    from helpers.small import make_job

    from prefect_raybatch.api import finalize_run, infer_run, plan_run

    pq.write_table(input_rows(0, 40), tmp_path / "in.parquet")
    job = make_job(
        source={"uri": str(tmp_path / "in.parquet"), "rows_per_shard": 10},
        output={"uri": str(tmp_path / "out")},
        engine={"device": "cpu", "replicas": 1, "num_cpus": 1},
    )
    run = plan_run(job, "k")
    progress = infer_run(job, run, engine=FigureEngine)
    report = finalize_run(job, run, progress)
    assert report.figures["running"] == 7 and report.figures["kv_cache"] == 0.25
    assert len(report.workers) == 1 and report.workers[0].rows == 40
    assert len(report.nodes) == 1 and 0 <= report.nodes[0].figures["node_cpu"] <= 1
    assert report.nodes[0].figures["node_memory_peak"] > 0
    assert len(report.charts.cells) == 4 and report.charts.throughput
