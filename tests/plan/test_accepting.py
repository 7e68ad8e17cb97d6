"""Differences from a run's job that a person takes on, and those that nobody may."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engines import FakeEngine
from helpers.retries import end, first_run
from helpers.small import MODEL, make_job, small_run

from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.errors import ConfigError, PlanMismatch
from prefect_raybatch.harmless import markdown_text
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.accepted import Accepted, accepted_note, all_accepted
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.plan.accepting import check_acceptable, of_model
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import markdown
from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import open_store


def taken(plan: Plan, fields: list[str], **groups: object) -> list[str]:
    groups.setdefault("source", {"uri": "data/in.parquet", "rows_per_shard": 5})
    other = Resolved.of(make_job(**groups), MODEL)
    found = check_acceptable(plan, other.identity, "RUN", fields, "me@here")
    return [str(one) for one in found]


@pytest.fixture
def plan(tmp_path) -> Plan:
    return small_run(tmp_path).plan


def test_what_is_named_is_accepted_and_what_is_not_is_refused(plan):
    sampling = {"max_tokens": 99, "temperature": 0.5}
    both = ["sampling.temperature", "sampling.max_tokens"]
    assert taken(plan, both, sampling=sampling) == [
        "sampling.temperature: 0.0 -> 0.5, accepted by me@here",
        "sampling.max_tokens: 16 -> 99, accepted by me@here",
    ]
    with pytest.raises(PlanMismatch) as refused:
        taken(plan, ["sampling.max_tokens"], sampling=sampling)
    assert "sampling.temperature: 0.0 -> 0.5" in str(refused.value)
    assert "max_tokens" not in str(refused.value)
    assert taken(plan, ["sampling.max_tokens"]) == []  # it does not differ


@pytest.mark.parametrize(
    ("field", "groups", "said"),
    [
        ("sampling.max_tokns", {}, r"unknown field 'sampling.max_tokns'; did you mean "),
        (
            "source.limit",
            {"source": {"uri": "data/in.parquet", "limit": 3}},
            "decides the rows of the run",
        ),
        ("source.uri", {"source": {"uri": "other.parquet"}}, "decides the rows of the run"),
        ("output.column", {"output": {"uri": "out", "column": "x"}}, "columns of the result"),
        ("sampling.n", {"sampling": {"n": 2, "temperature": 1}}, "columns of the result"),
        ("name", {"name": "other"}, "which job the run belongs to"),
        ("engine.max_model_len", {"engine": {"max_model_len": "auto"}}, "the value in its plan"),
    ],
)
def test_rows_and_columns_of_a_run_are_not_to_be_changed(plan, field, groups, said):
    with pytest.raises(ConfigError, match=said):
        taken(plan, [field], **groups)


EMBED = {"engine": {"task": "embed"}, "sampling": {}}
IMAGES = {"template": "What is {Company}?", "images": {"columns": ["tags"]}}


@pytest.mark.parametrize(
    ("field", "run", "groups"),
    [
        (
            "prompt.images.columns",
            {"prompt": IMAGES},
            {"prompt": {**IMAGES, "images": {"columns": ["a"]}}},
        ),
        ("prompt.images.columns", {}, {"prompt": IMAGES}),
        ("prompt.images.columns", {"prompt": IMAGES}, {}),
        ("engine.revision", EMBED, {"engine": {"task": "embed", "revision": "b"}}),
        ("engine.hf_overrides.a", EMBED, {"engine": {"task": "embed", "hf_overrides": {"a": 1}}}),
        ("engine.pooler_config.a", EMBED, {"engine": {"task": "embed", "pooler_config": {"a": 1}}}),
    ],
)
def test_what_the_columns_follow_from_is_not_to_be_changed(tmp_path, field, run, groups):
    plan = small_run(tmp_path, **run).plan
    with pytest.raises(ConfigError, match="columns of the result"):
        taken(plan, [field], **groups)


def test_a_run_whose_answers_others_take_over_stays_of_one_kind(plan):
    with pytest.raises(ConfigError, match="reuses or keeps answers"):
        taken(
            replace(plan, increment={"x": 1}), ["sampling.max_tokens"], sampling={"max_tokens": 9}
        )


def test_another_model_leaves_the_plan_its_hash(plan):
    other = plan.with_model({**MODEL, "revision": "new"})
    assert other.hash == plan.hash and other.model["revision"] == "new"
    one = Accepted("engine.revision", "'a'", "'b'", "me@here", 1.0)
    assert of_model([one]) and not of_model([replace(one, field="engine.dtype")])


def test_a_damaged_note_costs_what_it_said_alone(tmp_path, caplog):
    made = first_run(tmp_path, finish=False)
    one = Accepted("prompt.template", "'a'", "'b'", "me@here", 1.5)
    made.ledger.note_attempt("b", accepted_note([replace(one, at=9.0)]))
    made.ledger.note_attempt("a", {**accepted_note([one]), "host": "x"})
    made.ledger.note_attempt("c", {"accepted": [{"field": 3}]})
    assert all_accepted(made.ledger) == (one,)
    assert "attempt c accepted: accepted in attempt c" in caplog.text
    report = end(made.job, made.store.uri)
    assert report.accepted == (one,) and RunReport.from_bytes(report.to_bytes()) == report
    told = made.ledger.finished(made.plan)
    assert isinstance(told, Success) and told.accepted == (one,)


def test_a_run_goes_on_with_a_job_that_differs_and_tells_of_it(without_ray, tmp_path, caplog):
    def stop(progress: Progress) -> None:
        if progress.tally.shards == 2:
            raise KeyboardInterrupt

    table = pa.table({"id": range(40), "Company": [f"Company {i}" for i in range(40)]})
    pq.write_table(table, tmp_path / "in.parquet")
    job = make_job(
        source={"uri": str(tmp_path / "in.parquet"), "rows_per_shard": 10},
        output={"uri": str(tmp_path / "out")},
        limits={"max_failed_fraction": 0.1},
    )
    with pytest.raises(KeyboardInterrupt):
        infer_run(job, plan_run(job, "key"), stop, engine=FakeEngine)
    value = {**job.to_dict(), "prompt": {"template": "Who is {Company}?"}}
    other = BatchJob.from_dict(value)
    with pytest.raises(PlanMismatch, match=r"prompt\.template"):
        plan_run(other, "key")
    run = plan_run(other, "key", accept=["prompt.template"])
    report = finalize_run(other, run, infer_run(other, run, engine=FakeEngine))
    (one,) = report.accepted
    assert (one.field, one.new) == ("prompt.template", "'Who is {Company}?'")
    assert str(one) in report.notes and markdown_text(str(one)) in markdown(report)
    store = open_store(run.uri)
    success = json.loads(store.read("_SUCCESS"))
    assert success["accepted"][0] == json.loads(report.to_bytes())["accepted"][0]
    ledger = Ledger(store)
    notes = [ledger.read_attempt(name) for name in ledger.attempts()]
    assert sorted(len(note.get("accepted", ())) for note in notes) == [0, 1]
    assert verify(store).ok and f"{one}" in caplog.text
