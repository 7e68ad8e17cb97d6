"""Attempts that fail, also before there is a plan: recorded, listed and shown as what they are."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command_line import called
from helpers.nights import Killed, Nights
from s3server import S3Server

from prefect_raybatch.api import default_run_key, next_step, plan_run, recorded_attempt
from prefect_raybatch.cli.commands import main
from prefect_raybatch.errors import (
    ConfigError,
    ErrorBudgetExceeded,
    NoSuchRun,
    PlanMismatch,
    RunDrained,
    SourceError,
    first_step,
)
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.last_attempt import LastAttempt, read_last_attempt
from prefect_raybatch.ledger.layout import LAST_ATTEMPT, PLAN, SUCCESS
from prefect_raybatch.report.html import history_html
from prefect_raybatch.report.records import put_report
from prefect_raybatch.report.run_history import headlines, history_markdown
from prefect_raybatch.runs.listing import latest_complete, list_runs
from prefect_raybatch.runs.prune import prune_runs
from prefect_raybatch.runs.run_history import history_of
from prefect_raybatch.runs.status import status
from prefect_raybatch.runs.typed import typed_command, without_secrets
from prefect_raybatch.storage import open_store


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def failed_plan(nights: Nights, key: str) -> None:
    """An attempt whose input is not there."""
    source = nights.folder / "in.parquet"
    source.rename(nights.folder / "away")
    with pytest.raises(SourceError):
        plan_run(nights.job(), key)
    (nights.folder / "away").rename(source)


def test_a_night_that_fails_while_planning_is_listed_with_the_reason(nights, capsys):
    nights.write("a", "b")
    nights.night("n1")
    failed_plan(nights, "n2")
    out = nights.folder / "out"
    assert sorted(str(path.relative_to(out)) for path in (out / "n2").rglob("*.*")) == [
        f"n2/{LAST_ATTEMPT}"
    ]
    line = list_runs(str(out))[0]
    assert (line.run_key, line.state, line.job, line.has_plan) == ("n2", "failed", "nightly", False)
    assert line.failure.startswith("planning: SourceError: ") and "in.parquet" in line.failure
    (page,) = history_of(str(out))
    assert [night.run_key for night in page.runs] == ["n2", "n1"]
    headline, before = headlines(page)
    assert headline.startswith("n2 failed: planning: SourceError: ")
    assert before.startswith("Last complete run, n1: ")
    text = history_markdown(page)
    assert "| failed | - |" in text and "## Runs to continue\n\n- n2: planning: SourceError" in text
    assert "planning: SourceError" in history_html([page])
    for command in ("runs", "history"):
        with pytest.raises(SystemExit):
            main([command, str(out)])
        printed = " ".join(capsys.readouterr().out.split())
        assert "n2" in printed and "planning: SourceError" in printed


def test_it_counts_as_a_run_for_nobody_and_is_resumed_under_its_key(nights):
    nights.write("a", "b")
    nights.night("n1")
    failed_plan(nights, "n2")
    out = str(nights.folder / "out")
    assert latest_complete(out).run_key == "n1"
    with pytest.raises(
        NoSuchRun, match=r"no plan \(planning: SourceError: .*\)\. Fix the cause, then run the"
    ):
        status(f"{out}/n2")
    assert default_run_key(nights.job()) not in ("n1", "n2")
    nights.asked.clear()
    report = nights.night("n3")  # reuse: latest takes the answers of n1
    assert report.good == 2 and not nights.asked
    assert nights.night("n2").good == 2
    assert {line.state for line in list_runs(out)} == {"completed"}
    (page,) = history_of(out)
    assert "failed" not in history_markdown(page)


def test_a_run_that_failed_over_its_budget_is_failed_and_not_planned(nights):
    nights.write("a", "b", "c", "d", "e")
    nights.refuses = lambda prompt: True
    job = nights.job(limits={"max_failed_rows": 1}, reuse=None)
    with pytest.raises(ErrorBudgetExceeded):
        nights.night("n1", job)
    out = str(nights.folder / "out")
    (line,) = list_runs(out)
    assert (line.state, line.committed, line.has_plan) == ("failed", 0, True)
    assert line.failure.startswith("inference: ErrorBudgetExceeded: ")
    (page,) = history_of(out)
    text = history_markdown(page)
    assert "| failed, 0% of shards committed |" in text and "planned" not in text
    nights.refuses = lambda prompt: False
    report = nights.night("n1", job)
    assert report.good == 5 and list_runs(out)[0].state == "completed"


def test_an_attempt_that_works_or_was_killed_or_drained_has_not_failed(nights):
    nights.write("a", "b", "c", "d", "e")
    nights.stop_after = 1
    with pytest.raises(Killed):
        nights.night("n1", nights.job(reuse=None))
    store = open_store(str(nights.folder / "out/n1"))
    there = read_last_attempt(store)
    assert there is not None
    LastAttempt("n1", "nightly", "inference", time.time(), "me@here", 1).put(store)
    (line,) = list_runs(str(nights.folder / "out"))
    assert line.state == "unfinished" and not line.failure
    for error in (RunDrained("drained"), KeyboardInterrupt()):
        with (
            pytest.raises(type(error)),
            recorded_attempt(store, nights.job(), "n1", "inference"),
        ):
            raise error
        assert list_runs(str(nights.folder / "out"))[0].state == "unfinished"
    assert read_last_attempt(store).outcome == "stopped"


def test_the_end_of_an_earlier_attempt_says_nothing_of_a_later_one(tmp_path):
    store, job = open_store(str(tmp_path / "out/n1")), Nights(tmp_path).job()
    with (
        pytest.raises(ValueError, match="late"),
        recorded_attempt(store, job, "n1", "planning"),
    ):
        LastAttempt("n1", "nightly", "planning", time.time() + 5, "me@elsewhere", 1).put(store)
        raise ValueError("late")
    assert read_last_attempt(store).by == "me@elsewhere"
    assert read_last_attempt(store).outcome == ""


def test_another_job_under_the_key_marks_no_run_as_failed(nights):
    nights.write("a", "b")
    plan_run(nights.job(reuse=None), "n1")
    other = nights.job(name="other", prompt={"template": "Other {text}"}, reuse=None)
    with pytest.raises(PlanMismatch):
        plan_run(other, "n1")
    (line,) = list_runs(str(nights.folder / "out"))
    assert (line.job, line.state) == ("nightly", "planned")
    with pytest.raises(PlanMismatch):
        plan_run(nights.job(prompt={"template": "Else {text}"}, reuse=None), "n1")
    (line,) = list_runs(str(nights.folder / "out"))
    assert line.state == "failed" and "PlanMismatch" in line.failure


def test_a_complete_run_keeps_no_record_of_a_later_mistake(nights):
    nights.write("a", "b")
    job = nights.job(reuse=None)
    nights.night("n1", job)
    folder = nights.folder / "out/n1"
    before = (folder / LAST_ATTEMPT).read_bytes()
    with pytest.raises(PlanMismatch):
        plan_run(nights.job(prompt={"template": "Else {text}"}, reuse=None), "n1")
    nights.night("n1", job)
    assert (folder / LAST_ATTEMPT).read_bytes() == before and (folder / SUCCESS).exists()


def test_prune_counts_no_failed_attempt_and_removes_old_records_alone(nights):
    nights.write("a", "b")
    job = nights.job(reuse=None)
    failed_plan(nights, "f1")
    failed_plan(nights, "f2")
    (nights.folder / "out/f2/_raybatch/input").mkdir()
    (nights.folder / "out/f2/_raybatch/input/part.parquet").write_bytes(b"copied")
    for key in ("n1", "n2"):
        nights.night(key, job)
    failed_plan(nights, "f3")
    out = str(nights.folder / "out")
    planned = prune_runs(out, 1, dry_run=True)
    assert set(planned.removed) == {"f1", "n1"}
    assert "holds other files too" in planned.kept["f2"]
    assert "no kept run" in planned.kept["f3"]
    assert prune_runs(out, 1, older_than=3600).removed == {}
    assert prune_runs(out, 1).removed == planned.removed
    assert sorted(os.listdir(out)) == ["f2", "f3", "n2"]


def test_a_renamed_or_malformed_record_is_named_and_takes_nothing_from_a_run(nights):
    nights.write("a", "b")
    plan_run(nights.job(reuse=None), "n1")
    failed_plan(nights, "n2")
    out = nights.folder / "out"
    (out / "n2").rename(out / "n3")
    (out / "n4/_raybatch").mkdir(parents=True)
    for key in ("n1", "n4"):
        (out / key / LAST_ATTEMPT).write_text('{"run_key": 1}')
    by_key = {line.run_key: line for line in list_runs(str(out))}
    assert by_key["n1"].state == "planned"
    assert "an attempt at run 'n2'" in by_key["n3"].trouble
    assert "last_attempt.json" in by_key["n4"].trouble
    assert prune_runs(str(out), 1).removed == {}
    (out / "n4" / LAST_ATTEMPT).write_bytes(b"x" * (1 << 17))
    assert "at most" in {line.run_key: line for line in list_runs(str(out))}["n4"].trouble


def test_a_store_that_takes_no_record_hides_no_error(nights, monkeypatch):
    nights.write("a")
    store = type(open_store(str(nights.folder)))

    put = store.put

    def refusing(self: Any, path: str, data: bytes) -> Any:
        if path == LAST_ATTEMPT:
            raise ConfigError("no")
        return put(self, path, data)

    monkeypatch.setattr(store, "put", refusing)
    failed_plan(nights, "n1")


# --- before the run directory is known, from the command line ---------------------------------


def command(nights: Nights, *words: str, **changes: Any) -> tuple[int, Path]:
    """(exit status, job file) of `raybatch run` on the job with some groups changed."""
    job = {**nights.job(reuse=None).to_dict(), **changes}
    path = nights.folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(path), "--no-prefect", *words])
    return int(ended.value.code or 0), path


def test_a_missing_source_is_recorded_with_the_command_that_runs_it_again(nights):
    code, path = command(nights, "--set", "source.limit=3", "--run-date", "2026-11-25")
    assert code
    (line,) = list_runs(str(nights.folder / "out"))
    assert line.state == "failed" and "SourceError" in line.failure
    assert line.command == (
        f"raybatch run {path} --no-prefect --set source.limit=3 --run-date 2026-11-25 "
        f"--run-key {line.run_key}"
    )
    assert line.run_key.startswith("nightly-20261125T")


def test_a_wrong_job_is_to_be_corrected_before_it_runs_again(nights, capsys):
    nights.write("a")
    code, path = command(nights, "--run-key", "n1", engine={"model": "/no/such/model"})
    assert code
    again = f"raybatch run {path} --no-prefect --run-key n1"
    out = nights.folder / "out"
    for words in (("status", out / "n1"), ("history", out), ("runs", out)):
        _, text, err = called(capsys, *words)
        said = " ".join((text + err).split()).lower().replace("`", "")
        assert f"correct the job, then run: {again}".lower() in said, words
    step = next_step(nights.job(reuse=None), "n1")
    assert step is not None and step.lines[0] == "begins a new run"
    assert step.lines[1].startswith("the last attempt failed during planning: ConfigError: ")
    other = next_step(nights.job(name="other", reuse=None), "n1")
    assert other is not None and other.lines == ("begins a new run",)


@pytest.mark.parametrize(
    ("error", "step"),
    [
        ("ConfigError", "correct the job"),
        ("SourceError", "fix the cause"),
        ("EndpointUnavailable", ""),
        ("RunDrained", ""),
        ("ValueError", ""),
        ("Problem", ""),
    ],
)
def test_what_a_repeat_cannot_mend_is_to_be_done_first(error, step):
    assert first_step(error) == step


def test_the_command_is_recorded_when_the_attempt_begins(nights):
    store = open_store(str(nights.folder / "out/n1"))
    typed = ["raybatch", "run", "job.yaml", "--set", "engine.env.HF_TOKEN=hunter22"]
    with typed_command(typed), recorded_attempt(store, nights.job(), "n1", "inference"):
        there = read_last_attempt(store)
        assert there.command.startswith("raybatch run job.yaml --set 'engine.env.HF_TOKEN=***")
        assert there.command.endswith(" --run-key n1") and not there.outcome
        (line,) = list_runs(str(nights.folder / "out"))
        assert not line.command  # the attempt may be at work


@pytest.mark.parametrize(
    "changes",
    [
        {"promt": {"template": "x"}},
        {"sampling": {"max_tokens": "many"}},
        {"engine": {"model": "/no/such/model"}},
    ],
)
def test_a_job_that_is_none_is_recorded(nights, changes):
    nights.write("a")
    code, _ = command(nights, **changes)
    assert code
    (line,) = list_runs(str(nights.folder / "out"))
    assert (line.state, line.job) == ("failed", "nightly")
    assert line.failure.startswith("planning: ") and line.command.startswith("raybatch run ")
    assert f"--run-key {line.run_key}" in line.command


def test_a_dated_output_has_the_attempt_in_the_folder_of_its_night(nights):
    output = {"uri": str(nights.folder / "out/{run_date}")}
    command(nights, "--run-key", "nightly-20261125T010000Z", output=output, promt=1)
    assert (nights.folder / "out/2026-11-25/nightly-20261125T010000Z" / LAST_ATTEMPT).exists()
    (page,) = history_of(output["uri"], job="nightly")
    assert page.runs[0].state == "failed"


NO_SUCH_BLOCK = {"uri": "s3://bucket/in.parquet", "credentials_block": "aws-credentials/none"}


@pytest.mark.parametrize("changes", [{"promt": 1}, {"source": NO_SUCH_BLOCK}])
def test_a_failed_attempt_for_a_date_is_recorded_in_its_folder(nights, changes):
    nights.write("a")
    output = {"uri": str(nights.folder / "out/{run_date}")}
    code, _ = command(nights, "--run-date", "2026-11-01", output=output, **changes)
    assert code and [path.name for path in (nights.folder / "out").iterdir()] == ["2026-11-01"]
    (line,) = list_runs(str(nights.folder / "out/2026-11-01"))
    assert (line.state, line.run_key) == ("failed", "nightly-20261101T000000Z")


def test_no_record_lands_in_the_input(nights):
    nights.write("a")
    for more in ({}, {"promt": 1}):
        command(nights, source={"uri": str(nights.folder)}, **more)
        assert not (nights.folder / "out").exists()


def test_no_secret_is_in_a_record(nights):
    options = {"key": "AKIDsecretkey", "client_kwargs": {"aws_session_token": "tokentoken"}}
    output = {"uri": str(nights.folder / "out"), "options": {"secret": "topsecret", **options}}
    for more in ({}, {"promt": 1}):
        command(nights, "--set", "output.options.password=hunter22", output=output, **more)
    key = open_store(str(nights.folder / "out/x"))
    with (
        typed_command(["raybatch", "run", "topsecret", "--set=engine.env.HF_TOKEN=hunter22"]),
        pytest.raises(ValueError),
        recorded_attempt(key, nights.job(output=output), "x", "planning"),
    ):
        raise ValueError("refused topsecret and tokentoken at s3://user:pw@host/x")
    texts = [path.read_text() for path in (nights.folder / "out").rglob("last_attempt.json")]
    assert len(texts) >= 2
    for text in texts:
        for secret in ("topsecret", "AKIDsecretkey", "tokentoken", "hunter22", "user:pw"):
            assert secret not in text
    assert without_secrets(["--set", "a.options.region=eu", "--set", "a.token=x"]) == [
        *("--set", "a.options.region=eu", "--set", "a.token=**********")
    ]


@pytest.mark.parametrize(
    "change",
    [
        "prompt.template=Sort {Company} of {Country}",
        "prompt.template='{Company}'",
        "output.uri=s3://bucket/{run_date:%Y%m%d}",
        'sampling={"temperature": 0, "choice": ["a", "b"]}',
        "output.publish=[{format: jsonl, uri: 'lake/{run_date}'}]",
        "sampling.max_tokens=5",
    ],
)
def test_a_value_in_braces_that_holds_no_credential_is_shown(change):
    assert without_secrets(["--set", change]) == ["--set", change]
    assert without_secrets([f"--set={change}"]) == [f"--set={change}"]


@pytest.mark.parametrize(
    "change",
    [
        "output.options={secret: hunter22}",
        "output={uri: out, options: {x: hunter22}}",
        "output.options={use_ssl: hunter22, client_kwargs: {region_name: hunter22}}",
        "output.publish=[{format: delta, uri: lake, options: {x: hunter22}}]",
        "engine={env: {A: hunter22}}",
        "engine={hf_token: hunter22}",
        "engine={kv_transfer_config: {a: hunter22}}",
        "engine.kv_transfer_config={a: hunter22}",
        "engine.kv_transfer_config.a=hunter22",
        "output=options:\n  secret: hunter22",
        "output={options: hunter22",
        "output=options: hunter22: x",
        "output.options={? [hunter22] : 1}",
        "output={uri: 'postgresql://user:hunter22@host/x'}",
    ],
)
def test_a_value_in_braces_that_may_hold_a_credential_is_masked(change):
    for words in (["--set", change], [f"--set={change}"]):
        assert "hunter22" not in " ".join(without_secrets(words))
        assert without_secrets(words)[-1].startswith(words[-1].partition("=")[0])


@pytest.mark.parametrize(
    "place", ["s3://user:{}@host/dt=1/x", "https://user:a={}@host/x", "https://host/dt=1?sig={}"]
)
@pytest.mark.parametrize("option", ["", "--reuse=", "--set=source.uri=", "source.uri="])
def test_a_url_that_holds_an_equals_sign_shows_no_credential(place, option):
    (word,) = without_secrets([option + place.format("hunter22")])
    assert "hunter22" not in word and word.startswith(option + place.split(":")[0]), word


def test_records_are_small_whatever_the_error_says(nights):
    store = open_store(str(nights.folder / "out/n1"))
    with (
        pytest.raises(ValueError),
        recorded_attempt(store, nights.job(), "n1", "planning"),
    ):
        raise ValueError("x\0y\ud800" * 1_000_000)
    assert store.stat(LAST_ATTEMPT).size < 10_000
    assert json.loads(store.read(LAST_ATTEMPT))["outcome"] == "failed"


def test_on_s3(nights, s3: S3Server):
    output = {"uri": "s3://attempts/out", "options": s3.options}
    job: BatchJob = nights.job(output=output, reuse=None)
    with pytest.raises(SourceError):
        plan_run(job, "n1")
    (line,) = list_runs(output["uri"], s3.options)
    assert line.state == "failed" and line.failure
    assert not open_store(f"{output['uri']}/n1", s3.options).holds(PLAN)
    with pytest.raises(NoSuchRun):
        latest_complete(output["uri"], s3.options)
    nights.write("a")
    assert nights.night("n1", job).good == 1
    assert list_runs(output["uri"], s3.options)[0].state == "completed"


def test_a_page_of_nights_names_the_currency_of_the_costs(nights: Nights) -> None:
    nights.write("a", "b")
    report = nights.night("n1")
    put_report(open_store(report.run), replace(report, cost={"total": 1.5}, currency="EUR"))
    (page,) = history_of(str(nights.folder / "out"))
    (run,) = page.runs
    assert (run.good, run.quarantined, run.cost, run.currency) == (2, 0, 1.5, "EUR")
    assert "1.50 EUR" in history_markdown(page)
