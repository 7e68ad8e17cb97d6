"""Lengths of prompts from a sample: where it is taken, what it says, what auto comes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import MODEL, make_job
from helpers.specs import prepare_stage
from typer.testing import CliRunner

from prefect_raybatch import source
from prefect_raybatch.api import plan_run
from prefect_raybatch.cli.commands import app
from prefect_raybatch.compile.job import compile_job, compile_planned, read_spec
from prefect_raybatch.errors import ConfigError, CorruptRun
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.plan import prompt_lengths as tokens
from prefect_raybatch.runs.run import run_store

TEMPLATE = "{Text}"


def job_for(folder: Path, pattern: str = "in", **groups: Any) -> BatchJob:
    return make_job(
        source={"uri": str(folder / pattern)},
        prompt={"template": TEMPLATE},
        output={"uri": str(folder / "out")},
        **groups,
    )


def write(folder: Path, texts: list[str | None], name: str = "a.parquet") -> None:
    (folder / "in").mkdir(exist_ok=True)
    pq.write_table(pa.table({"Other": texts, "Text": texts}), folder / "in" / name)


def sizes_of(job: BatchJob, texts: list[str]) -> list[int]:
    """Lengths as the prepare stage makes them."""
    made = prepare_stage(job.prompt, dict(MODEL), None).prompts(pa.table({"Text": texts}))[1]
    return [len(ids) for ids in made]


def measured(job: BatchJob, **named: Any) -> tokens.PromptLengths:
    return tokens.of_files(
        compile_job(job), MODEL, source.inventory(read_spec(job.source)), **named
    )


# --- the sample ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "sample"), [(1, 5), (120, 200), (10_000, 300), (999, 1)])
def test_places_are_apart_within_the_rows_and_as_many_as_asked(rows, sample):
    found = sorted(tokens.places(rows, sample))
    taken = [row for start, count in found for row in range(start, start + count)]
    assert len(set(taken)) == len(taken) and taken[0] >= 0 and taken[-1] < rows
    assert min(rows, sample) <= len(taken) < sample + tokens.NEIGHBOURS
    if rows > sample > tokens.NEIGHBOURS:
        assert taken[0] == 0 and taken[-1] == rows - 1


def test_all_rows_of_a_small_input_are_told_exactly(tmp_path):
    texts = [f"word {'x ' * (i % 40)}" for i in range(300)]
    write(tmp_path, texts[:100])
    write(tmp_path, ["longest " * 150, *texts[100:]], "b.parquet")
    job = job_for(tmp_path)
    found = measured(job)
    sizes = sorted(sizes_of(job, [*texts, "longest " * 150]))
    assert (found.rows, found.failed) == (301, 0)
    assert (found.least, found.median, found.most) == (sizes[0], sizes[150], sizes[-1])
    assert (found.p90, found.p99) == (sizes[270], sizes[297])
    assert found.longest == {"file": str(tmp_path / "in" / "b.parquet"), "row": 0}
    assert sum(rows for _, _, rows in found.histogram) == 301
    assert found.histogram[0][0] == sizes[0] and found.histogram[-1][1] == sizes[-1]
    assert found.repeated == pytest.approx(1 - 41 / 301, abs=1e-4)  # 40 lengths and the long one
    assert "over 4 times the 99th percentile" in found.notes[0]


def test_a_large_input_is_sampled_from_its_beginning_to_its_end(tmp_path):
    write(tmp_path, ["a"] * 5000)
    write(tmp_path, ["a b c d e f g h"] * 5000, "b.parquet")
    found = measured(job_for(tmp_path), sample=200)
    assert 200 <= found.rows < 250
    assert found.least < found.most and found.median in (found.least, found.most)


def test_times_that_python_cannot_hold_are_measured_as_the_text_that_arrow_writes():
    dates = pa.array([0, 10**7], pa.date32())
    job = make_job(prompt={"template": TEMPLATE})
    for rows in (dates, dates[1:]):
        blocks = [("file", 0, pa.table({"Text": rows}))]
        found = tokens.measure(compile_job(job), MODEL, iter(blocks))
        assert (found.rows, found.failed) == (len(rows), 0)


def test_a_sample_ends_when_its_time_is_over():
    def blocks() -> Any:
        for i in range(100):
            yield "file", i, pa.table({"Text": [f"row {i}"]})

    job = make_job(prompt={"template": TEMPLATE})
    assert tokens.measure(compile_job(job), MODEL, blocks(), seconds=0).rows == 1


def _by_row(found: tokens.PromptLengths) -> list[tokens.PromptExample]:
    return sorted(found.examples, key=lambda one: one.row)


def test_rows_that_make_no_prompt_are_counted_and_nothing_but_such_is_an_error(tmp_path):
    write(tmp_path, ["a", None, "b"])
    found = measured(job_for(tmp_path))
    assert (found.rows, found.failed) == (2, 1)
    assert {one.row for one in found.examples} == {0, 2}
    assert all(one.tokens in (found.least, found.most) for one in found.examples)
    assert all(text in one.text for one, text in zip(_by_row(found), "ab", strict=True))
    with pytest.raises(ConfigError, match=r"none of 1 sampled row made a prompt.*is null"):
        tokens.measure(
            compile_job(job_for(tmp_path)), MODEL, [("f", 0, pa.table({"Text": [None]}))]
        )


def test_shared_prefixes_count_in_whole_blocks(tmp_path):
    long = "the same words again and again " * 20
    write(tmp_path, [f"{long} {i}" for i in range(50)])
    shared = measured(job_for(tmp_path)).shared
    assert 0.85 < shared < 1
    write(tmp_path, [f"{i} {chr(97 + i % 26)} {long}" for i in range(50)])
    assert measured(job_for(tmp_path)).shared < 0.2


def test_csv_is_looked_at_without_a_copy(tmp_path):
    (tmp_path / "in").mkdir()
    for name in "ab":
        rows = "\n".join(f"{i},text {name} {i}" for i in range(200))
        (tmp_path / "in" / f"{name}.csv").write_text(f"id,Text\n{rows}\n")
    job = job_for(tmp_path)
    found = tokens.of_heads(compile_job(job), MODEL, sample=100)
    assert 100 <= found.rows <= 150
    assert not (tmp_path / "out").exists()


# --- auto ---------------------------------------------------------------------------------------


def auto(**engine: Any) -> BatchJob:
    return make_job(engine={"max_model_len": "auto", **engine})


def test_auto_fits_the_percentile_in_steps_and_never_more_than_the_model():
    needs = [100] * 98 + [500, 2000]
    assert tokens.choose_max_model_len(0.99, needs, None)[0] == 512
    assert tokens.choose_max_model_len(0.5, needs, None)[0] == 128
    assert tokens.choose_max_model_len(1.0, needs, None)[0] == 2240
    length, why = tokens.choose_max_model_len(1.0, needs, 1024)
    assert length == 1024 and why.startswith("the model's own")


def test_the_answer_is_part_of_the_length(tmp_path):
    texts = ["word " * (i % 100) for i in range(500)]
    write(tmp_path, texts)
    job = job_for(tmp_path, sampling={"max_tokens": 300})
    p99 = sorted(sizes_of(job, texts))[494]
    assert measured(job).max_model_len == -(-(p99 + 300) // 64) * 64


def test_the_plan_keeps_what_auto_came_to(tmp_path):
    write(tmp_path, ["word " * 5] * 99 + ["word " * 400])
    job = job_for(tmp_path, engine={"max_model_len": "auto"}, sampling={"max_tokens": 8})
    first = plan_run(job, "key")
    ledger = Ledger(run_store(job.output, "key"))
    plan = ledger.load_plan()
    assert plan is not None and plan.context is not None
    assert plan.context["max_model_len"] == 64 and plan.context["rows"] == 100
    assert compile_planned(job, plan).engine.model.context == 64
    # The input may have grown: what is quarantined is decided once.
    write(tmp_path, ["word " * 700] * 100)
    assert plan_run(job, "key") == first
    again = Plan.from_bytes(plan.to_bytes())
    assert again.context == plan.context and again.hash == plan.hash


def test_a_plan_without_auto_keeps_the_bytes_it_always_had(tmp_path):
    write(tmp_path, ["a"])
    job = job_for(tmp_path)
    plan_run(job, "key")
    plan = Ledger(run_store(job.output, "key")).load_plan()
    assert plan is not None and plan.context is None
    assert compile_planned(job, plan) == compile_job(job, ["Text"])
    with pytest.raises(CorruptRun, match="auto"):
        compile_planned(auto(), plan)


@pytest.mark.parametrize("context", [{}, {"max_model_len": 0}, {"max_model_len": "64"}, [64]])
def test_a_context_that_is_no_length_is_a_corrupt_plan(tmp_path, context):
    write(tmp_path, ["a"])
    plan_run(job_for(tmp_path), "key")
    plan = Ledger(run_store(job_for(tmp_path).output, "key")).load_plan()
    assert plan is not None
    value = {**json.loads(plan.to_bytes()), "context": context}
    with pytest.raises(CorruptRun, match="context"):
        Plan.from_bytes(json.dumps(value).encode())


@pytest.mark.parametrize("wrong", [0, -1, "automatic", 1.5])
def test_a_length_is_a_whole_number_or_auto(wrong):
    with pytest.raises(ConfigError, match="max_model_len"):
        auto(max_model_len=wrong)


# --- raybatch plan --tokens ---------------------------------------------------------------------


def test_the_command_shows_the_distribution(tmp_path):
    write(tmp_path, ["word " * 10] * 99 + ["word " * 400])
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(job_for(tmp_path).to_dict()))
    shown = CliRunner().invoke(app, ["plan", str(file), "--tokens"]).output
    assert "100 sampled" in shown and "row 99" in shown and "max_model_len auto" in shown
    assert "over 4 times" in shown and "#" in shown
    made = CliRunner().invoke(app, ["plan", str(file), "--tokens", "--sample", "50", "--json"])
    found = json.loads(made.output)["tokens"]
    assert found["rows"] == 50 and found["max_model_len"] % 64 == 0
    plain = CliRunner().invoke(app, ["plan", str(file), "--json"])
    assert json.loads(plain.output)["tokens"] is None
