"""Failed rows retried in child runs: which rows, under which numbers, after a crash, in a race,
and the proof over the whole chain with faults planted in it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.command_line import called
from helpers.engines import FAILS, FakeEngine
from helpers.retries import commit, end, first_run, numbers, retried, work
from helpers.small import input_rows, job_dict, make_job, read_json, small_run
from helpers.specs import new_plan_of

from prefect_raybatch.api import finalize_run, infer_run, plan_run, publish_run
from prefect_raybatch.api.retry import (
    Retry,
    RetryRequest,
    plan_retry,
    planned_targets,
    retry_request,
)
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.errors import ConfigError, CorruptRun, HubUnavailable, PlanMismatch
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.failures import FailureKey
from prefect_raybatch.ledger.family import load_family, locate_run
from prefect_raybatch.ledger.layout import PIECES, PLAN, SUCCESS, commit_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Plan, digest
from prefect_raybatch.ledger.row_numbers import RowNumbers, name_rows, numbers_table, read_numbers
from prefect_raybatch.result.reap import reap
from prefect_raybatch.result.verify import verify
from prefect_raybatch.result.verify_chain import ChainVerdict, verify_chain
from prefect_raybatch.runs.finalize_run import load_report
from prefect_raybatch.runs.repair import repair_run
from prefect_raybatch.runs.retry import NothingToRetry, options_of_retry
from prefect_raybatch.runs.run import run_of
from prefect_raybatch.runs.run_history import history_of
from prefect_raybatch.runs.status import status
from prefect_raybatch.storage import open_store


def planned(uri: str, *arguments: Any, **more: Any) -> Retry:
    made = plan_retry(uri, *arguments, **more)
    assert isinstance(made, Retry), made
    return made


def plan_of(uri: str | Path) -> Plan:
    plan = Ledger(open_store(str(uri))).load_plan()
    assert plan is not None
    return plan


def taken(uri: str | Path) -> list[int]:
    ledger = Ledger(open_store(str(uri)))
    return ledger.numbers(plan_of(uri)).all().tolist()


def chain(uri: str | Path) -> ChainVerdict:
    return verify_chain(*locate_run(str(uri)))


# --- the plan -----------------------------------------------------------------------------------


def test_a_plan_that_is_read_keeps_its_bytes_and_hash(tmp_path):
    """Commits hold the plan's hash."""
    run = small_run(tmp_path)
    raw = (tmp_path / "_raybatch/plan.json").read_bytes()
    assert b'"numbers_table":null' in raw and b'"parent":null' in raw
    assert plan_of(tmp_path).to_bytes() == raw
    assert plan_of(tmp_path).hash == run.plan.hash == digest(raw)


@pytest.mark.parametrize("change", [{"parent": "up/key"}, {"parent": 3}, {"numbers_table": "../x"}])
def test_a_parent_or_a_table_outside_of_the_root_is_refused(tmp_path, change):
    run = small_run(tmp_path)
    value = {**json.loads(run.plan.to_bytes()), "parent": "a", "numbers_table": "n.parquet"}
    Plan.from_bytes(json.dumps(value).encode())
    with pytest.raises(CorruptRun, match=next(iter(change))):
        Plan.from_bytes(json.dumps({**value, **change}).encode())
    value["numbers_table"] = None
    with pytest.raises(CorruptRun, match="numbers"):
        Plan.from_bytes(json.dumps(value).encode())


def test_the_table_of_numbers_is_checked():
    good = np.array([3, 5, 6], np.int64)
    assert read_numbers(numbers_table(good), 3).table.tolist() == [3, 5, 6]
    for bad, rows in (([5, 3], 2), ([5, 5], 2), ([-1, 5], 2), ([1, 2], 3)):
        with pytest.raises(CorruptRun, match="row numbers"):
            read_numbers(numbers_table(np.array(bad, np.int64)), rows)


def test_rows_are_named_by_their_numbers():
    assert name_rows(np.array([4, 5, 6])) == "rows 4 to 6"
    assert name_rows(np.array([4, 7, 9])) == "rows 4, 7, 9"
    assert name_rows(np.arange(0, 20, 2)) == "rows 0, 2, 4, 6, 8 and 5 more"
    table = RowNumbers(3, np.array([4, 7, 9]))
    assert table.name(1, 3) == "rows 7, 9" and RowNumbers(9).name(1, 3) == "rows 1 to 2"
    known, unknown = table.positions(np.array([4, 8, 9, 100]))
    assert (known.tolist(), unknown.tolist()) == ([0, 2], [8, 100])


# --- which rows ---------------------------------------------------------------------------------


def test_all_failed_rows_are_asked_again_under_their_numbers(tmp_path):
    run = first_run(tmp_path)
    before = {p: p.read_bytes() for p in (tmp_path / "key").rglob("*") if p.is_file()}
    uri = retried(run.store.uri)
    assert uri == f"{tmp_path}/key.r1"
    plan = plan_of(uri)
    assert (plan.parent, plan.rows, plan.job_name) == ("key", 4, "nightly")
    assert numbers(uri) == taken(uri) == [4, 7, 11, 18] and numbers(uri, "quarantine") == []
    data = pq.read_table(Path(uri, "data"))
    assert data["id"].to_pylist() == [4, 7, 11, 18]
    assert data["tags"].to_pylist() == [["t4"], ["t7"], ["t11"], ["t18"]]
    assert data.schema.equals(pq.read_table(tmp_path / "key/data").schema)
    both = numbers(tmp_path / "key") + numbers(uri)
    assert sorted(both) == list(range(20))
    assert verify(open_store(uri)).ok and chain(uri).ok
    after = {p: p.read_bytes() for p in (tmp_path / "key").rglob("*") if p.is_file()}
    assert after == before  # a finished run never changes


def test_status_names_the_runs_that_took_all_failed_rows(tmp_path):
    run = first_run(tmp_path)
    assert status(run.store.uri).retried_by == ()
    retried(run.store.uri, ["ValueError"])
    assert status(run.store.uri).retried_by == ()
    retried(run.store.uri)
    state = status(run.store.uri)
    assert (state.retried_by, state.failed_again) == (("key.r1", "key.r2"), 0)


def test_status_says_how_many_rows_failed_again_once_the_retry_is_complete(tmp_path, capsys):
    uri = first_run(tmp_path).store.uri
    assert isinstance(plan_retry(uri), Retry)
    _, out, _ = called(capsys, "status", uri)
    assert "failed rows are retried in key.r1\n" in out
    retried(uri, failed={7: "ValueError", 18: "PromptTooLong"})
    _, out, _ = called(capsys, "status", uri)
    assert "failed rows were retried in key.r1: 2 failed again\n" in out


