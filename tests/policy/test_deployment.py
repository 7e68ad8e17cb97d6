"""A run that a deployment starts through Prefect's API is limited by the operator's policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from helpers.policies import set_policy
from helpers.small import job_dict
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.flow import flows
from prefect_raybatch.runs.run import Run

pytestmark = pytest.mark.usefixtures("prefect_api")


class Planned(Exception):
    """The run got as far as the inference, which is no part of these tests."""


@pytest.fixture
def deployment() -> UUID:
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow(flows.batch_inference)
        return client.create_deployment(flow_id, name="limited")


@pytest.fixture(autouse=True)
def no_inference(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    runs: list[Run] = []

    def infer_shards(job: Any, run: Run) -> None:
        runs.append(run)
        raise Planned

    monkeypatch.setattr(flows, "infer_shards", infer_shards)
    return runs


def start(deployment: UUID, job: dict[str, Any]) -> None:
    """Run the flow as a worker does, with the parameters that somebody gave to the API."""
    with get_client(sync_client=True) as client:
        parameters = {"job": job, "run_key": "key"}
        made = client.create_flow_run_from_deployment(deployment, parameters=parameters)
        flow_run = client.read_flow_run(made.id)
    run_flow(flows.batch_inference, flow_run=flow_run)


def limited_job(folder: Path, **groups: Any) -> dict[str, Any]:
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in/a.csv").write_text("Company\nA\nB\n")
    own = {
        "source": {"uri": f"{folder}/in/a.csv"},
        "prompt": {"template": "What is {Company}?"},
        "engine": {"model": "demo"},
        "output": {"uri": f"{folder}/out"},
    }
    return job_dict(**{**own, **groups})


def test_what_the_policy_allows_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deployment: UUID, no_inference: list[Run]
) -> None:
    set_policy(monkeypatch, tmp_path, read=["in"], write=["out"])
    with pytest.raises(Planned):
        start(deployment, limited_job(tmp_path))
    (run,) = no_inference
    assert run.rows == 2 and (tmp_path / "out/key/_raybatch/plan.json").exists()


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"source": {"uri": "/etc/passwd"}}, r"source\.uri: .* may not read /etc/passwd"),
        ({"output": {"uri": "/var/elsewhere"}}, r"output\.uri: .* may not write to /var/elsewhere"),
        (
            {"source": {"uri": "https://evil.example.com/a.csv"}},
            r"source\.uri: .* may not name the host evil\.example\.com",
        ),
        ({"prompt": {"function": "helpers.functions:ask"}}, r"prompt\.function: .*from no module"),
        (
            {"engine": {"model": "demo", "env": {"LD_PRELOAD": "/tmp/evil.so"}}},
            r"engine\.env: a job may not set LD_PRELOAD",
        ),
    ],
    ids=["folder read", "folder written", "host", "function", "variable"],
)
def test_what_the_policy_does_not_allow_is_refused_with_field_and_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    deployment: UUID,
    no_inference: list[Run],
    groups: dict[str, Any],
    words: str,
) -> None:
    policy = set_policy(monkeypatch, tmp_path, read=["in"], write=["out"])
    with pytest.raises(ConfigError, match=words) as caught:
        start(deployment, limited_job(tmp_path, **groups))
    assert str(policy) in str(caught.value) and no_inference == []
    assert not (tmp_path / "out").exists()


def test_the_owner_s_own_call_is_not_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_inference: list[Run]
) -> None:
    """Else the refusals above would say nothing of where the job came from."""
    from prefect_raybatch.job.batch_job import BatchJob

    set_policy(monkeypatch, tmp_path)
    with pytest.raises(Planned):
        flows.batch_inference(BatchJob.from_dict(limited_job(tmp_path)), run_key="key")
    assert len(no_inference) == 1
