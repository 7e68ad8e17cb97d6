"""What `raybatch plan --run-key` says that `raybatch run` would do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command_line import called
from helpers.nights import Killed, Nights
from helpers.openai_server import openai_server

from prefect_raybatch.api import infer_run, next_step, plan_run
from prefect_raybatch.cluster.pipeline import Pipeline
from prefect_raybatch.driver.heartbeat import ENDED, INFERRING, Heartbeat
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.increments import requests_ledger
from prefect_raybatch.ledger.last_attempt import LastAttempt
from prefect_raybatch.ledger.layout import heartbeat_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.record_files import put_record
from prefect_raybatch.report.run_history import history_markdown
from prefect_raybatch.runs.drain import drain_run
from prefect_raybatch.runs.next_step import NextStep
from prefect_raybatch.runs.run_history import history_of
from prefect_raybatch.runs.status import state_of
from prefect_raybatch.storage import open_store

WORDS = [f"text {n}" for n in range(10)]  # three shards of four rows
PRICED = {"price_per_gpu_hour": 2.0}


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    made = Nights(tmp_path)
    made.write(*WORDS)
    return made


def plain(nights: Nights, **groups: Any) -> BatchJob:
    return nights.job(**{"reuse": None, **groups})


def cascade(nights: Nights) -> BatchJob:
    rule = {"to": {"model": "demo"}, "when": {"logprob_below": -0.5}}
    output = {"uri": str(nights.folder / "out"), "escalate": rule}
    return plain(nights, output=output, sampling={"max_tokens": 5})


def killed(nights: Nights, job: BatchJob, after: int) -> None:
    nights.stop_after = after
    with pytest.raises(Killed):
        nights.night("n1", job)
    nights.stop_after = None


def step_of(job: BatchJob) -> NextStep:
    step = next_step(job, "n1")
    assert step is not None
    return step


def beating(ledger: Ledger, phase: str = INFERRING) -> None:
    """Write a heartbeat of now for each attempt."""
    for name in ledger.attempts():
        put_record(ledger.store, heartbeat_path(name), Heartbeat(time.time(), phase).to_bytes())


def test_a_new_key_begins_a_run(nights: Nights) -> None:
    step = step_of(plain(nights))
    assert (step.action, step.lines) == ("begin", ("begins a new run",))
    assert next_step(plain(nights)) is None
    assert not (nights.folder / "out").exists()


def test_an_unfinished_run_is_resumed_and_the_shards_left_are_counted(nights: Nights) -> None:
    job = plain(nights)
    plan_run(job, "n1")
    assert step_of(job).lines == ("resumes 3 of 3 shards",)
    killed(nights, job, 1)
    step = step_of(job)
    assert (step.action, step.rows_left) == ("resume", 6)
    assert step.lines[0] == "resumes 2 of 3 shards"
    assert next_step(job) == step, "run resumes it without a key too"


def test_a_run_with_all_shards_committed_is_only_finished(nights: Nights) -> None:
    job = plain(nights)
    nights.infer(job, plan_run(job, "n1"))
    step = step_of(job)
    assert step.action == "finish" and "all shards are committed" in step.lines[0]


def test_both_models_of_a_cascade_are_counted(nights: Nights) -> None:
    job = cascade(nights)
    plan_run(job, "n1")
    both = "resumes 3 of 3 shards of the first model and 3 of 3 shards of the larger model"
    assert step_of(job).lines == (both,)
    killed(nights, job, 2)
    assert "1 of 3 shards of the first model and 3 of 3" in step_of(job).lines[0]
    killed(nights, job, 2)
    told = "resumes 2 of 3 shards of the larger model; the first model has answered all rows"
    assert step_of(job).lines[0] == told


def test_a_driver_that_is_at_the_larger_model_has_the_first_one_behind_it(
    nights: Nights, capsys: pytest.CaptureFixture[str]
) -> None:
    job = cascade(nights)
    killed(nights, job, 3)
    run = str(nights.folder / "out/n1")
    beating(Ledger(open_store(run)))
    told = "3 of 3 shards of the first model and 0 of 3 shards of the larger model are committed"
    assert told in step_of(job).lines[0]
    _, out, _ = called(capsys, "status", run)
    top, first, larger = re.split("first model of the cascade|larger model, which", out)
    assert state_of(run) == "unfinished" and "rows" not in top
    assert "10 of 10 (100%)" in first and "0 of 10 (0%)" in larger and "driver" in larger


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_complete_run_has_no_cost(
    nights: Nights, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    job = plain(nights, cluster=PRICED)
    nights.night("n1", job)
    (nights.folder / "in.parquet").unlink()  # a run would not read it again
    path = nights.folder / "job.yaml"
    path.write_text(yaml.safe_dump(job.to_dict()))
    before = sorted(nights.folder.rglob("*"))
    code, out, err = called(capsys, "plan", path, "--run-key", "n1", *words)
    assert code == 0 and not err and sorted(nights.folder.rglob("*")) == before
    if words:
        assert json.loads(out)["next"]["action"] == "nothing"
    else:
        assert "infers nothing: the run is complete since" in " ".join(out.split())
    assert "cost" not in out and "raybatch run job" not in out


def test_another_job_is_refused_and_the_difference_is_named(
    nights: Nights, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_run(plain(nights), "n1")
    job = plain(nights, prompt={"template": "Tell {text}"})
    path = nights.folder / "job.yaml"
    path.write_text(yaml.safe_dump(job.to_dict()))
    code, out, _ = called(capsys, "plan", path, "--run-key", "n1")
    assert code == 2
    assert "prompt.template: 'Say {text}' -> 'Tell {text}'" in " ".join(out.split())
    code, _, err = called(capsys, "run", path, "--run-key", "n1")
    assert code == 2 and "prompt.template" in err


@pytest.mark.parametrize("make", [plain, cascade])
def test_a_live_driver_is_named_and_a_drain_is_told(nights: Nights, make: Any) -> None:
    job = make(nights)
    killed(nights, job, 1)
    store = open_store(str(nights.folder / "out/n1"))
    ledger = requests_ledger(store) if make is cascade else Ledger(store)
    beating(ledger)
    step = step_of(job)
    assert step.action == "wait" and "beside the one at work (host" in step.lines[0]
    assert "a second driver is safe, but repeats work" in step.lines[1]
    drain_run(str(nights.folder / "out/n1"))
    assert "asked it to finish the shards in flight and stop" in step_of(job).lines[1]
    beating(ledger, ENDED)
    step = step_of(job)
    assert step.action == "resume" and "was drained by" in step.lines[-1]
    assert "2 of 3 shards" in step.lines[0]


def test_a_job_is_checked_also_while_a_driver_is_at_work(
    nights: Nights, capsys: pytest.CaptureFixture[str]
) -> None:
    job = plain(nights)
    killed(nights, job, 1)
    beating(Ledger(open_store(str(nights.folder / "out/n1"))))
    path, gone = nights.folder / "job.yaml", nights.folder / "gone.csv"
    path.write_text(yaml.safe_dump(job.to_dict()))
    code, out, _ = called(capsys, "plan", path)
    assert code == 0 and "a second driver is safe" in out and "raybatch run job" not in out
    told = json.loads(called(capsys, "plan", path, "--json")[1])
    assert told["next"]["action"] == "wait" and 0 < told["next"]["rows_left"] < told["rows"]
    code, out, err = called(capsys, "plan", path, "--set", f"quality.golden={gone}")
    assert code == 2 and "quality.golden" in err and "beside the one at work" in out


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("in.parquet", 2, "Run n1 reads its rows there: restore the input"),
        ("in.csv", 0, "The run has its own copy of the input, so it does not need it"),
    ],
)
def test_an_input_that_is_gone_is_told_with_what_it_means(
    nights: Nights, capsys: pytest.CaptureFixture[str], name: str, code: int, message: str
) -> None:
    uri = nights.folder / name
    if name == "in.csv":
        uri.write_text("text\n" + "\n".join(WORDS))
    job = plain(nights, source={"uri": str(uri), "rows_per_shard": 4})
    killed(nights, job, 1)
    uri.unlink()
    path = nights.folder / "job.yaml"
    path.write_text(yaml.safe_dump(job.to_dict()))
    ended, out, err = called(capsys, "plan", path, "--run-key", "n1")
    text = " ".join(f"{out} {err}".split())
    assert ended == code and "resumes 2 of 3 shards" in text
    assert message in text and f"no file or folder '{name}'" in text


def test_a_run_that_reached_its_cost_limit_is_refused(nights: Nights) -> None:
    job = plain(nights, cluster=PRICED, limits={"max_cost": 1.0, "max_failed_fraction": 1.0})
    killed(nights, job, 1)
    assert step_of(job).action == "resume"
    ledger = Ledger(open_store(str(nights.folder / "out/n1")))
    (name,) = ledger.attempts()
    beat = Heartbeat(time.time(), ENDED, gpu_seconds=1800.0, cost=1.0)
    put_record(ledger.store, heartbeat_path(name), beat.to_bytes())
    step = step_of(job)
    assert step.action == "refuse"
    assert "limits.max_cost allows 1.00. 1 of 3 shards is committed" in step.lines[0]
    job = plain(nights, cluster=PRICED, limits={"max_cost": 2.0, "max_failed_fraction": 1.0})
    assert step_of(job).action == "resume"


def ended_process() -> int:
    """Return the id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