def test_status_gives_the_options_that_a_retry_needs(tmp_path):
    assert status(first_run(tmp_path / "a").store.uri).retry_options == ()
    target = {"uri": str(tmp_path / "lake"), "format": "jsonl", "name": "lines"}
    run = first_run(tmp_path / "b", output={"publish": [target]})
    assert status(run.store.uri).retry_options == ("--job", "JOB")


def test_rows_of_some_classes_and_then_the_rest(tmp_path):
    run = first_run(tmp_path)
    one = retried(run.store.uri, ["ValueError"])
    assert numbers(one) == [7, 11]
    two = retried(run.store.uri, ["EngineDied", "ValueError"])
    assert two.endswith("key.r2") and numbers(two) == [4]
    three = retried(run.store.uri)
    assert three.endswith("key.r3") and numbers(three) == [18]
    found = chain(run.store.uri)
    assert found.ok and (found.rows, found.data, found.quarantined) == (20, 20, 0)
    assert [(x.run_key, x.rows, x.retried) for x in found.runs] == [
        ("key", 20, 4),
        ("key.r1", 2, 0),
        ("key.r2", 1, 0),
        ("key.r3", 1, 0),
    ]


def test_an_unknown_class_is_named_with_those_there_are(tmp_path):
    run = first_run(tmp_path)
    with pytest.raises(ConfigError) as error:
        plan_retry(run.store.uri, ["Timeout", "ValueError"])
    text = str(error.value)
    assert "failed with Timeout." in text and "ValueError (2), EngineDied (1)" in text
    assert [p.name for p in tmp_path.iterdir()] == ["key"]  # said before anything is written


def test_an_unknown_class_is_no_success_when_all_rows_are_retried_already(tmp_path):
    run = first_run(tmp_path)
    retried(run.store.uri)
    with pytest.raises(ConfigError, match=r"failed with Timeout\. .* ValueError \(2\)"):
        plan_retry(run.store.uri, ["Timeout"])
    nothing = plan_retry(run.store.uri, ["ValueError"])
    assert isinstance(nothing, NothingToRetry) and "none failed again" in nothing.message


def test_a_class_is_known_also_where_the_report_is_too_short_for_it(tmp_path):
    run = first_run(tmp_path, {n: f"Error{n}" for n in range(30)}, rows=30)
    shown = {FailureKey.parse(key).error for key in load_report(run.store).failures}
    rare = next(n for n in range(30) if f"Error{n}" not in shown)
    uri = retried(run.store.uri, [f"Error{rare}"])
    assert numbers(uri) == [rare]


def test_failed_again_are_retried_by_a_child_of_the_child(tmp_path):
    run = first_run(tmp_path)
    one = retried(run.store.uri, failed={7: "ValueError", 18: "PromptTooLong"})
    assert (numbers(one), numbers(one, "quarantine")) == ([4, 11], [7, 18])
    with pytest.raises(ConfigError, match=r"raybatch retry-failed .*/key\.r1   \(2 failed\)"):
        plan_retry(run.store.uri)
    two = retried(one, failed={18: "PromptTooLong"})
    assert two.endswith("key.r2") and plan_of(two).parent == "key.r1"
    assert (numbers(two), numbers(two, "quarantine")) == ([7], [18])
    bad = pq.read_table(Path(two, "_quarantine")).to_pylist()
    assert bad[0]["_row"] == bad[0]["input"]["id"] == 18
    with pytest.raises(ConfigError, match=r"key\.r2   \(1 failed\)"):
        plan_retry(run.store.uri)  # of the first run, and the end of the chain is named
    for uri in (run.store.uri, one, two):
        found = chain(uri)
        assert found.ok and (found.data, found.quarantined) == (19, 1)
    three = retried(two)
    assert numbers(three) == [18] and chain(one).data == 20
    nothing = plan_retry(run.store.uri)
    assert isinstance(nothing, NothingToRetry) and "none failed again" in nothing.message


def test_a_run_without_failed_rows_has_nothing_to_retry(tmp_path):
    run = first_run(tmp_path, failed={})
    made = plan_retry(run.store.uri)
    assert isinstance(made, NothingToRetry) and "no row of key failed" in made.message
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_an_unfinished_run_is_to_be_finished_first(tmp_path):
    run = first_run(tmp_path, finish=False)
    with pytest.raises(ConfigError, match="Finish it first"):
        plan_retry(run.store.uri)


def test_rows_left_out_and_types_fixed_by_the_first_run_hold_in_the_child(tmp_path):
    output = {"postprocess": "helpers.functions:skip_odd", "columns": ["id"]}
    run = first_run(tmp_path, output=output)
    uri = retried(run.store.uri)
    assert numbers(uri) == [4, 18]
    found = chain(uri)
    assert found.ok and (found.data, found.skipped) == (10, 10)
    kinds = [pq.read_schema(next(Path(u, "data").iterdir())) for u in (run.store.uri, uri)]
    assert kinds[0].equals(kinds[1])
    types = "_raybatch/output_schema.arrow"
    assert Path(uri, types).read_bytes() == (tmp_path / "key" / types).read_bytes()


def test_a_run_without_compaction(tmp_path):
    run = first_run(tmp_path, output={"compact": False})
    one = planned(run.store.uri, ["ValueError"])
    assert taken(one.run.uri) == [7, 11]
    work(one, one.job, {11: "ValueError"})
    finalize_run(one.job, one.run)
    success = read_json(Path(one.run.uri, "_SUCCESS"))
    named = pq.read_table(Path(one.run.uri, "_raybatch", success["manifest"])).to_pylist()
    assert [(row["kind"], row["start"], row["rows"]) for row in named] == [
        ("data", 0, 1),
        ("quarantine", 0, 1),
    ]
    two = planned(one.run.uri)
    assert taken(two.run.uri) == [11]
    work(two, two.job)
    finalize_run(two.job, two.run)
    found = chain(run.store.uri)
    assert found.ok and (found.data, found.quarantined) == (18, 2)


def test_many_shards_and_rows_keep_their_numbers(tmp_path):
    failed = {i: "ValueError" for i in range(200) if i % 3}
    job = {"source": {"uri": "data/in.parquet", "rows_per_shard": 7}}
    run = small_run(tmp_path / "key", rows=200, per_shard=7, **job)
    for shard in range(run.plan.shards):
        table = run.block(run.whole(shard)).select(["id", "Company", "tags"])
        commit(run.ledger, run.job, shard, table, failed)
    end(run.job, run.store.uri)
    uri = retried(run.store.uri, failed={i: "Again" for i in range(50, 60)})
    assert plan_of(uri).shards == 19 and taken(uri) == sorted(failed)
    table = pq.read_table(Path(uri, "data"))
    assert table["_row"].to_pylist() == table["id"].to_pylist()
    assert chain(uri).ok


