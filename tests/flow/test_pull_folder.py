"""User functions in the folder that a deployment's pull steps choose."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from helpers.openai_server import openai_server
from helpers.prefect_server import POOL, Prefect
from helpers.small import job_dict
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import Running

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.flow import origin
from prefect_raybatch.job.functions import load_function

pytestmark = pytest.mark.usefixtures("prefect_api")


@flow
def pulled() -> None:
    pass


def run_of(name: str, steps: list[dict[str, Any]] | None) -> UUID:
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(pulled), name, pull_steps=steps)
        return client.create_flow_run_from_deployment(deployment, state=Running()).id


def test_a_function_beside_the_pulled_files_is_found_without_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pulled_questions.py").write_text("def ask(row):\n    return row['text']\n")
    step = {"prefect.deployments.steps.set_working_directory": {"directory": str(tmp_path)}}
    for run in (None, run_of("without", None)):  # a script, and a worker's own folder
        monkeypatch.setattr(origin, "root_run", lambda run=run: run)
        origin.add_pull_folder()
        with pytest.raises(ConfigError, match=r"prompt\.function.*pulled_questions"):
            load_function("pulled_questions:ask", "prompt.function")
    with_steps = run_of("with", [step])
    monkeypatch.setattr(origin, "root_run", lambda: with_steps)
    for _ in range(2):
        origin.add_pull_folder()
    assert load_function("pulled_questions:ask", "prompt.function")({"text": "a"}) == "a"
    assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1


@pytest.mark.whole
def test_a_worker_asks_with_a_function_beside_the_pulled_files(
    deployed: Prefect, tmp_path: Path
) -> None:
    """Both the driver and Ray's workers import it. The model is a hosted one, as no engine has to
    start for that."""
    code, out = tmp_path / "code", tmp_path / "out"
    code.mkdir()
    (code / "worker_questions.py").write_text(
        "def ask(row):\n    return [{'role': 'user', 'content': 'Industry: ' + row['Company']}]\n"
    )
    (code / "in.csv").write_text("Company\nAcme Law Firm\nBolt Bank\n")
    policy = tmp_path / "policy.yaml"
    places = [str(tmp_path)]
    allowed = {"read": places, "write": places, "function_modules": ["worker_questions"]}
    policy.write_text(json.dumps({**allowed, "hosts": ["127.0.0.1"], "allow_private": True}))
    step = {"prefect.deployments.steps.set_working_directory": {"directory": str(code)}}
    with openai_server() as server:
        job = job_dict(
            name="pulled", source={"uri": "in.csv"}, prompt={"function": "worker_questions:ask"},
            engine={"endpoint": {"url": server.url, "model": "large"}}, output={"uri": str(out)},
        )  # fmt: skip
        deployment = {
            "name": "pulled-functions",
            "entrypoint": "prefect_raybatch.flow.batch_inference",
            "pull": [step],
            "parameters": {"job": job, "run_key": "night"},
            "work_pool": {
                "name": POOL, "job_variables": {"env": {"RAYBATCH_POLICY": str(policy)}},
            },
        }  # fmt: skip
        made = tmp_path / "prefect.yaml"
        made.write_text(json.dumps({"name": "pulled", "deployments": [deployment]}))
        deployed.call("--no-prompt", "deploy", "--all", "--prefect-file", str(made))
        found = deployed.ask("deployments/name/batch_inference/pulled-functions")
        run = deployed.ask(f"deployments/{found['id']}/create_flow_run", {})["id"]

        def ended() -> dict[str, Any] | None:
            state = deployed.state(run)
            return state if state["type"] in ("COMPLETED", "FAILED", "CRASHED") else None

        state = deployed.until(ended, 600, "the end of the flow run")
    assert state["type"] == "COMPLETED", state
    assert state["message"].startswith("2 of 2 rows"), state
    asked = {body["messages"][-1]["content"] for body in server.bodies}
    assert asked == {"Industry: Acme Law Firm", "Industry: Bolt Bank"}
