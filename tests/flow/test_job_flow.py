"""JSON Schemas in the parameters of flows, deployments and blocks, which Prefect must not take for
references to blocks."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from helpers.small import job_dict
from prefect.client.orchestration import get_client
from prefect.exceptions import ParameterTypeError
from pydantic import BaseModel

from prefect_raybatch import BatchJob
from prefect_raybatch.compile.job import sampling_spec
from prefect_raybatch.flow import flows
from prefect_raybatch.flow.blocks import BatchInferenceJob
from prefect_raybatch.flow.flows import backfill_job, batch_inference, retry_failed, tune_job
from prefect_raybatch.flow.job_flow import JobFlow
from prefect_raybatch.policy.in_force import policy_applied
from prefect_raybatch.policy.policy import STRICT_POLICY
from prefect_raybatch.runs.run_history import history_of


class Place(BaseModel):
    city: str


class Company(BaseModel):
    seat: Place
    branches: list[Place]


SCHEMA = Company.model_json_schema()
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
TYPED = job_dict(output={"uri": "out", "schema_model": SCHEMA})
FORMED = job_dict(sampling={"structured_outputs": {"json": SCHEMA}})
WITH_TOOLS = job_dict(prompt={"template": "{a}", "tools": [TOOL]})
JOBS = [TYPED, FORMED, WITH_TOOLS]


def schema_in(job: BatchJob) -> Any:
    if job.prompt.tools:
        return job.prompt.tools[0]["function"]["parameters"]
    return json.loads(sampling_spec(job).fields["structured_outputs"]["json"])


@pytest.mark.parametrize("value", JOBS, ids=["schema_model", "structured_outputs", "tools"])
def test_a_job_with_references_in_a_schema_is_a_parameter(value: dict[str, Any]) -> None:
    assert "$ref" in json.dumps(value)
    job = BatchJob.from_dict(value)
    others: list[tuple[Any, dict[str, Any]]] = [
        (batch_inference, {}),
        (retry_failed, {"run_dir": "out/a"}),
        (backfill_job, {"first": "2026-01-01", "last": "2026-01-02"}),
        (tune_job, {}),
    ]
    for made, more in others:
        for given in (value, job, job.to_dict(), json.loads(json.dumps(job.to_dict()))):
            found = made.validate_parameters({"job": given, **more})["job"]
            assert isinstance(found, BatchJob) and schema_in(found) == SCHEMA
            assert found == job
        named = made.with_options(name="other").validate_parameters({"job": value, **more})["job"]
        assert named == job


def test_a_schema_written_as_a_mapping_is_kept_as_text_in_its_order() -> None:
    job = BatchJob.from_dict(TYPED)
    assert job.output.schema_model == json.dumps(SCHEMA, separators=(",", ":"))
    assert BatchJob.from_dict(job.to_dict()) == job


def test_overrides_may_hold_a_schema() -> None:
    changes = {"output.schema_model": SCHEMA}
    given = {"job": job_dict(), "overrides": changes}
    assert batch_inference.validate_parameters(given)["overrides"] == changes


def test_blocks_are_still_resolved_and_wrong_jobs_refused() -> None:
    for reference in (str(uuid4()), {"block_document_id": str(uuid4())}):
        with pytest.raises(ParameterTypeError):
            batch_inference.validate_parameters({"job": {"$ref": reference}})
    wrong = {**TYPED, "sampling": {"max_tokens": 0}}
    with pytest.raises(ParameterTypeError, match="max_tokens"):
        batch_inference.validate_parameters({"job": wrong})


@pytest.mark.usefixtures("prefect_api")
def test_deployments_and_blocks_hold_jobs_with_references() -> None:
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow(batch_inference)
        for number, value in enumerate(JOBS):
            deployment = client.create_deployment(
                flow_id,
                f"schemas-{number}",
                parameters={"job": value},
                parameter_openapi_schema=batch_inference_schema(),
                enforce_parameter_schema=True,
            )
            run = client.create_flow_run_from_deployment(deployment)
            kept = client.read_flow_run(run.id).parameters
            found = batch_inference.validate_parameters(kept)["job"]
            assert schema_in(found) == SCHEMA
            block = BatchInferenceJob(job=BatchJob.from_dict(value))
            block.save(f"schemas-{number}", overwrite=True)
            loaded = BatchInferenceJob.load(f"schemas-{number}")
            assert schema_in(loaded.batch_job()) == SCHEMA


def batch_inference_schema() -> dict[str, Any]:
    return batch_inference.parameters.model_dump_for_openapi()


def bad_job(folder: Path) -> dict[str, Any]:
    return job_dict(output={"uri": str(folder)}, sampling={"max_tokens": -1})


@pytest.mark.parametrize("made", [batch_inference, batch_inference.with_options(name="other")])
def test_a_flow_run_whose_job_is_none_is_listed_among_the_nights(
    made: JobFlow[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect fails it before the flow is called, so the flow records nothing."""
    monkeypatch.setattr(flows, "scheduled_start", lambda: datetime(2026, 7, 1, 3, tzinfo=UTC))
    job = bad_job(tmp_path)
    keys = [None, "mine", None]
    for key, when in zip(keys, [None, None, "2026-06-30T03:00:00+02:00"], strict=True):
        parameters = {"job": job, "run_key": key, "scheduled_for": when}
        with pytest.raises(ParameterTypeError):
            made.validate_parameters(parameters)
    (page,) = history_of(str(tmp_path))
    stamps = ("20260630T010000Z", "20260701T030000Z")
    assert {night.run_key for night in page.runs} == {f"{job['name']}-{s}" for s in stamps} | {
        "mine"
    }
    assert all("sampling.max_tokens" in night.failure for night in page.runs)


def test_no_record_goes_where_the_policy_does_not_allow_it(tmp_path: Path) -> None:
    """A deployment's parameters are anybody's who may use the API."""
    elsewhere = job_dict(
        output={"uri": "s3://b/o", "options": {"endpoint_url": "http://10.0.0.1"}},
        sampling={"max_tokens": -1},
    )
    with policy_applied(STRICT_POLICY):
        for job in (bad_job(tmp_path), elsewhere):
            with pytest.raises(ParameterTypeError):
                batch_inference.validate_parameters({"job": job, "run_key": "k"})
    assert list(tmp_path.iterdir()) == []