# --- the job ------------------------------------------------------------------------------------


def test_the_job_can_be_changed_by_field_or_whole(tmp_path):
    run = first_run(tmp_path)
    one = planned(run.store.uri, ["ValueError"], {"sampling.max_tokens": 99})
    assert one.job.sampling.max_tokens == plan_of(one.run.uri).job["sampling"]["max_tokens"] == 99
    other = make_job(prompt={"template": "Say what {Company} does."}, output={"uri": "elsewhere"})
    two = planned(run.store.uri, None, None, other)
    assert two.job.prompt.template == "Say what {Company} does."
    assert two.job.output.uri == str(tmp_path) and two.run.uri.endswith("key.r2")
    assert two.job.source.uri == f"{run.store.uri}/_quarantine"


def test_a_hub_that_is_away_keeps_no_retry_from_its_plan(tmp_path, monkeypatch, caplog):
    run = first_run(tmp_path)

    def away(*_: object) -> None:
        raise HubUnavailable("no answer")

    monkeypatch.setattr("prefect_raybatch.runs.plan_run.check_pinned_model", away)
    assert planned(run.store.uri).run.uri.endswith("key.r1")
    assert "the model is not checked: no answer" in caplog.text


def test_all_rows_of_a_retry_may_fail_unless_a_limit_is_set(tmp_path):
    run = first_run(tmp_path, limits={"max_failed_rows": 1})
    assert planned(run.store.uri).job.limits.allowed(4) == 4
    assert planned(run.store.uri, None, {"limits.max_failed_rows": 2}).job.limits.allowed(4) == 2


@pytest.mark.parametrize(("limit", "allowed"), [(1, 4), (2, 2)])
def test_of_a_job_file_the_changed_limit_on_failed_rows_applies(tmp_path, limit, allowed):
    """The run's own counts its failed rows already; another one is meant for the retry."""
    run = first_run(tmp_path, limits={"max_failed_rows": 1})
    job = make_job(limits={"max_failed_rows": limit, "hang_seconds": 9.0})
    limits = planned(run.store.uri, None, None, job).job.limits
    assert limits.allowed(4) == allowed and limits.hang_seconds == 9.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source.uri": "x"}, "source.uri cannot be set for a retry"),
        ({"output.uri": "x"}, "output.uri cannot be set"),
        ({"prompt.template": "{Compny}"}, "did you mean 'Company'"),
        ({"sampling.max_tokens": "many"}, "sampling.max_tokens"),
        ({"name.x": 1}, "name is not a group"),
        ({"output": 3}, "output: 3 must be a mapping"),
        ({"output": {"uri": "x"}}, "output cannot be set"),
    ],
)
def test_a_wrong_change_is_named_and_nothing_is_written(tmp_path, change, said):
    run = first_run(tmp_path)
    with pytest.raises(ConfigError, match=said):
        plan_retry(run.store.uri, None, change)
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def adopt(run: Path) -> None:
    """Makes _SUCCESS name the plan that is there."""
    plan = Plan.from_bytes((run / "_raybatch/plan.json").read_bytes())
    success = read_json(run / "_SUCCESS")
    (run / "_SUCCESS").write_text(json.dumps(success | {"plan": plan.hash}))


def test_a_plan_cannot_say_how_stores_are_reached(tmp_path):
    """Whoever can write a run directory must not get the keys of who retries it."""
    run = first_run(tmp_path)
    path = tmp_path / "key/_raybatch/plan.json"
    value = read_json(path)
    value["job"]["output"]["options"] = {"endpoint_url": "http://elsewhere"}
    value["job"]["engine"] = {"env": {"LD_PRELOAD": "x"}}
    path.write_text(json.dumps(value))
    adopt(tmp_path / "key")
    asked = retry_request(run.store.uri)
    assert isinstance(asked, RetryRequest)
    assert asked.job.output.options == asked.job.engine.env == {}


# --- crashes and races --------------------------------------------------------------------------


def test_after_a_crash_the_same_command_goes_on(tmp_path):
    run = first_run(tmp_path)
    change = {"source.rows_per_shard": 1}
    first = planned(run.store.uri, ["ValueError", "EngineDied"], change)
    work(first, first.job, most=1)
    again = planned(run.store.uri, ["EngineDied", "ValueError", "EngineDied"], change)
    assert again.run == first.run and plan_of(again.run.uri).shards == 3
    now = status(again.run.uri)
    assert (now.committed, now.pending) == (1, 2)
    work(again, again.job)
    finalize_run(again.job, again.run)
    assert numbers(again.run.uri) == [4, 7, 11] and chain(run.store.uri).ok


def test_another_selection_or_job_takes_only_what_is_free(tmp_path):
    run = first_run(tmp_path)
    first = planned(run.store.uri, ["ValueError"])
    other = planned(run.store.uri, ["ValueError", "EngineDied"])
    assert (first.run.run_key, other.run.run_key) == ("key.r1", "key.r2")
    assert taken(other.run.uri) == [4]
    with pytest.raises(ConfigError, match=r"key\.r1 is not finished"):
        plan_retry(run.store.uri, ["ValueError"], {"sampling.max_tokens": 99})
    found = chain(run.store.uri)
    assert not found.ok
    assert found.faults == [
        "key.r1: not finished: 1 of 1 shard is not committed",
        "key.r2: not finished: 1 of 1 shard is not committed",
    ]


def test_a_kill_before_the_plan_leaves_the_number_free(tmp_path, monkeypatch):
    run = first_run(tmp_path)

    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "create_plan", kill)
        with pytest.raises(KeyboardInterrupt):
            plan_retry(run.store.uri)
    assert (tmp_path / "key.r1").is_dir() and chain(run.store.uri).ok
    assert planned(run.store.uri).run.run_key == "key.r1"


def race(monkeypatch: pytest.MonkeyPatch, other: Callable[[], Any]) -> None:
    """Lets `other` happen right before the next plan is written."""
    create = Ledger.create_plan

    def late(self: Ledger, *arguments: Any) -> Plan:
        monkeypatch.setattr(Ledger, "create_plan", create)
        other()
        return create(self, *arguments)

    monkeypatch.setattr(Ledger, "create_plan", late)


