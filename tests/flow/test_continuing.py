"""The commands that are shown to continue a run: each is carried out as it stands, on a real
Prefect server with a worker, in a shell or as Python."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.prefect_server import Prefect, settings_for
from helpers.small import job_dict
from prefect import flow

import prefect_raybatch as rb
from prefect_raybatch.errors import (
    ConfigError,
    CostExceeded,
    ErrorBudgetExceeded,
    PlanMismatch,
)
from prefect_raybatch.flow import continuing
from prefect_raybatch.flow.failure import command_for, explained
from prefect_raybatch.job.secrets import MASK
from prefect_raybatch.runs.typed import name_typed_run, typed_command

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def wrong_job(folder: Path, name: str, **groups: Any) -> dict[str, Any]:
    """A job that fails while it is planned: its column is not in the input."""
    (folder / "in.csv").write_text("Company\nAcme\nBolt\n")
    return job_dict(
        name=name,
        source={"uri": str(folder / "in.csv")},
        prompt={"template": "{Nothing}"},
        engine={"model": "demo"},
        output={"uri": str(folder / "out")},
        **groups,
    )


def ended(prefect: Prefect, run: str) -> dict[str, Any]:
    def look() -> bool:
        return bool(prefect.state(run)["type"] in ENDED)

    prefect.until(look, 240, "the end of the flow run")
    return dict(prefect.ask(f"flow_runs/{run}"))


def shown_command(message: str) -> str:
    return message.rstrip().splitlines()[-1].strip()


def carried_out(prefect: Prefect, command: str) -> dict[str, Any]:
    """The flow run, once it has ended, that comes of a command as it stands in the state."""
    words = shlex.split(command)
    assert words[0] == "prefect"
    said = prefect.call(*words[1:])
    if words[1:3] == ["flow-run", "retry"]:
        return ended(prefect, words[3])
    (run,) = [part for part in said.split() if part.count("-") == 4 and len(part) == 36]
    return ended(prefect, run)


def begun_by(prefect: Prefect, parameters: dict[str, Any]) -> dict[str, Any]:
    dev = prefect.deployments["dev"]["id"]
    made = prefect.ask(f"deployments/{dev}/create_flow_run", {"parameters": parameters})
    return ended(prefect, made["id"])


@pytest.mark.whole
@pytest.mark.parametrize(
    "given",
    [
        {"run_date": "2026-11-24"},
        *(pytest.param(more, marks=pytest.mark.nightly) for more in ({}, {"run_key": "monday"})),
    ],
)
def test_a_deployments_run_goes_on_with_its_own_parameters(
    given: dict[str, Any], deployed: Prefect, tmp_path: Path
) -> None:
    own = {**given, "limit": 1, "overrides": {"sampling.max_tokens": 9, "name": "it's"[:2]}}
    first = begun_by(deployed, {"job": wrong_job(tmp_path, "goes-on"), **own})
    assert first["state_type"] == "FAILED", first
    command = shown_command(first["state"]["message"])
    again = carried_out(deployed, command)
    assert again["id"] != first["id"] and again["name"] == first["name"], command
    assert again["state_type"] == "FAILED"
    assert "Nothing" in again["state"]["message"]
    for name in ("limit", "overrides", "run_date"):
        assert again["parameters"].get(name) == first["parameters"].get(name)
    assert shown_command(again["state"]["message"]) == command


@pytest.mark.whole
def test_a_run_whose_key_is_not_known_goes_on_as_the_same_night(
    deployed: Prefect, tmp_path: Path
) -> None:
    job = wrong_job(tmp_path, "unknown")
    first = begun_by(deployed, {"job": job, "overrides": {"source.limt": 1}})
    command = shown_command(first["state"]["message"])
    assert "run_key" not in command and "scheduled_for" in command
    start = datetime.fromisoformat(first["expected_start_time"]).astimezone(UTC)
    mended = command.replace("limt", "limit")
    again = carried_out(deployed, mended)
    assert again["name"] == f"unknown-{start:%Y%m%dT%H%M%SZ}"


def started(**more: Any) -> continuing.FlowStart:
    values = {
        "run": "00000000-0000-0000-0000-000000000007",
        "flow": "batch_inference",
        "deployment": "batch_inference/nightly",
        "flow_parameters": {
            "run_key": "k",
            "overrides": {"sampling.max_tokens": 9},
            "accept": None,
        },
        "takes": continuing.RUN_PARAMETERS | {"limit", "accept"},
        "start": datetime(2026, 11, 25, 2, tzinfo=UTC),
        "job": job_dict(),
    }
    return continuing.FlowStart(**{**values, **more})


@pytest.fixture
def job() -> rb.BatchJob:
    return rb.BatchJob.from_dict(job_dict(limits={"max_failed_rows": 3}))


def given_by(command: str) -> dict[str, Any]:
    """The parameters in a command, read as Prefect reads them."""
    words = shlex.split(command)
    made: dict[str, Any] = {}
    for option, word in pairwise(words):
        if option == "-p":
            name, _, value = word.partition("=")
            try:
                made[name] = json.loads(value)
            except ValueError:
                made[name] = value
    return made


def test_limits_are_raised_beside_the_changes_that_are_there(
    job: rb.BatchJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuing, "started", started)
    command = command_for(ErrorBudgetExceeded("x"), job.limits, "k", None)
    assert given_by(command) == {
        "run_key": "k",
        "scheduled_for": "2026-11-25T02:00:00+00:00",
        "overrides": {"sampling.max_tokens": 9, "limits.max_failed_rows": 6},
    }
    other = given_by(command_for(PlanMismatch("x"), job.limits, "k", None))
    assert other["run_key"] == "k-2" and other["overrides"] == {"sampling.max_tokens": 9}


BACKFILL = continuing.BACKFILL_PARAMETERS


@pytest.mark.parametrize(
    ("takes", "names_field"),
    [
        (BACKFILL, True),
        (BACKFILL | {"overrides"}, False),
        (frozenset({"day"}), True),
        (frozenset({"day", "overrides"}), True),
        (frozenset({"day", "job"}), True),
    ],
)
def test_who_cannot_change_the_limit_by_a_command_is_told_which_field_to_change(
    takes: frozenset[str],
    names_field: bool,
    prefect_api: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same command would fail again: of a deployment from before, or of a flow of one's own."""
    own = started(
        flow="f", deployment="f/prod", takes=takes, flow_parameters=dict.fromkeys(takes, 7)
    )
    held = {"job": job_dict()} if "job" in takes else {}
    given = {**own.flow_parameters, "overrides": None, **held}
    own = replace(own, flow_parameters=given, job=held.get("job"))
    monkeypatch.setattr(continuing, "started", lambda: own)
    groups = {"limits": {"max_failed_rows": 3, "max_cost": 5}, "cluster": {"price_per_gpu_hour": 1}}
    job = rb.BatchJob.from_dict(job_dict(**groups))

    @flow
    def fails(error: str) -> None:
        with explained("infer_shards", job.name, "k", limits=job.limits):
            raise errors[error]("too many")

    errors = {kind.__name__: kind for kind in (ErrorBudgetExceeded, CostExceeded)}
    raised = ("limits.max_failed_rows", 6), ("limits.max_cost", 10.0)
    for name, (field, value) in zip(errors, raised, strict=True):
        text = str(fails(name, return_state=True).message)
        told = f"set {field} to {value} in the job of deployment f/prod; then run it again."
        assert (told in text) == names_field
        command = shown_command(text)
        if not names_field:
            assert given_by(command)["overrides"] == {field: value}
        elif takes == BACKFILL or held:  # a retry keeps the job that the flow run has
            assert command.startswith("prefect deployment run f/prod ")
        else:
            assert command == f"prefect flow-run retry {own.run}"


