"""Advice from figures: for each cause one that is planted, and a well run that gets none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.reports import COMMIT
from helpers.small import make_job, small_run

from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.failures import FailureKey
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.records import Commit
from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.report.advice import advise
from prefect_raybatch.report.records import Advice, RunReport
from prefect_raybatch.report.report import build, engine_table, markdown
from prefect_raybatch.report.tally import Tally

WELL = {  # what a shard says whose engine is full and whose GPU works
    "read_s": 0.1,
    "prepare_s": 1.0,
    "engine_s": 9.0,
    "finish_s": 0.2,
    "samples": 5.0,
    "running": 250.0,
    "waiting": 400.0,
    "kv_cache": 0.5,
    "gpu": 0.97,
    "prompt_tokens": 50_000.0,
    "output_tokens": 5_000.0,
}


def shard(number: int, engine: str = "a:1", rows: int = 500, **stats: float) -> Commit:
    """A shard of `rows` rows that took its engine ten seconds; two are in flight at once."""
    return replace(
        COMMIT,
        shard=number,
        good=Positions.spans((0, rows)),
        failed=Positions(),
        skipped=Positions(),
        pieces=(),
        failures={},
        where={"engine": engine, "node": "a"},
        stats=ShardStats.of(
            {**WELL, "rows": rows, "started": 5.0 * number, "ended": 5.0 * number + 10, **stats}
        ),
    )


def report(tmp_path: Path, commits: list[Commit], **more: Any) -> RunReport:
    tally = Tally()
    for commit in commits:
        tally.add(commit)
    plan = replace(small_run(tmp_path).plan, rows=tally.rows, shards=len(commits))
    return build("/r", plan, tally, "completed", **more)


def only(found: tuple[Advice, ...]) -> Advice:
    assert len(found) == 1, found
    return found[0]


def job(**groups: Any) -> BatchJob:
    engine = {"model": "demo", "max_num_seqs": 256, **groups.pop("engine", {})}
    return make_job(engine=engine, **groups)


ROOFLINE = {  # of a second of an engine with rows
    "flops": 0.7e15,
    "moved_bytes": 1e12,
    "peak_flops": 1e15,
    "peak_bytes": 3e12,
    "up_s": 1.0,
    "idle_s": 0.0,
}


def test_a_gpu_at_its_limit_is_told_that_only_less_work_helps(tmp_path):
    done = report(tmp_path, [shard(n, **ROOFLINE) for n in range(20)])
    found = only(advise(done, compile_job(job())))
    assert found.about == "the GPU is the limit"
    assert "70% of its FLOPs and 33% of its memory bandwidth" in found.evidence
    assert "engine.quantization" in found.change and "arithmetic" in found.evidence
    fp8 = only(advise(done, compile_job(job(engine={"quantization": "fp8"}))))
    assert "engine.quantization" not in fp8.change
    table = {row["figure"]: row[""] for row in engine_table(done)}
    assert table["share of the GPU's peak FLOPs (MFU)"] == "70%"
    assert table["share of the GPU's peak memory bandwidth (MBU)"] == "33%"
    idle = table["GPU idle: no rows yet / host busy / no rows left"]
    assert idle == "0% / 3% / 0%"
    assert RunReport.from_bytes(done.to_bytes()) == done


def test_a_gpu_bound_by_its_memory_is_told_so(tmp_path):
    slow = {**ROOFLINE, "flops": 1e13, "moved_bytes": 2.4e12}
    found = only(
        advise(report(tmp_path, [shard(n, **slow) for n in range(20)]), compile_job(job()))
    )
    assert "bound by memory bandwidth" in found.evidence
    assert "shorter answers" in found.change


def test_a_gpu_below_its_limit_and_an_unknown_one_say_nothing(tmp_path):
    below = {**ROOFLINE, "flops": 0.3e15}
    assert (
        advise(report(tmp_path, [shard(n, **below) for n in range(20)]), compile_job(job())) == ()
    )
    unknown = report(tmp_path, [shard(n) for n in range(20)])
    assert unknown.roofline == {} and "roofline" not in unknown.to_dict()
    assert not any("peak" in row["figure"] for row in engine_table(unknown))


def test_a_long_tail_is_told_with_smaller_shards(tmp_path):
    some = {**ROOFLINE, "up_s": 5.0, "peak_flops": 5e15, "peak_bytes": 15e12}
    commits = [shard(n, "a:1", 500, **some) for n in range(20)]
    commits += [shard(n, "a:2", 600, **some) for n in range(14)]
    found = only(advise(report(tmp_path, commits), compile_job(job())))
    assert found.about == "engines were idle at the end"
    assert found.change.startswith("source.rows_per_shard: ")


def test_a_run_that_is_well_gets_none(tmp_path):
    commits = [shard(n, f"a:{n % 2}") for n in range(20)]
    assert advise(report(tmp_path, commits), compile_job(job(limits={"deadline": "1h"}))) == ()


def test_what_is_not_known_says_nothing(tmp_path):
    bare = [replace(shard(n), stats=ShardStats(rows=500, started=n, ended=n + 9)) for n in range(9)]
    assert advise(report(tmp_path, [replace(c, where={}) for c in bare]), compile_job(job())) == ()


def test_a_gpu_that_waits_for_its_host(tmp_path):
    found = only(
        advise(report(tmp_path, [shard(n, gpu=0.45) for n in range(20)]), compile_job(job()))
    )
    assert found.about == "the GPU is underused"
    assert "45%" in found.evidence and "engines_per_gpu" in found.change


def test_an_engine_that_is_starved_by_prepare(tmp_path):
    slow = [shard(n, prepare_s=12.0, running=40, waiting=0, gpu=0.3) for n in range(20)]
    found = only(advise(report(tmp_path, slow), compile_job(job())))
    assert found.about == "engines are starved by prepare"
    assert "40 of 256" in found.evidence and "240 s in total" in found.evidence
    assert found.change.startswith("cluster.prepare.concurrency: ")


def test_an_engine_that_is_sent_too_little(tmp_path):
    few = [shard(n, running=40, waiting=0, gpu=0.3) for n in range(20)]
    found = only(advise(report(tmp_path, few), compile_job(job())))
    assert found.about == "engines are not full"
    assert found.change == "engine.max_concurrent_batches: 4"


def test_a_run_too_short_for_its_engines_to_fill_gets_no_advice_on_that(tmp_path):
    few = [shard(n, running=40, waiting=0, gpu=0.3, rows=100) for n in range(10)]
    assert advise(report(tmp_path, few), compile_job(job())) == ()


def test_engines_out_of_memory(tmp_path):
    losses = {"EngineDied: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": 3}
    made = report(tmp_path, [shard(n) for n in range(20)], engine_deaths=1, losses=losses)
    found = only(advise(made, compile_job(job())))
    assert "3 shards" in found.evidence and "CUDA out of memory" in found.evidence
    assert found.change == "engine.max_num_batched_tokens: 8192"
    small = job(engine={"max_num_batched_tokens": 2048})
    assert only(advise(made, compile_job(small))).change == "engine.max_num_seqs: 128"
    other = replace(made, losses={"EngineDied: Segmentation fault": 3})
    assert advise(other, compile_job(job())) == ()


def test_a_full_cache(tmp_path):
    made = report(tmp_path, [shard(n, kv_cache=0.98, running=90) for n in range(20)])
    found = only(advise(made, compile_job(job())))
    assert found.about == "the KV cache is full" and "98%" in found.evidence


@pytest.mark.parametrize(
    ("shares", "change"),
    [((9, 3, 3, 3), "source.rows_per_shard: 141"), ((90, 30, 30, 30), "check the node of a:3")],
)
def test_engines_that_are_uneven(tmp_path, shares, change):
    made = report(tmp_path, [shard(n, f"a:{e}") for e, m in enumerate(shares) for n in range(m)])
    found = only(advise(made, compile_job(job())))
    assert found.about == "engines are uneven"
    assert "2.00 times the mean" in found.evidence and found.change.startswith(change)


def attempts(*made: tuple[str, list[str]]) -> list[Commit]:
    """Shards one after the other, each (attempt, engines in order)."""
    places = [(attempt, engine) for attempt, engines in made for engine in engines]
    return [replace(shard(n, e), attempt=a) for n, (a, e) in enumerate(places)]


def test_engines_are_compared_with_those_of_their_own_attempt(tmp_path):
    """A resumed run has other engines, which did fewer rows because fewer were left."""
    even = attempts(("first", ["a:1", "a:2"] * 8), ("second", ["a:3", "a:4"] * 2))
    assert advise(report(tmp_path, even), compile_job(job())) == ()
    # In containers the second attempt's processes may have the first one's numbers.
    again = attempts(("first", ["a:1", "a:2"] * 6), ("second", ["a:1"] * 4))
    made = report(tmp_path, again)
    assert advise(made, compile_job(job())) == ()
    assert [(one.name, one.shards) for one in made.workers] == [("a:1", 6), ("a:2", 6)]
    assert "engines | 2 (1 more in other attempts)" in markdown(made)


def test_engines_that_are_uneven_in_one_attempt_are_told(tmp_path):
    made = report(
        tmp_path, attempts(("first", ["a:3"] * 2), ("second", ["a:1"] * 12 + ["a:2"] * 4))
    )
    found = only(advise(made, compile_job(job())))
    assert found.about == "engines are uneven"
    assert "1.50 times the mean" in found.evidence and "8.0 shards per engine" in found.evidence
    assert made.nodes[0].engines == 2  # at one time


def test_engines_of_another_attempt_do_not_count_for_the_deadline(tmp_path):
    made = report(tmp_path, attempts(("first", ["a:1", "a:2"] * 8), ("second", ["a:3", "a:4"] * 2)))
    found = only(advise(made, compile_job(job(limits={"deadline": "1m"}))))
    assert "by 2 engines" in found.evidence and found.change.startswith("4 engines instead of 2")


def test_a_deadline_that_was_missed(tmp_path):
    made = report(tmp_path, [shard(n, f"a:{n % 2}") for n in range(20)])
    assert made.seconds == 105
    found = only(advise(made, compile_job(job(limits={"deadline": "1m"}))))
    assert "105 s of work" in found.evidence and "by 2 engines" in found.evidence
    assert found.change.startswith("4 engines instead of 2")


def test_starts_and_waits_count_for_a_deadline_and_engines_do_not_shorten_them(tmp_path):
    made = report(tmp_path, [shard(n, f"a:{n % 2}") for n in range(20)])
    made = replace(made, elapsed=165.0)
    assert advise(made, compile_job(job(limits={"deadline": "3m"}))) == ()
    found = only(advise(made, compile_job(job(limits={"deadline": "2m"}))))
    told = "the run took 165 s, limits.deadline 2m allows 120 s: 105 s of work by 2 engines"
    assert found.evidence.startswith(told) and found.evidence.endswith("60 s of start-up and waits")
    assert found.change.startswith("4 engines instead of 2")  # 60 s are left for the work
    found = only(advise(made, compile_job(job(limits={"deadline": "1m"}))))
    assert found.change == "limits.deadline above the 60 s of start-up and waits"


def test_answers_that_are_cut_off(tmp_path):
    made = report(tmp_path, [shard(n, cut_off=20) for n in range(20)])
    found = only(advise(made, compile_job(job(sampling={"max_tokens": 16}))))
    assert found.change == "sampling.max_tokens: 32" and "400 of 10,000" in found.evidence


def test_failed_answers_that_were_cut_off(tmp_path):
    key = FailureKey("engine", "AnswerCutOff", "the answer was cut off")
    failed = replace(shard(0, cut_off=1), failures={key: 1})
    made = report(tmp_path, [failed, *(shard(n) for n in range(1, 20))])
    found = only(advise(made, compile_job(job(output={"uri": "o", "on_cut_off": "fail"}))))
    assert "1 of 10,000 rows failed" in found.evidence
    assert "--error AnswerCutOff --set sampling.max_tokens=32" in found.change


def test_prompts_that_are_too_long(tmp_path):
    failed = replace(shard(0), failures={FailureKey("prepare", "PromptTooLong", "300 tokens"): 12})
    made = report(tmp_path, [failed, *(shard(n) for n in range(1, 20))])
    found = only(advise(made, compile_job(job(engine={"max_model_len": 256}))))
    assert "12 of 10,000" in found.evidence and "256" in found.evidence


def test_it_stands_in_the_report_and_survives_its_file(tmp_path):
    made = report(tmp_path, [shard(n, gpu=0.45) for n in range(20)])
    made = replace(made, advice=advise(made, compile_job(job())))
    assert RunReport.from_bytes(made.to_bytes()) == made
    page = markdown(made)
    assert "## Advice" in page and "the GPU is underused" in page
    assert "## Advice" not in markdown(replace(made, advice=()))


@pytest.mark.parametrize("text", ["6", "-1h", "soon", "0s", ""])
def test_a_deadline_must_be_a_time(text):
    with pytest.raises(ConfigError, match=r"limits\.deadline"):
        job(limits={"deadline": text})
