"""deployments/: the files, and what a real Prefect server makes of them."""

from __future__ import annotations

import inspect
import json
import re
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import kubernetes_validate
import pyarrow.dataset as ds
import pytest
import yaml
from helpers.pager import automations_script
from helpers.prefect_server import ROOT, Prefect
from helpers.small import make_job
from helpers.vllm_server import vllm_server
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validate

from prefect_raybatch import BatchJob, batch_inference
from prefect_raybatch.api import default_run_key
from prefect_raybatch.demo import LABELS, SYSTEM, TEMPLATE
from prefect_raybatch.demo.customers import write_customers
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.flow import flows
from prefect_raybatch.flow.schedule import zone_of
from prefect_raybatch.job.edits import render_placeholders
from prefect_raybatch.job.table_formats import TABLE_FORMATS
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.kuberay.api import VERBS
from prefect_raybatch.policy.in_force import policy_applied
from prefect_raybatch.policy.policy_file import read_policy
from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import open_store

FOLDER = ROOT / "deployments"
TERMINAL = {"COMPLETED", "FAILED", "CANCELLED", "CRASHED"}
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    item["name"]: item
    for item in yaml.safe_load((FOLDER / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
}


# --- the files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dev", "cascade", "nightly"])
def test_parameters_are_a_job_and_hold_no_keys(name: str) -> None:
    item = DEPLOYMENTS[name]
    job = BatchJob.from_dict(item["parameters"]["job"])
    assert not job.source.options and not job.output.options
    assert item["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
    assert item["pull"] and item["entrypoint"] == "prefect_raybatch.flow.batch_inference"


def test_the_dev_job_is_the_demo_over_the_file_beside_it(tmp_path: Path) -> None:
    job = BatchJob.from_dict(DEPLOYMENTS["dev"]["parameters"]["job"])
    assert (job.prompt.system, job.prompt.template) == (SYSTEM, TEMPLATE)
    assert job.sampling.choice == list(LABELS) and job.engine.model == "demo"
    write_customers(tmp_path / "again.csv", 300, 7)
    assert (tmp_path / "again.csv").read_bytes() == (FOLDER / job.source.uris[0]).read_bytes()


def test_dev_works_in_a_folder_without_the_package() -> None:
    """Ray's workers look into the driver's folder first, so that the clone's code would run there
    in place of the installed package."""
    (step,) = DEPLOYMENTS["dev"]["pull"][0].values()
    folder = ROOT / step["directory"].replace("{{ $PWD }}/", "")
    assert folder == FOLDER and not (folder / "prefect_raybatch").exists()
    output = Path(DEPLOYMENTS["dev"]["parameters"]["job"]["output"]["uri"])
    assert (folder / output).resolve() == ROOT / "out/dev"


def test_the_parameter_form() -> None:
    schema = parameter_schema(batch_inference).model_dump()
    shown = sorted(schema["properties"], key=lambda name: schema["properties"][name]["position"])
    few = ["run_key", "scheduled_for", "run_date", "limit", "overrides", "accept"]
    assert shown == [*few, "job"]  # the job, which is long, below what changes from run to run
    assert list(inspect.signature(batch_inference.fn).parameters) == ["job", *few]
    assert schema["required"] == ["job"]
    assert schema["properties"]["scheduled_for"]["anyOf"][0]["format"] == "date-time"
    form_is_whole(schema)


def form_is_whole(schema: dict[str, Any]) -> None:
    """Every reference leads somewhere, and every field of the job has title, text and place."""
    groups = schema["definitions"]

    def follow(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                assert value["$ref"].removeprefix("#/definitions/") in groups, value
            for inner in value.values():
                follow(inner)
        elif isinstance(value, list):
            for inner in value:
                follow(inner)

    follow(schema)
    assert {"BatchJob", "Source", "Prompt", "Sampling", "Engine", "Output", "Limits"} <= set(groups)
    for name, group in groups.items():
        positions = []
        for field, given in group["properties"].items():
            # What a field shares with the group it refers to is written there alone.
            shown = {**groups.get(given.get("$ref", "").rpartition("/")[2], {}), **given}
            assert shown["title"] and shown["description"], f"{name}.{field}"
            positions.append(shown["position"])
        assert len(set(positions)) == len(positions), name
    formats = groups["Source"]["properties"]["format"]["enum"]
    files = ["parquet", "csv", "jsonl", "openai_batch", "arrow"]
    assert formats == ["auto", *files, *TABLE_FORMATS]
    assert groups["Engine"]["properties"]["device"]["enum"] == ["auto", "gpu", "cpu"]
    assert "schema" in groups["Output"]["properties"]  # by its alias, as a person writes it
    # The form shows a union as tabs: fewest of them, and none with the name of a Python type.
    fields = {f"{n}.{f}": v for n, g in groups.items() for f, v in g["properties"].items()}
    tabs = {
        name: [kind["title"] for kind in field["anyOf"]]
        for name, field in fields.items()
        if "anyOf" in field
    }
    assert tabs == {
        "Source.uri": ["One", "Several"],
        "Engine.replicas": ["Number", "auto", "Several"],
        "Engine.max_num_seqs": ["Number", "auto"],
        "Engine.max_model_len": ["Number", "auto", "Default"],
        "Engine.engines_per_gpu": ["Number", "auto"],
        "Output.schema_model": ["One", "Fields", "Default"],
        "Images.resize": ["Number", "Several", "Default"],
    }
    assert fields["Limits.max_failed_fraction"]["type"] == "number"
    assert fields["Limits.max_failed_rows"]["type"] == "integer"


def test_the_server_takes_null_for_what_is_left_out_and_refuses_the_rest() -> None:
    schema: Any = parameter_schema(batch_inference).model_dump()
    job = BatchJob.from_dict(DEPLOYMENTS["dev"]["parameters"]["job"])
    whole = job.model_dump(mode="json", by_alias=True)
    assert whole["source"]["limit"] is whole["cluster"]["address"] is None
    assert whole["limits"]["warn_failed"] is whole["output"]["schema"] is None
    parameters = {"job": whole, "run_key": None, "scheduled_for": None}
    validate(parameters, schema, raise_on_error=True)  # as it does for each run that is created
    for group, field, value in (
        ("source", "limit", "ten"),
        ("source", "limit", 0),
        ("source", "columns", "Company"),
        ("limits", "max_failed_rows", "few"),
        ("limits", "max_failed_rows", -1),
        ("cluster", "address", 1),
    ):
        wrong = {**parameters, "job": {**whole, group: {**whole[group], field: value}}}
        assert validate(wrong, schema), f"{group}.{field}: {value!r}"


def test_a_missed_night_gets_the_key_it_would_have_had(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []

    class Planned(Exception):
        pass

    def plan_shards(job: BatchJob, key: str) -> None:
        keys.append(key)
        raise Planned

    monkeypatch.setattr(flows, "plan_shards", plan_shards)
    job = BatchJob.from_dict(DEPLOYMENTS["dev"]["parameters"]["job"])
    night = datetime(2026, 3, 1, 2, 0, tzinfo=ZoneInfo("Europe/Berlin"))
    monkeypatch.setattr(flows, "scheduled_start", lambda: night)
    for arguments in ({}, {"scheduled_for": night}, {"scheduled_for": night.astimezone(UTC)}):
        with pytest.raises(Planned):
            batch_inference.fn(job, **arguments)
    assert set(keys) == {"dev-20260301T010000Z"} == {default_run_key(job, night)}
    with pytest.raises(Planned):
        batch_inference.fn(job, "mine", scheduled_for=night)
    assert keys[-1] == "mine"
    with pytest.raises(Exception, match="timezone"):  # which night would that be?
        batch_inference.validate_parameters({"job": job, "scheduled_for": "2026-03-01T02:00:00"})


def test_a_run_with_small_changes_needs_no_second_job(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[tuple[BatchJob, str]] = []

    class Planned(Exception):
        pass

    def plan_shards(job: BatchJob, key: str) -> None:
        planned.append((job, key))
        raise Planned

    monkeypatch.setattr(flows, "plan_shards", plan_shards)
    monkeypatch.setattr(flows, "scheduled_start", lambda: None)
    given = {"uri": "s3://b/in/{run_date}", "options": {"key": "me", "secret": "hush"}}
    job = make_job(source=given, output={"uri": "s3://b/out"}, engine={"env": {"A": "1"}})

    def run(**parameters: Any) -> tuple[BatchJob, str]:
        with pytest.raises(Planned):
            batch_inference.fn(job, **parameters)
        return planned[-1]

    day = date(2026, 3, 1)
    made, key = run(run_date=day, limit=200, overrides={"sampling.max_tokens": 9})
    assert key == "nightly-20260301T000000Z"
    assert render_placeholders(made, key).source.uris == ["s3://b/in/2026-03-01"]
    assert (made.source.limit, made.sampling.max_tokens) == (200, 9)
    assert made.source.options == job.source.options and made.engine.env == job.engine.env
    again, key = run(run_date=day, run_key="mine", overrides={"source.uri": "s3://b/{run_date}"})
    assert key == "mine" and again.source.uris == ["s3://b/2026-03-01"]
    assert run(run_date=day)[0] == job
    with pytest.raises(ConfigError, match=r"overrides: sampling: .*max_tokns.*max_tokens"):
        batch_inference.fn(job, overrides={"sampling.max_tokns": 9})


def test_the_policy_beside_them_allows_what_the_deployments_do_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(FOLDER)
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    (given,) = re.findall(r"-p 'overrides=(\{\"cluster.*\})'", text)
    jobs = {n: BatchJob.from_dict(one["parameters"]["job"]) for n, one in DEPLOYMENTS.items()}
    on_kubernetes = flows.with_changes(jobs["nightly"], json.loads(given), None)
    with policy_applied(read_policy(str(FOLDER / "policy.yaml"))):
        for job in (*jobs.values(), on_kubernetes):
            check_trust(job)
        for overrides in (
            {"source.uri": "/etc/passwd"},
            {"output.uri": "s3://elsewhere/x"},
            {"engine.tokenizer": "/etc"},
            {"prompt.template": None, "prompt.function": "acme:ask"},
        ):
            with pytest.raises(ConfigError, match=r"policy\.yaml|RAYBATCH_POLICY"):
                check_trust(flows.with_changes(jobs["dev"], overrides, None))
    env = DEPLOYMENTS["dev"]["work_pool"]["job_variables"]["env"]
    assert env["RAYBATCH_POLICY"] == "{{ $PWD }}/deployments/policy.yaml"
    assert 'RAYBATCH_POLICY="$PWD/deployments/policy.yaml" prefect worker start' in text


def test_the_kubernetes_manifests_fit_together() -> None:
    text = (FOLDER / "kuberay.yaml").read_text(encoding="utf-8")
    found = {item["kind"]: item for item in yaml.safe_load_all(text)}
    assert set(found) == {"RayCluster", "RayJob"}
    cluster = found["RayCluster"]["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    version = cluster["rayVersion"]
    assert version.startswith("2.60.")
    for group in groups:
        pod = group["template"]["spec"]
        shm = {v["name"] for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"}
        for container in pod["containers"]:
            mounts = {m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"}
            assert mounts and mounts <= shm
            assert "limits" in container["resources"]
    assert found["RayJob"]["spec"]["clusterSelector"] == {
        "ray.io/cluster": found["RayCluster"]["metadata"]["name"]
    }
    assert found["RayJob"]["spec"]["entrypoint"].startswith("raybatch run ")
    assert found["RayJob"]["spec"]["shutdownAfterJobFinishes"] is False


def test_a_flow_may_do_what_it_asks_of_kubernetes_and_no_more() -> None:
    text = (FOLDER / "kuberay-rbac.yaml").read_text(encoding="utf-8")
    found = {item["kind"]: item for item in yaml.safe_load_all(text)}
    for item in found.values():
        kubernetes_validate.validate(item, "1.31", strict=True)
    rules = {
        (group, resource): tuple(rule["verbs"])
        for rule in found["Role"]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert rules == VERBS
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"]
    (subject,) = found["RoleBinding"]["subjects"]
    assert subject["name"] == found["ServiceAccount"]["metadata"]["name"]


def test_a_deployment_can_be_told_to_make_its_cluster() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    (given,) = re.findall(r"-p 'overrides=(\{\"cluster.*\})'", text)
    job = BatchJob.from_dict(DEPLOYMENTS["nightly"]["parameters"]["job"])
    changed = flows.with_changes(job, json.loads(given), None)
    made = changed.cluster.access.kubernetes
    assert made is not None and made.workers == 4


# --- on a server --------------------------------------------------------------------------------


@pytest.mark.e2e
def test_what_is_deployed_is_whole_and_scheduled(deployed: Prefect) -> None:
    """Its runs, by a worker, are in test_browser.py."""
    found = deployed.deployments
    assert set(found) == {"dev", "cascade", "nightly"}
    for item in found.values():
        form_is_whole(item["parameter_openapi_schema"])
        assert item["work_pool_name"] == "raybatch"
        assert item["global_concurrency_limit"]["limit"] == 1
        assert item["concurrency_options"]["collision_strategy"] == "ENQUEUE"
        # Three heartbeats may be missing before a run is taken for gone.
        beat = item["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]
        assert 3 * float(beat) == automations_script().GONE_AFTER
        assert automations_script().HEARTBEAT_TAG in item["tags"]
    (schedule,) = found["nightly"]["schedules"]
    assert schedule["slug"] == "nightly" and schedule["active"]
    # Nothing of the machine that deploys goes with the deployment that other machines run.
    assert str(ROOT) not in str({**found["nightly"], "entrypoint": ""})

    night = found["nightly"]["id"]
    coming = deployed.until(
        lambda: deployed.ask("flow_runs/filter", {"deployments": {"id": {"any_": [night]}}}),
        180,
        "the nightly deployment's next runs",
    )
    for run in coming:
        start = datetime.fromisoformat(run["expected_start_time"])
        assert start.astimezone(ZoneInfo("Europe/Berlin")).strftime("%H:%M") == "02:00"
        assert start > datetime.now(UTC)
        made, by = FlowRun.model_validate(run), DeploymentResponse.model_validate(found["nightly"])
        assert zone_of(made, by) == ZoneInfo("Europe/Berlin")


@pytest.mark.e2e
@pytest.mark.nightly
def test_the_deployed_cascade_asks_a_real_server_about_the_hard_rows(
    deployed: Prefect, tmp_path: Path
) -> None:
    """A real engine answers all rows, and a real vllm serve those of which it is unsure."""
    rows = 60
    with vllm_server(tmp_path, served="large") as url:
        overrides = {
            "source.limit": rows,
            "output.uri": str(tmp_path / "out"),
            "output.escalate.to.endpoint": {"url": url, "model": "large"},
            "output.escalate.when.probability_below": 0.9999,
        }
        cascade = deployed.deployments["cascade"]["id"]
        given = {"parameters": {"overrides": overrides, "run_key": "hard"}}
        run = deployed.ask(f"deployments/{cascade}/create_flow_run", given)["id"]
        ended = deployed.until(
            lambda: (state := deployed.state(run))["type"] in TERMINAL and state, 600, "its end"
        )
    assert ended["type"] == "COMPLETED", ended
    folder = tmp_path / "out" / "hard"
    assert verify(open_store(str(folder))).ok
    result = ds.dataset(folder / "data").to_table().to_pylist()
    by_larger = [row for row in result if row["answered_by"] == "large"]
    assert len(result) == rows and 0 < len(by_larger) <= 0.3 * rows
    assert {row["industry"] for row in result} <= set(LABELS)