def test_of_two_at_once_the_same_job_joins_and_another_runs_again(tmp_path, monkeypatch):
    run = first_run(tmp_path)
    race(monkeypatch, lambda: planned(run.store.uri))
    mine = planned(run.store.uri)
    assert mine.run.run_key == "key.r1" and taken(mine.run.uri) == [4, 7, 11, 18]
    assert not (tmp_path / "key.r2").exists()
    shutil.rmtree(tmp_path / "key.r1")
    race(monkeypatch, lambda: planned(run.store.uri, ["ValueError"]))
    with pytest.raises(PlanMismatch, match=r"began as key\.r1 at the same time\. Run this again"):
        plan_retry(run.store.uri)
    again = planned(run.store.uri)
    assert again.run.run_key == "key.r2" and taken(again.run.uri) == [4, 18]


def test_run_continues_a_child_by_its_key(tmp_path):
    run = first_run(tmp_path)
    made = planned(run.store.uri)
    same = plan_run(run.job, "key.r1")
    assert same == made.run
    other = run.job.model_copy(update={"name": "other"})
    with pytest.raises(PlanMismatch, match="name: 'nightly' -> 'other'"):
        plan_run(other, "key.r1")


def test_a_changed_quarantine_is_not_retried(tmp_path):
    run = first_run(tmp_path)
    path = tmp_path / "key/_quarantine/part-00000.parquet"
    pq.write_table(pq.read_table(path).slice(1), path)
    with pytest.raises(CorruptRun, match=r"part-00000\.parquet is not what finalize wrote"):
        plan_retry(run.store.uri)
    path.unlink()
    with pytest.raises(CorruptRun, match="is missing"):
        plan_retry(run.store.uri)


def test_reap_leaves_what_a_child_needs(tmp_path):
    run = first_run(tmp_path)
    made = planned(run.store.uri)
    (tmp_path / "key.r1/_raybatch/numbers-0000000000000000.parquet").write_bytes(b"of a loser")
    found = reap(open_store(made.run.uri), 0)
    assert found.files == {"tables": 1}
    work(made, made.job)
    finalize_run(made.job, made.run)
    reap(open_store(made.run.uri), 0)
    assert chain(run.store.uri).ok


# --- the chain ----------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """key -> r1 (fails 7 and 18 again) -> r2 (18 again); returns the output root."""
    run = first_run(tmp_path)
    one = retried(run.store.uri, failed={7: "ValueError", 18: "PromptTooLong"})
    retried(one, failed={18: "PromptTooLong"})
    return tmp_path