@pytest.mark.parametrize(
    ("changes", "died"),
    [
        ({"pid": ended_process}, True),
        ({"started": lambda: "2020-01-01T00:00:00+00:00"}, True),  # another process has its id
        ({}, False),
        ({"pid": ended_process, "host": lambda: "elsewhere"}, False),
        ({"pid": ended_process, "pid_namespace": lambda: "pid:[1]"}, False),
    ],
)
def test_a_driver_that_was_killed_a_moment_ago_is_not_waited_for(
    nights: Nights, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], died: bool
) -> None:
    job = plain(nights)
    killed(nights, job, 1)
    ledger = Ledger(open_store(str(nights.folder / "out/n1")))
    # A process that is killed records no end.
    again = "raybatch run job.yaml --run-key n1"
    begun = LastAttempt("n1", job.name, "inference", time.time(), "me@here", 1, command=again)
    begun.put(ledger.store)
    (name,) = ledger.attempts()
    values = {field: value() for field, value in changes.items()}
    ledger.note_attempt(name, {**ledger.read_attempt(name), **values})
    beating(ledger)
    step = step_of(job)
    assert step.action == ("resume" if died else "wait")
    assert any("the driver died (host" in line for line in step.lines) is died
    (page,) = history_of(job.output.uri)
    left = f"n1: unfinished, and no driver is heard; continue with: `{again}`"
    assert (left in history_markdown(page, plots=False)) is died
    _, out, _ = called(capsys, "status", nights.folder / "out/n1")
    assert ("died after its heartbeat" in " ".join(out.split())) is died
    assert (f"Continue with: {again}\n" in out) is died
    assert bool(drain_run(str(nights.folder / "out/n1")).live) is not died