def test_texts_that_look_like_json_and_secrets_in_fields(
    job: rb.BatchJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"engine.hf_token": "hf_secret", "output.options": {"secret": "s3cret"}}
    made = {
        "flow_parameters": {"overrides": changes, "job": job_dict(engine={"hf_token": "hf_other"})}
    }
    monkeypatch.setattr(
        continuing, "started", lambda: started(**made, job=made["flow_parameters"]["job"])
    )
    command = command_for(ConfigError("x"), job.limits, "20261125", None)
    assert given_by(command)["run_key"] == "20261125"
    assert "hf_secret" not in command and "s3cret" not in command and "hf_other" not in command
    assert set(given_by(command)["overrides"]) == set(changes)


def test_changes_without_a_job_keep_their_public_texts(
    job: rb.BatchJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`retry_failed` takes the job from the run directory."""
    changes = {"prompt.system": "Be brief", "engine.hf_token": "hush", "sampling.max_tokens": 9}
    own = started(
        flow="retry_failed",
        deployment="retry_failed/prod",
        flow_parameters={"run_dir": "out/k", "overrides": changes},
        takes=continuing.RETRY_PARAMETERS | {"overrides"},
        job=None,
    )
    monkeypatch.setattr(continuing, "started", lambda: own)
    command = command_for(ErrorBudgetExceeded("x"), job.limits, "k", None)
    shown = given_by(command)["overrides"]
    assert shown["prompt.system"] == "Be brief" and shown["engine.hf_token"] == MASK
    assert shown["sampling.max_tokens"] == 9


def test_an_invalid_job_shows_no_text_that_may_be_a_secret(
    job: rb.BatchJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = job_dict(
        engine={"hf_token": "hush-a", "x": ["hush-b"]},
        output={"options": {"region": "eu-central-1", "secret": "hush-c"}},
    )
    given = {"job": wrong, "overrides": {"engine.hf_token": "hush-d", "source.limt": 1}}
    monkeypatch.setattr(continuing, "started", lambda: started(flow_parameters=given, job=wrong))
    command = command_for(ConfigError("x"), job.limits, "k", None)
    assert "hush" not in command
    assert given_by(command)["overrides"]["source.limt"] == 1 and "eu-central-1" in command


@pytest.mark.parametrize("deployment", [None, "nightly/prod"])
def test_parameters_that_only_ones_own_flow_has_are_not_shown(
    deployment: str | None, job: rb.BatchJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be secrets, such as a token or jobs with keys."""
    given = {
        "run_key": "k",
        "job": "hush-of-a-text",
        "overrides": ["hush-of-a-list"],
        "hf_token": "hush",
        "jobs": [job_dict(engine={"hf_token": "hush-of-a-job"})],
    }
    own = started(
        flow="nightly",
        deployment=deployment,
        flow_parameters=given,
        takes=continuing.RUN_PARAMETERS | set(given),
        job=given["job"],
    )
    monkeypatch.setattr(continuing, "started", lambda: own)
    for error in (ConfigError("x"), ErrorBudgetExceeded("x")):
        command = command_for(error, job.limits, "k", None)
        assert "hush" not in command
        if deployment:
            assert given_by(command)["run_key"] == "k" and set(given_by(command)) >= set(given)
        else:
            assert "hf_token=hf_token, job=job, jobs=jobs, " in command and "run_key='k'" in command


def test_a_flow_of_ones_own_is_tried_again_as_it_is(
    job: rb.BatchJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = started(
        takes=frozenset({"day"}), flow_parameters={"day": "monday"}, deployment="mine/prod"
    )
    monkeypatch.setattr(continuing, "started", lambda: own)
    for error in (ConfigError("x"), ErrorBudgetExceeded("x"), ValueError("x")):
        command = command_for(error, job.limits, "k", None)
        assert command == f"prefect flow-run retry {own.run}"


def test_a_typed_command_is_typed_again_with_the_key_of_its_run(tmp_path: Path) -> None:
    path = tmp_path / "my job.yaml"
    job = wrong_job(tmp_path, "typed")
    job["prompt"] = {"template": "{Company}"}
    job["limits"] = {"max_failed_rows": 3}
    path.write_text(json.dumps(job))
    words = ["raybatch", "run", str(path), "--set", "source.limit=1", "--run-key=old"]
    with typed_command(words):
        name_typed_run("typed-1")
        loaded = rb.BatchJob.from_yaml(path)
        command = command_for(ErrorBudgetExceeded("x"), loaded.limits, "typed-1", None)
    assert shlex.split(command) == [
        *words[:5], "--run-key", "typed-1", "--set", "limits.max_failed_rows=6",
    ]  # fmt: skip
    # It is read as it stands; `plan` takes the same words and starts no engine.
    plan = [
        sys.executable,
        "-m",
        "prefect_raybatch.cli.commands",
        "plan",
        *shlex.split(command)[2:],
    ]
    done = subprocess.run(plan, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "1 row" in done.stdout + done.stderr, done.stdout + done.stderr


def test_a_flow_that_was_called_is_shown_as_the_same_call(
    prefect_process: Prefect, tmp_path: Path
) -> None:
    job = rb.BatchJob.from_dict(wrong_job(tmp_path, "called"))

    @flow(name="my-pipeline")
    def my_pipeline(day: str, job: rb.BatchJob) -> None:
        rb.batch_inference(job, day)

    known = {
        **{"batch_inference": rb.batch_inference, "my_pipeline": my_pipeline},
        **{"job": job, "day": "monday"},  # of one's own flow, whose values are not shown
    }
    with settings_for(prefect_process):
        for call in (
            lambda: rb.batch_inference(job, limit=1, return_state=True),
            lambda: my_pipeline("monday", job, return_state=True),
        ):
            state: Any = call()
            assert state.is_failed()
            command = shown_command(str(state.message))
            with pytest.raises(ConfigError) as error:
                eval(command, dict(known))
            assert shown_command(str(error.value)) == command