def edit(run: Path, name: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Rewrites a file of the result and makes _SUCCESS agree: only rows can show it."""
    pq.write_table(change(pq.read_table(run / name)), run / name)
    success = read_json(run / "_SUCCESS")
    (part,) = [p for p in success["parts"] if p["path"] == name]
    data = (run / name).read_bytes()
    part |= {"sha256": digest(data), "bytes": len(data)}
    (run / "_SUCCESS").write_text(json.dumps(success))


def test_a_whole_chain_is_proved_from_any_of_its_runs(whole):
    for key in ("key", "key.r1", "key.r2"):
        found = chain(whole / key)
        assert found.ok and found.faults == []
        assert [(x.run_key, x.parent, x.rows, x.data, x.retried) for x in found.runs] == [
            ("key", None, 20, 16, 4),
            ("key.r1", "key", 4, 2, 2),
            ("key.r2", "key.r1", 2, 1, 0),
        ]
    assert json.loads(json.dumps(found.to_dict()))["quarantined"] == 1


def test_a_child_that_is_gone_is_missed_by_its_own_child(whole):
    shutil.rmtree(whole / "key.r1")
    assert chain(whole / "key").faults == ["key.r2 retries rows of key.r1, which does not exist"]
    with pytest.raises(CorruptRun, match=r"retries rows of key\.r1, but .*key\.r1 does not exist"):
        chain(whole / "key.r2")
    with pytest.raises(CorruptRun, match=r"key.* does not exist"):
        plan_retry(str(whole / "key"))


def test_a_file_of_a_child_that_is_gone_is_named_with_its_rows(whole):
    (whole / "key.r1/data/part-00000.parquet").unlink()
    faults = "\n".join(chain(whole / "key").faults)
    assert "key.r1: data/part-00000.parquet: the file is missing" in faults
    assert "key.r1: rows 4 to 4 are missing" in faults
    assert "rows 11 to 11 are missing" in faults


def test_a_row_doubled_in_a_child_is_named(whole):
    name = "data/part-00000.parquet"
    edit(whole / "key.r1", name, lambda t: pa.concat_tables([t, t.slice(1)]))
    faults = chain(whole / "key").faults
    assert any(f.startswith(f"key.r1: {name}") and "11" in f for f in faults), faults


def test_a_row_of_another_run_in_a_childs_data_is_named(whole):
    def change(table: pa.Table) -> pa.Table:
        at = table.column_names.index("_row")
        return table.set_column(at, "_row", pa.array([4, 12], pa.int64()))

    edit(whole / "key.r1", "data/part-00000.parquet", change)
    faults = "\n".join(chain(whole / "key").faults)
    assert "row 12 is not one of the rows that this run retries" in faults
    assert "row 12 is in both key/data/part-00000.parquet and key.r1/data/" in faults


def plant(root: Path, key: str, parent: str, rows: list[int]) -> None:
    """A finished child with these rows, whatever its parent's quarantine holds."""
    job = make_job(output={"uri": str(root)})
    ledger = Ledger(open_store(str(root / key)))
    first = plan_of(root / "key")
    table = pa.table(
        {
            "id": pa.array(rows, pa.int64()),
            "Company": [f"Company {i}" for i in rows],
            "tags": pa.array([[f"t{i}"] for i in rows], pa.list_(pa.string())),
        }
    )
    from prefect_raybatch import source
    from prefect_raybatch.ledger.plan_tables import decode_schema

    found = source.snapshot_tables(lambda: iter([("here", table)]), ledger.store, "a")
    plan, tables = new_plan_of(
        Resolved.of(job, first.model, {"parent": parent, "errors": None}),
        key, found.files, decode_schema(first.input_schema), 9.0, snapshot=True,
        numbers=numbers_table(np.array(rows, np.int64)),
    )  # fmt: skip
    ledger.create_plan(plan, tables)
    work(run_of(ledger.store, plan, ledger), job)
    end(job, ledger.store.uri)


def test_a_row_taken_by_two_children_is_named_with_both(whole):
    plant(whole, "key.r3", "key", [4, 7])
    assert verify(open_store(str(whole / "key.r3"))).ok  # by itself it is a sound run
    faults = chain(whole / "key").faults
    assert "rows 4, 7 of key are retried by both key.r1 and key.r3" in faults
    assert any(
        f.startswith("row 4 is in both key.r1/data/") and "key.r3/data/" in f for f in faults
    )


def test_a_row_that_its_parent_had_not_failed_is_named(whole):
    plant(whole, "key.r3", "key.r2", [12, 18])
    faults = chain(whole / "key").faults
    assert "key.r3 retries rows 12 to 12, which are not in the quarantine of key.r2" in faults
    assert any("row 12 is in both key/data/" in f for f in faults)


def test_an_unreadable_plan_and_a_renamed_folder_are_told(whole):
    (whole / "key.r2/_raybatch/plan.json").write_bytes(b"{")
    (fault,) = chain(whole / "key").faults
    assert fault.startswith("key.r2: ") and "plan.json" in fault
    shutil.copytree(whole / "key", whole / "copy")
    with pytest.raises(CorruptRun, match="holds run 'key'"):
        chain(whole / "copy")


def test_folders_that_only_look_like_children_do_not_count(tmp_path):
    run = first_run(tmp_path)
    first_run(tmp_path, key="other")
    for name in ("key.r0", "key.r99999", "key.rx", "keyxr1", "key.r7.r1"):
        (tmp_path / name).mkdir()
    lone = tmp_path / "key.r2"  # a run of its own that somebody gave this key
    shutil.copytree(tmp_path / "key", lone)
    value = read_json(lone / "_raybatch/plan.json") | {"run_key": "key.r2"}
    (lone / "_raybatch/plan.json").write_text(json.dumps(value))
    adopt(lone)
    family = load_family(*locate_run(run.store.uri))
    assert list(family.members) == ["key"] and family.next_key == "key.r3" and not family.strays
    assert planned(run.store.uri).run.run_key == "key.r3"


# --- the command line ---------------------------------------------------------------------------


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command line here with a worker in the place of Ray; (status, stdout, stderr)."""
    fails: dict[int, str] = {}

    def infer_run(job: BatchJob, run: Any, observe: Any = None) -> None:
        work(run, job, fails)

    monkeypatch.setattr("prefect_raybatch.api.submission.infer_run", infer_run)

    def call(*arguments: object, failed: dict[int, str] | None = None) -> tuple[int, str, str]:
        fails.clear()
        fails.update(failed or {})
        return called(capsys, *arguments)

    return call


def test_the_whole_way_on_the_command_line(tmp_path, call):
    uri = first_run(tmp_path).store.uri
    code, out, err = call(
        "retry-failed", uri, "--error", "ValueError", "--no-prefect", failed={7: "Again"}
    )
    assert code == 0 and f"result  {uri}.r1/data/" in out and f"run {uri}.r1" in err
    assert "2 = 1 answered + 1 in quarantine + 0 left out" in out
    code, out, _ = call("retry-failed", uri, "--no-prefect", "--json")
    assert code == 0 and json.loads(out)["run_key"] == "key.r2"
    assert "failed rows of run key" in json.loads(out)["notes"][-1]
    code, out, err = call("retry-failed", uri, "--no-prefect")
    assert code == 2 and f"raybatch retry-failed {uri}.r1   (1 failed)" in err and out == ""
    code, out, _ = call("verify", uri, "--chain")
    assert code == 0
    assert "proved: 20 rows of 3 runs = 19 in data/ + 1 in quarantine + 0 left out" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["key", "20", "16", "4", "0", "4"] in lines and [
        "key.r1",
        "2",
        "1",
        "1",
        "0",
        "0",
    ] in lines
    code, out, _ = call("verify", f"{uri}.r1", "--chain", "--json")
    assert code == 0 and json.loads(out)["ok"] is True and len(json.loads(out)["runs"]) == 3
    code, out, _ = call("retry-failed", f"{uri}.r1", "--set", "sampling.max_tokens=9",
                        "--no-prefect")  # fmt: skip
    assert code == 0 and "key.r3/data/" in out
    for arguments in (["retry-failed", uri], ["retry-failed", uri, "--json"]):
        code, out, _ = call(*arguments)
        assert code == 0 and "none failed again" in out
    assert json.loads(out)["message"]
    for command in ("status", "verify"):
        assert call(command, f"{uri}.r2")[0] == 0


@pytest.mark.parametrize("by", ["job", "set"])
def test_a_run_with_an_undated_key_is_retried_with_its_date(tmp_path, call, by):
    uri = first_run(tmp_path).store.uri
    lines = {"uri": f"{tmp_path}/lines/{{run_date}}", "format": "jsonl", "name": "lines"}
    words: list[Any] = ["retry-failed", uri, "--no-prefect"]
    if by == "job":
        job = tmp_path / "job.yaml"
        output = {"uri": str(tmp_path), "publish": [lines]}
        job.write_text(yaml.safe_dump(job_dict(output=output)))
        words += ["--job", job]
    else:
        words += ["--set", f"output.publish={json.dumps([lines])}"]
    code, _, err = call(*words)
    assert code == 2 and "{run_date}" in err and "--run-date" in err
    code, _, err = call(*words, "--run-date", "yesterday")
    assert code == 2 and "yesterday" in err
    code, out, err = call(*words, "--run-date", "2026-07-01", failed={7: "Again"})
    assert code == 0, err
    assert [path.name for path in (tmp_path / "lines").iterdir()] == ["2026-07-01"]
    again = shlex.split(out.splitlines()[-1])
    assert again[:4] == ["next", "raybatch", "retry-failed", f"{uri}.r1"]
    assert again[-2:] == ["--run-date", "2026-07-01"]
    code, out, err = call(*again[2:], "--no-prefect")
    assert code == 0 and f"result  {uri}.r2/data/" in out, err


def test_what_is_wrong_is_said_before_prefect_starts(tmp_path, call, monkeypatch):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("nothing may start")

    monkeypatch.setattr("prefect_raybatch.cli.drive.run_flow", never)
    uri = first_run(tmp_path).store.uri
    first_run(tmp_path, failed={}, key="good")
    first_run(tmp_path, finish=False, key="half")
    code, out, _ = call("retry-failed", tmp_path / "good")
    assert code == 0 and "no row of good failed" in out and "nothing was started" in out
    code, _, err = call("retry-failed", tmp_path / "half")
    assert code == 2 and "Finish it first" in err
    code, _, err = call("retry-failed", tmp_path / "none")
    assert (
        code == 2 and "not a run directory" in err and "runs in the same folder: good, half" in err
    )
    code, _, err = call("retry-failed", uri, "--set", "source.limit=3")
    assert code == 2 and "source.limit cannot be set for a retry" in err
    code, _, err = call("retry-failed", uri, "--job", tmp_path / "no.yaml")
    assert code == 2 and "no such job file" in err
    for more in ([], ["--no-prefect"]):
        code, _, err = call("retry-failed", uri, "--error", "Nope", *more)
        assert code == 2 and "Its rows failed with: ValueError (2)" in err


def test_a_page_of_row_numbers_that_is_damaged_is_told_of_with_its_file(whole, call):
    path = whole / "key/data/part-00000.parquet"
    footer = pq.ParquetFile(path).metadata.row_group(0)
    (column,) = (c for c in map(footer.column, range(footer.num_columns)) if "_row" in str(c))
    data = bytearray(path.read_bytes())
    end = column.data_page_offset + column.total_compressed_size
    data[end - 12 : end] = bytes(12)
    path.write_bytes(data)
    assert any(
        "part-00000.parquet is not readable Parquet" in text for text in chain(whole / "key").faults
    )
    assert call("verify", whole / "key", "--chain")[0] == 1


def test_a_chain_that_is_not_proved_exits_with_1(whole, call):
    (whole / "key.r2/data/part-00000.parquet").unlink()
    code, out, _ = call("verify", whole / "key", "--chain")
    assert code == 1 and "not proved" in out and "key.r2: data/part-00000.parquet" in out
    code, out, _ = call("verify", whole / "key", "--chain", "--json")
    assert code == 1 and json.loads(out)["ok"] is False


def test_run_on_the_key_of_a_child_continues_and_returns_it(tmp_path, call):
    run = first_run(tmp_path)
    table = pa.table({"id": [0], "Company": ["x"], "tags": [["t"]]})
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data/in.parquet")
    value = job_dict(output={"uri": str(tmp_path)}, source={"uri": str(tmp_path / "data")})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(value))
    planned(run.store.uri)
    for word in ("key.r1/data/", "was complete before"):
        code, out, err = call("run", tmp_path / "job.yaml", "--run-key", "key.r1", "--no-prefect")
        assert code == 0 and word in out, err
    assert numbers(tmp_path / "key.r1") == [4, 7, 11, 18]


# --- through the stages, with Prefect, on S3 ----------------------------------------------------


def test_a_retry_through_the_stages(without_ray, tmp_path):
    run = first_run(tmp_path, {4: "EngineDied", FAILS: "ValueError", 18: "EngineDied"})
    one = planned(run.store.uri, None, {"source.rows_per_shard": 1})
    finalize_run(one.job, one.run, infer_run(one.job, one.run, engine=FakeEngine))
    assert numbers(one.run.uri, "quarantine") == [FAILS]  # the engine refuses it again
    data = pq.read_table(Path(one.run.uri, "data"))
    assert data["_row"].to_pylist() == data["id"].to_pylist() == [4, 18]
    assert data["response"].to_pylist() == ["answer 4", "answer 18"]
    assert chain(run.store.uri).ok


def test_on_s3_with_keys_from_the_command_alone(s3, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    local = first_run(tmp_path)
    store = open_store("s3://retry/out/key", s3.options)
    for path in sorted(p for p in (tmp_path / "key").rglob("*") if p.is_file()):
        store.put(os.fspath(path.relative_to(tmp_path / "key")), path.read_bytes())
    given = {f"output.options.{name}": value for name, value in s3.options.items()}
    one = planned(store.uri, ["ValueError"], given)
    assert one.job.output.options == s3.options
    kept = open_store(one.run.uri, s3.options).read("_raybatch/plan.json")
    assert s3.secret.encode() not in kept
    work(one, one.job, {7: "ValueError"})
    finalize_run(one.job, one.run)
    job = replace_output(local.job, s3.options)
    two = planned(one.run.uri, None, None, job)
    work(two, two.job)
    finalize_run(two.job, two.run)
    found = verify_chain(*locate_run(store.uri, s3.options))
    assert found.ok and (found.data, found.quarantined) == (18, 2)
    assert [link.run_key for link in found.runs] == ["key", "key.r1", "key.r2"]


def replace_output(job: BatchJob, options: dict[str, str]) -> BatchJob:
    return job.model_copy(update={"output": job.output.model_copy(update={"options": options})})


# --- what a run directory does not decide -------------------------------------------------------

TARGET = {"format": "parquet", "uri": "/tmp/planted", "name": "lake"}


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"output": {"publish": [TARGET]}}, r"output\.publish: lake: parquet /tmp/planted"),
        ({"cluster": {"job_server": "http://evil:8265"}}, r"cluster\.job_server: http://evil:8265"),
        ({"cluster": {"address": "evil:6379"}}, r"cluster\.address: evil:6379"),
        ({"cluster": {"kubernetes": {"image": "evil"}}}, r"cluster\.kubernetes: a cluster"),
        ({"cluster": {"block": "ray-cluster/evil"}}, r"cluster\.block: ray-cluster/evil"),
    ],
)
def test_targets_and_clusters_come_from_the_operator(
    tmp_path: Path, groups: dict[str, Any], words: str
) -> None:
    run = first_run(tmp_path, **groups)
    with pytest.raises(ConfigError, match=words) as caught:
        plan_retry(run.store.uri)
    assert "name the job with --job" in str(caught.value)
    assert not (tmp_path / "key.r1").exists()
    changes = {"output.publish": []} if "output" in groups else {"cluster": {}}
    told = plan_retry(run.store.uri, None, changes)
    assert isinstance(told, Retry) and told.job.output.publish == []
    assert told.job.cluster.access.job_server is None and told.job.cluster.address is None


EVIL, MINE = ({"url": f"http://{host}:1/v1", "model": "m"} for host in ("evil", "mine"))
ESCALATE = {"to": {"endpoint": EVIL}, "when": {"logprob_below": -1}}
BLOCK = {**EVIL, "block": "hosted-model/evil"}


@pytest.mark.parametrize(
    ("groups", "field", "value"),
    [
        ({"engine": {"endpoint": EVIL}}, "engine.endpoint.url", "http://evil:1/"),
        ({"engine": {"endpoint": BLOCK}}, "engine.endpoint.block", BLOCK["block"]),
        ({"output": {"escalate": ESCALATE}}, "output.escalate.to.endpoint.url", "http://evil:1/"),
    ],
)
def test_servers_of_hosted_models_come_from_the_operator(
    tmp_path: Path, groups: dict[str, Any], field: str, value: str
) -> None:
    run = first_run(tmp_path, **groups)
    with pytest.raises(ConfigError, match=f"{re.escape(field)}: {value}") as caught:
        retry_request(run.store.uri)
    assert "name the job with --job" in str(caught.value)
    assert options_of_retry(run.plan) == ["--job", "JOB"]
    changes = {field.rpartition(".")[0]: MINE}
    assert isinstance(retry_request(run.store.uri, None, changes), RetryRequest)


def test_a_retry_takes_the_targets_of_the_job_that_is_given(tmp_path: Path) -> None:
    run = first_run(tmp_path, output={"publish": [TARGET]})
    mine = {**TARGET, "uri": str(tmp_path / "mine")}
    job = BatchJob.from_dict({**run.job.to_dict(), "output": {"uri": "-", "publish": [mine]}})
    made = plan_retry(run.store.uri, job=job)
    assert isinstance(made, Retry)
    assert [target.uri for target in made.job.output.publish] == [mine["uri"]]


def test_the_targets_of_a_plan_that_a_person_looked_at(tmp_path: Path) -> None:
    target = {**TARGET, "uri": str(tmp_path / "lake")}
    run = first_run(tmp_path, output={"publish": [target]})
    seen = planned_targets(run.store.uri, {})
    made = plan_retry(run.store.uri, None, {"output.publish": seen})
    assert isinstance(made, Retry)
    assert [one.uri for one in made.job.output.publish] == [target["uri"]]


def test_a_retry_that_was_killed_before_it_was_published_is_published(tmp_path: Path) -> None:
    """`_SUCCESS` is written before the targets get the rows, so a kill or a target that refuses
    leaves a finished retry whose rows nobody has published."""
    target = {**TARGET, "uri": str(tmp_path / "lake")}
    run = first_run(tmp_path, output={"publish": [target]})
    job = run.job
    made = planned(run.store.uri, job=job)
    work(made, made.job)
    finalize_run(made.job, made.run)
    again = planned(run.store.uri, job=job)
    assert again.run.uri == made.run.uri and again.run.finished
    # Where nobody names the targets again, or names another job, they are told of.
    with pytest.raises(ConfigError, match="name the job with --job"):
        plan_retry(run.store.uri)
    other = BatchJob.from_dict(with_tokens(job, 9))
    with pytest.raises(ConfigError, match=r"raybatch publish .*key\.r1 --job JOB"):
        plan_retry(run.store.uri, job=other)
    publish_run(again.job, again.run.uri)
    for asked in (job, other, None):
        assert isinstance(plan_retry(run.store.uri, job=asked), NothingToRetry)


def test_a_retry_that_was_begun_without_targets_is_not_missed(tmp_path: Path) -> None:
    target = {**TARGET, "uri": str(tmp_path / "lake")}
    run = first_run(tmp_path, output={"publish": [target]})
    made = planned(run.store.uri, None, {"output.publish": []})
    work(made, made.job)
    finalize_run(made.job, made.run)
    assert isinstance(plan_retry(run.store.uri), NothingToRetry)


def with_tokens(job: BatchJob, most: int) -> dict[str, Any]:
    value = job.to_dict()
    return {**value, "sampling": {**value.get("sampling", {}), "max_tokens": most}}


def repaired(uri: str, job: BatchJob, shard: int, failed: dict[int, str]) -> str:
    """Repair a run that lost the commit of `shard`, and finish its fork; return its directory."""
    Path(uri, commit_path(shard)).unlink()
    done = repair_run(uri)
    assert done.lost == (shard,)
    fork = Ledger(open_store(str(Path(uri).parent / str(done.run_key))))
    commit(fork, job, shard, input_rows(5 * shard, 5), failed)
    end(job, fork.store.uri)
    return fork.store.uri


def test_a_retry_of_a_repaired_run_takes_no_row_that_a_retry_of_the_damaged_run_took(
    tmp_path: Path,
) -> None:
    run = first_run(tmp_path)
    retried(run.store.uri, errors=["ValueError"])  # rows 7 and 11
    fork = repaired(run.store.uri, run.job, 0, {3: "EngineDied"})  # row 4 is answered this time
    assert repair_run(run.store.uri).retries == ("key.r1",)
    assert taken(retried(fork)) == [3, 18]
    again = plan_retry(fork)
    assert isinstance(again, NothingToRetry) and "key.m1.r1" in again.message


def test_the_command_names_the_retries_of_a_repaired_run(tmp_path: Path, capsys: Any) -> None:
    run = first_run(tmp_path)
    retried(run.store.uri)
    Path(run.store.uri, commit_path(0)).unlink()
    said = " ".join(called(capsys, "repair", run.store.uri)[1].split())
    assert "key.r1 retried failed rows. A retry of key.m1 leaves these rows out." in said


def test_rows_that_failed_again_before_the_repair_are_retried_where_they_are(
    tmp_path: Path,
) -> None:
    run = first_run(tmp_path)
    child = retried(run.store.uri, failed={7: "ValueError"})
    fork = repaired(run.store.uri, run.job, 0, {4: "EngineDied"})
    with pytest.raises(ConfigError, match=r"retried by key\.r1, and some failed again"):
        plan_retry(fork)
    retried(child)
    assert isinstance(plan_retry(fork), NothingToRetry)
    other = repaired(fork, run.job, 1, {7: "ValueError"})  # the second repair
    assert isinstance(plan_retry(other), NothingToRetry)


@pytest.mark.parametrize("damage", ["removed", "plan", "success"])
def test_rows_that_a_retry_took_are_known_without_the_damaged_run(
    tmp_path: Path, damage: str
) -> None:
    run = first_run(tmp_path)
    retried(run.store.uri, errors=["ValueError"])  # rows 7 and 11
    fork = repaired(run.store.uri, run.job, 0, {3: "EngineDied"})
    if damage == "removed":
        shutil.rmtree(run.store.uri)
    else:
        Path(run.store.uri, {"plan": PLAN, "success": SUCCESS}[damage]).write_text("{")
    assert taken(retried(fork)) == [3, 18]


@pytest.mark.parametrize("damage", ["removed", "plan", "success", "renamed"])
def test_rows_that_a_retry_took_are_known_without_the_repaired_run_between(
    tmp_path: Path, damage: str
) -> None:
    run = first_run(tmp_path)
    retried(run.store.uri, errors=["ValueError"])  # rows 7 and 11
    between = repaired(run.store.uri, run.job, 0, {3: "EngineDied"})
    fork = repaired(between, run.job, 0, {3: "EngineDied"})
    if damage == "removed":
        shutil.rmtree(between)
    elif damage == "renamed":
        shutil.copy(Path(run.store.uri, PLAN), Path(between, PLAN))
    else:
        Path(between, {"plan": PLAN, "success": SUCCESS}[damage]).write_text("{")
    assert taken(retried(fork)) == [3, 18]
    assert {link.run_key for link in chain(fork).runs} == {"key.m2", "key.m2.r1", "key.r1"}


def test_a_run_whose_key_looks_like_a_repair_leaves_out_no_rows_of_another_run(
    tmp_path: Path,
) -> None:
    retried(first_run(tmp_path, created="2026-01-01T00:00:00+00:00").store.uri)
    run = first_run(tmp_path, key="key.m2")
    fork = repaired(run.store.uri, run.job, 0, {4: "EngineDied"})
    shutil.rmtree(run.store.uri)
    assert fork.endswith("key.m3") and taken(retried(fork)) == [4, 7, 11, 18]


def test_a_retry_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = first_run(tmp_path)
    child = retried(run.store.uri, errors=["ValueError"])
    fork = repaired(run.store.uri, run.job, 0, {3: "EngineDied"})
    shutil.rmtree(run.store.uri)
    Path(child, PLAN).write_text("{")
    with pytest.raises(CorruptRun, match=rf"key\.r1: plan\.json[^\n]*\n.* in {tmp_path}\Z"):
        plan_retry(fork)


def test_a_run_that_a_repaired_run_continues_gets_no_new_retry(tmp_path: Path) -> None:
    run = first_run(tmp_path)
    begun = planned(run.store.uri, ["ValueError"])
    repaired(run.store.uri, run.job, 0, {4: "EngineDied"})
    with pytest.raises(ConfigError, match=r"key\.m1 continues it[^\n]*\n  raybatch .*key\.m1"):
        plan_retry(run.store.uri)
    assert planned(run.store.uri, ["ValueError"]).run == begun.run


def test_the_chain_and_the_state_of_a_repaired_run_know_the_retries_of_the_damaged_run(
    tmp_path: Path,
) -> None:
    run = first_run(tmp_path)
    child = retried(run.store.uri, failed={7: "ValueError"})
    retried(child, failed={7: "ValueError"})
    fork = repaired(run.store.uri, run.job, 0, {3: "EngineDied"})  # row 4 is answered this time
    assert not status(fork).retried_by and not chain(fork).faults
    assert taken(retried(fork)) == [3]
    state, found = status(fork), chain(fork)
    assert (state.retried_by, state.failed_again) == (("key.m1.r1", "key.r1"), 1)
    assert found.ok and (found.data, found.quarantined) == (19, 1)
    rows = {link.run_key: (link.rows, link.data, link.retried) for link in found.runs}
    assert rows == {
        "key.m1": (20, 16, 4),
        "key.m1.r1": (1, 1, 0),
        "key.r1": (3, 2, 1),
        "key.r2": (1, 0, 0),
    }


def test_the_history_credits_a_repaired_run_with_the_retries_of_the_damaged_run(
    tmp_path: Path,
) -> None:
    run = first_run(tmp_path)
    child = retried(run.store.uri, failed={7: "ValueError", 11: "ValueError"})
    retried(child, failed={7: "ValueError"})
    fork = repaired(run.store.uri, run.job, 0, {3: "EngineDied"})  # row 4 is answered this time

    def counts() -> dict[str, tuple[int | None, int | None]]:
        (page,) = history_of(str(tmp_path))
        return {line.run_key: (line.good, line.quarantined) for line in page.runs}

    assert counts() == {"key": (19, 1), "key.m1": (18, 2)}  # rows 3 and 7 are left
    retried(fork)
    assert counts()["key.m1"] == (19, 1)
    shutil.rmtree(run.store.uri)
    assert counts() == {"key.m1": (19, 1)}


@pytest.mark.parametrize("compact", [True, False])
def test_the_state_of_a_repaired_run_needs_no_file_of_answers(
    tmp_path: Path, compact: bool
) -> None:
    run = first_run(tmp_path, output={"compact": compact})
    child = retried(run.store.uri)
    fork = repaired(run.store.uri, run.job, 0, {4: "EngineDied"})
    for uri in (fork, child):
        shutil.rmtree(Path(uri, "data" if compact else PIECES))
    assert status(fork).retried_by == ("key.r1",)


@pytest.mark.parametrize(
    ("damage", "failed"),
    [
        ("unfinished", {}),
        ("unfinished", {3: "EngineDied"}),
        ("no answers", {3: "EngineDied"}),
        ("plan", {}),  # the rows that it took are unknown
    ],
)
def test_a_chain_needs_no_retry_whose_rows_a_repaired_run_answered(
    tmp_path: Path, damage: str, failed: dict[int, str]
) -> None:
    run = first_run(tmp_path, failed={4: "ValueError"})
    child = planned(run.store.uri)
    if damage != "unfinished":
        work(child, child.job)
        finalize_run(child.job, child.run)
        if damage == "plan":
            Path(child.run.uri, PLAN).write_text("{")
        else:
            shutil.rmtree(Path(child.run.uri, "data"))
    found = chain(repaired(run.store.uri, run.job, 0, failed))
    assert not found.faults and [link.run_key for link in found.runs] == ["key.m1"]
    assert found.quarantined == len(failed)


def test_a_chain_needs_a_retry_that_took_rows_which_failed_in_the_repaired_run(
    tmp_path: Path,
) -> None:
    run = first_run(tmp_path)
    child = retried(run.store.uri)
    fork = repaired(run.store.uri, run.job, 0, {4: "EngineDied"})
    Path(child, PLAN).write_text("{")
    assert any("key.r1: plan.json" in fault for fault in chain(fork).faults)


def test_only_rows_that_failed_in_the_repaired_run_have_to_be_retried_again(
    tmp_path: Path,
) -> None:
    run = first_run(tmp_path, failed={4: "ValueError", 7: "ValueError"})
    child = retried(run.store.uri, failed={4: "ValueError"})
    other = repaired(run.store.uri, run.job, 0, {})  # row 4 is answered this time
    assert isinstance(plan_retry(other), NothingToRetry)
    planned(child)
    assert isinstance(plan_retry(other), NothingToRetry)  # the retry of row 4 may stay unfinished


def test_a_row_that_only_a_retry_of_a_retry_answered_is_answered_for_the_repaired_run(
    tmp_path: Path,
) -> None:
    again = {4: "ValueError", 7: "EngineDied"}
    run = first_run(tmp_path, failed=again)
    child = retried(run.store.uri, failed=again)
    fork = repaired(run.store.uri, run.job, 0, {})
    with pytest.raises(ConfigError, match=r"key\.r1 .*\(1 failed\)"):
        plan_retry(fork)
    retried(child, errors=["EngineDied"])
    assert isinstance(plan_retry(fork), NothingToRetry)