def test_the_reason_of_the_last_failure_is_told(nights: Nights) -> None:
    job = plain(nights, limits={"max_failed_rows": 0})
    nights.refuses = lambda prompt: "text 1" in prompt
    with pytest.raises(Exception, match="limits"):
        nights.night("n1", job)
    told = step_of(job).lines
    assert told[0] == "resumes 3 of 3 shards"
    assert any("the last attempt stopped" in line for line in told), told


def test_a_resumed_run_costs_what_is_left(
    nights: Nights,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    without_ray: None,
) -> None:
    usual = Pipeline.__call__

    def one(self: Pipeline, units: Any, isolated: bool) -> Iterator[Any]:
        yield next(iter(usual(self, units, isolated)))
        raise Killed

    monkeypatch.setattr(Pipeline, "__call__", one)
    with openai_server() as server:
        prices = {"price_in": 100.0, "price_out": 200.0}
        job = plain(nights, engine={"endpoint": {"url": server.url, "model": "large", **prices}})
        path = nights.folder / "job.yaml"
        path.write_text(yaml.safe_dump(job.to_dict()))
        run = plan_run(job, "n1")
        _, out, _ = called(capsys, "plan", path, "--run-key", "n1")
        assert "for 10 rows" in " ".join(out.split())
        with pytest.raises(Killed):
            infer_run(job, run)
        _, out, _ = called(capsys, "plan", path, "--run-key", "n1")
    assert "resumes 2 of 3 shards" in " ".join(out.split())
    assert "for 6 rows" in " ".join(out.split())
