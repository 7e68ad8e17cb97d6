"""What a run asks Kubernetes for: checked without asking anybody, and valid by its own schemas."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helpers.small import make_job
from hypothesis import given
from hypothesis import strategies as st

from prefect_raybatch.api import dry_run, plan_run, precheck
from prefect_raybatch.api.sending import sendable
from prefect_raybatch.compile.job import cluster_spec, size_spec
from prefect_raybatch.compile.resolved import fingerprint
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.kubernetes import GPU, Kubernetes, quantity
from prefect_raybatch.job.ray_cluster import PodGroup, check_shape, pod_groups
from prefect_raybatch.kuberay.manifest import (
    RunIdentity,
    differences,
    label_value,
    ray_cluster,
    spec_hash,
)
from prefect_raybatch.storage import open_store

ROOT = Path(__file__).parents[2]
LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
KEYS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)
RUN = RunIdentity("nightly-20260301T010000Z", "nightly", "s3://b/out/x", "f" * 64, "flow")


def made(**fields: Any) -> Kubernetes:
    return Kubernetes(**{"image": "registry/raybatch:1", **fields})


def refused(**fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_job(cluster={"kubernetes": fields})
    return str(caught.value)


def manifest() -> dict[str, Any]:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "spec": ray_cluster(made(), RUN)["spec"],
    }


def fits(template: dict[str, Any]) -> None:
    """Raises for a pod that the API server would refuse."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
    pod["metadata"] |= template.get("metadata", {})
    kubernetes_validate.validate(pod, "1.31", strict=True)


# --- names --------------------------------------------------------------------------------------


@given(KEYS)
def test_names_and_labels_are_what_kubernetes_takes(key: str) -> None:
    whose = RunIdentity(key, key, "/out", "f" * 64)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", whose.name) and len(whose.name) <= 40
    for value in whose.labels.values():
        assert LABEL.fullmatch(value) and len(value) <= 63


@given(st.lists(KEYS, min_size=2, max_size=2, unique=True))
def test_two_run_keys_have_two_names(keys: list[str]) -> None:
    one, other = (RunIdentity(key, "job", "/out", "f") for key in keys)
    assert one.name != other.name and one.labels != other.labels


@given(st.text(max_size=200))
def test_any_text_becomes_a_label(text: str) -> None:
    value = label_value(text)
    assert LABEL.fullmatch(value) and 0 < len(value) <= 63


# --- the RayCluster -----------------------------------------------------------------------------


def test_it_has_what_the_fields_say() -> None:
    asked = made(
        workers=4,
        gpus_per_worker=2,
        worker_cpu="12",
        worker_memory="96Gi",
        head_cpu="1500m",
        shm="16Gi",
        service_account="ray",
        env={"VLLM_USE_V1": "1"},
        secrets=["keys"],
    )
    body = ray_cluster(asked, RUN)
    assert body["metadata"]["name"] == RUN.name
    assert body["metadata"]["labels"]["raybatch/run-key"] == RUN.run_key
    assert body["metadata"]["annotations"]["raybatch/run"] == RUN.run
    head, (group,) = body["spec"]["headGroupSpec"], body["spec"]["workerGroupSpecs"]
    assert head["rayStartParams"] == {"dashboard-host": "0.0.0.0", "num-cpus": "1"}
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (4, 4, 4)
    for part in (head, group):
        fits(part["template"])
        (container,) = part["template"]["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
        assert container["env"] == [{"name": "VLLM_USE_V1", "value": "1"}]
        assert part["template"]["metadata"]["labels"] == RUN.labels
        assert part["template"]["spec"]["serviceAccountName"] == "ray"
        assert part["template"]["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] == "16Gi"
    (worker,) = group["template"]["spec"]["containers"]
    assert worker["resources"]["limits"] == {"cpu": "12", "memory": "96Gi", "nvidia.com/gpu": "2"}
    assert "nvidia.com/gpu" not in str(head)


def test_a_manifest_is_taken_as_it_is(tmp_path: Path) -> None:
    given_ = manifest()
    given_["metadata"] = {"labels": {"team": "data"}}
    given_["spec"]["workerGroupSpecs"][0]["replicas"] = 7
    body = ray_cluster(Kubernetes(manifest=given_), RUN)
    assert body["metadata"]["labels"] == {"team": "data", **RUN.labels}
    assert body["spec"]["workerGroupSpecs"][0]["replicas"] == 7
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(given_))
    of_file = ray_cluster(Kubernetes(manifest_file=str(tmp_path / "m.yaml")), RUN)
    assert of_file == body
    assert spec_hash(body["spec"]) == spec_hash(of_file["spec"])


def test_the_example_manifest_can_be_given() -> None:
    asked = Kubernetes(manifest_file=str(ROOT / "deployments/kuberay.yaml"))
    for part in ray_cluster(asked, RUN)["spec"]["workerGroupSpecs"]:
        fits(part["template"])
    check_shape(asked, make_job(engine={"replicas": 4}).engine)
    with pytest.raises(ConfigError, match="5 replicas of 1 GPU"):
        check_shape(asked, make_job(engine={"replicas": 5}).engine)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "no file or folder"),
        ("a: [", "is not valid YAML"),
        ("a: 1", "contains 0 RayClusters; it must contain one"),
        (
            "a: 1\n---\nb: {c: 1,\n  c: 2}",
            "b.c: duplicate key in lines 3 and 4; remove all but one",
        ),
        ("{apiVersion: ray.io/v1, kind: RayCluster}", "spec must be a mapping"),
    ],
)
def test_a_manifest_file_that_cannot_be_used_is_named(
    tmp_path: Path, text: str | None, why: str
) -> None:
    path = tmp_path / "m.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=why) as caught:
        ray_cluster(Kubernetes(manifest_file=str(path)), RUN)
    assert str(path) in str(caught.value)


def test_differences_name_the_fields() -> None:
    wanted = ray_cluster(made(workers=4), RUN)["spec"]
    there = ray_cluster(made(), RUN)["spec"]
    there["suspend"] = False  # a default of the operator's is no difference
    assert next(differences(wanted, there)) == (
        "spec.workerGroupSpecs[0].replicas: 1 there, 4 in the job"
    )
    assert list(differences(there, there)) == []


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"workers": 2}, "image is missing"),
        ({"image": "a", "worker_memory": "32GB"}, "'32GB' is not a Kubernetes quantity"),
        ({"image": "a", "worker_memory": "32"}, "did you mean 32Gi"),
        ({"image": "a", "head_cpu": "0"}, "is not above 0"),
        ({"image": "a", "gpus_per_worker": -1}, "gpus_per_worker"),
        ({"image": "a", "namespace": "My_Space"}, "not a Kubernetes name"),
        ({"image": "a", "secrets": ["A/B"]}, "not the name of a Secret"),
        ({"image": "a", "env": {"HF_TOKEN": "hf_x"}}, "HF_TOKEN may be a key"),
        ({"image": "a", "env": {"A B": "x"}}, "not the name of a variable"),
        ({"image": "a", "url": "http://{x}:1"}, "use only {name} and {namespace}"),
        ({"image": "a", "url": "http://{name[1]}.de"}, "use only {name} and {namespace}"),
        ({"image": "a", "url": "http://{name.x}.de"}, "use only {name} and {namespace}"),
        ({"image": "a", "url": "http://{name:>9}.de"}, "use only {name} and {namespace}"),
        ({"image": "a", "url": "http://{name!s}.de"}, "use only {name} and {namespace}"),
        ({"image": "a", "url": "http://{{name}}.de"}, "use only {name} and {namespace}"),
        ({"image": "a", "url": "http://{name.de"}, "use only {name} and {namespace}"),
        ({"image": "a", "url": "h:1"}, "not the URL of a job server"),
        ({"image": "a", "lease": "30s"}, "too short"),
        ({"image": "a", "keep": "0s"}, "is zero"),
        ({"image": "a", "ready_within": "soon"}, "not a duration"),
        ({"image": "a", "imag": "b"}, "imag"),
        ({"image": "a", "manifest_file": "m.yaml"}, "image cannot be combined with manifest_file"),
        ({"manifest": {}, "manifest_file": "m.yaml"}, "apiVersion and kind are None and None"),
        ({"manifest": manifest(), "manifest_file": "m.yaml"}, "remove one"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], why: str) -> None:
    text = refused(**fields)
    assert why in text and "cluster.kubernetes" in text
    assert "hf_x" not in text


def broken(where: str, value: object) -> dict[str, Any]:
    """The manifest with one field changed; a value of None takes it away."""
    found: Any = manifest()
    found.setdefault("metadata", {})
    parts = [int(part) if part.isdigit() else part for part in where.split(".")]
    at = found
    for part in parts[:-1]:
        at = at[part]
    if value is None:
        del at[parts[-1]]
    else:
        at[parts[-1]] = value
    return found


POD = "spec.headGroupSpec.template.spec"


@pytest.mark.parametrize(
    ("where", "value", "why"),
    [
        ("kind", "RayJob", "write ray.io/v1 and RayCluster"),
        ("metadata.name", "mine", "metadata.name is set from the run key"),
        ("metadata.namespace", "mine", "remove it"),
        ("metadata.labels", {"a": 1}, "metadata.labels.a: 1 is not text"),
        ("spec.headGroupSpec", None, "spec.headGroupSpec must be a mapping"),
        ("spec.workerGroupSpecs", [], "write at least one group"),
        ("spec.workerGroupSpecs.0.groupName", "A B", "is not a valid name"),
        ("spec.workerGroupSpecs.0.replicas", "2", "'2' is not a number of pods"),
        (f"{POD}.containers", None, "write at least one container"),
        (f"{POD}.containers.0.image", None, "containers[0].image is missing"),
        (
            f"{POD}.containers.0.resources.limits.cpu",
            "two",
            "limits.cpu: 'two' is not a Kubernetes quantity",
        ),
        (f"{POD}.containers.0.env", [{"name": "MY_KEY", "value": "s"}], "MY_KEY may be a key"),
    ],
)
def test_a_wrong_manifest_names_its_field(where: str, value: object, why: str) -> None:
    assert why in refused(manifest=broken(where, value))


@pytest.mark.parametrize(
    ("fields", "engine", "why"),
    [
        ({}, {"tensor_parallel_size": 2}, "an engine needs 2 GPUs .* and a worker has 1"),
        ({"workers": 2}, {"replicas": 3}, "3 replicas of 1 GPU .* 2 workers of 1 GPU"),
        (
            {"workers": 2, "gpus_per_worker": 3},
            {"replicas": 3, "tensor_parallel_size": 2},
            "need 6 GPUs, and 2 workers of 3 GPUs have room for 4 GPUs",
        ),
        ({"gpus_per_worker": 0}, {"device": "gpu"}, "no worker has a GPU"),
    ],
)
def test_engines_that_never_fit_are_refused(
    fields: dict[str, Any], engine: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        check_shape(made(**fields), make_job(engine=engine).engine)


@pytest.mark.parametrize(
    ("fields", "engine"),
    [
        ({"workers": 3}, {"replicas": 3}),
        ({"workers": 2, "gpus_per_worker": 4}, {"replicas": [4, 8], "tensor_parallel_size": 2}),
        ({"gpus_per_worker": 0}, {"device": "cpu", "replicas": 4}),
        ({"gpus_per_worker": 0}, {}),
        (
            {"workers": 2},
            {"tensor_parallel_size": 2, "replicas": 1, "distributed_executor_backend": "ray"},
        ),
    ],
)
def test_engines_that_fit_are_let_through(fields: dict[str, Any], engine: dict[str, Any]) -> None:
    check_shape(made(**fields), make_job(engine=engine).engine)


def test_one_way_to_a_cluster() -> None:
    for other in ({"address": "auto"}, {"job_server": "http://h:1"}, {"block": "ray-cluster/x"}):
        with pytest.raises(ConfigError, match="remove one"):
            make_job(cluster={"kubernetes": {"image": "a"}, **other})


def test_a_form_that_sends_the_group_empty_asks_for_none() -> None:
    for empty in ({}, {"env": {}, "secrets": []}, Kubernetes().model_dump()):
        made_ = make_job(cluster={"kubernetes": empty})
        assert made_.cluster.access.kubernetes is None and made_.to_dict() == make_job().to_dict()


def test_where_it_runs_is_not_in_the_answers() -> None:
    here, there = make_job(), make_job(cluster={"kubernetes": {"image": "a"}})
    assert fingerprint(here) == fingerprint(there)
    assert "kubernetes" not in str(sendable(there))


def test_quantities() -> None:
    assert quantity("500m") == Decimal("0.5") and quantity("2Gi") == 2**31
    assert quantity(8) == 8 and quantity("1.5M") == 1_500_000
    for wrong in ("", "8 Gi", "-1", "1e3", True, None, "8gi"):
        with pytest.raises(ValueError, match="is not a Kubernetes quantity"):
            quantity(wrong)


def test_sizes_are_for_the_pods_that_are_asked_for() -> None:
    from prefect_raybatch.cluster.connect import glance
    from prefect_raybatch.cluster.sizes import capacity_or_assumed, engines_to_plan_for

    shape = {"image": "r/b:1", "workers": 3, "gpus_per_worker": 2, "worker_cpu": "12500m"}
    job = make_job(cluster={"kubernetes": shape}, engine={"replicas": "auto", "engines_per_gpu": 1})
    have = glance(cluster_spec(job))
    assert have is not None and not have.assumed and have.gpus_by_node == (2.0, 2.0, 2.0)
    assert (have.gpus, have.nodes, have.cpus, have.cpus_a_gpu) == (6.0, 4, 41.0, 6.5)
    assert capacity_or_assumed(size_spec(job), cluster_spec(job)) == (have, [])
    model = {"source": "demo", "revision": None, "identity": "-"}
    assert engines_to_plan_for(size_spec(job), cluster_spec(job), model, 40.0) == 6


def test_pods_of_a_manifest_have_what_ray_is_told_or_their_containers_may_take() -> None:
    manifest, *_ = yaml.safe_load_all((ROOT / "deployments/kuberay.yaml").read_text())
    spec = manifest["spec"]
    manifest["metadata"].pop("name"), manifest["metadata"].pop("namespace", None)
    asked = Kubernetes(manifest=manifest)
    head, *workers = pod_groups(asked)
    assert (head.pods, head.gpus) == (1, 0)
    (group,) = spec["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    gpus, cpus = int(limits["nvidia.com/gpu"]), float(quantity(limits["cpu"]))
    told = group["rayStartParams"].get("num-cpus")
    cpus = float(told) if told else cpus
    assert workers == [PodGroup(group["groupName"], group["replicas"], gpus, cpus)]
    group["rayStartParams"] = {}
    container["resources"] = {"requests": {"cpu": "1500m"}, "limits": {"nvidia.com/gpu": 4}}
    # KubeRay tells Ray of whole CPUs, the next higher number of them.
    assert pod_groups(asked.model_copy(update={"manifest": manifest}))[1][2:] == (4, 2.0)


def test_only_rays_own_container_counts() -> None:
    """The first: KubeRay starts Ray in it, by its resources; others stand beside."""
    given_ = manifest()
    group = given_["spec"]["workerGroupSpecs"][0]
    beside = {"name": "logs", "image": "logs:1", "resources": {"limits": {"cpu": "3", GPU: 1}}}
    group["template"]["spec"]["containers"].append(beside)
    assert pod_groups(Kubernetes(manifest=given_))[1] == PodGroup("workers", 1, 1, 8.0)
    group["rayStartParams"] = {"num-gpus": "0", "num-cpus": "0"}
    assert pod_groups(Kubernetes(manifest=given_))[1] == PodGroup("workers", 1, 0, 0.0)


@pytest.mark.parametrize("cpu", ["1", "1500m", "2500m", "4"])
def test_sizes_are_for_the_cpus_that_ray_is_told_of_on_the_head(cpu: str) -> None:
    asked = made(head_cpu=cpu)
    head = ray_cluster(asked, RUN)["spec"]["headGroupSpec"]
    assert pod_groups(asked)[0].cpus == float(head["rayStartParams"]["num-cpus"])
    assert pod_groups(Kubernetes(manifest=manifest()))[1] == pod_groups(made())[1]


@pytest.mark.parametrize("number", ["four", "1.5", "-1", ""])
def test_a_number_of_cpus_that_is_none_is_named(number: str) -> None:
    given_ = manifest()
    given_["spec"]["workerGroupSpecs"][0]["rayStartParams"] = {"num-cpus": number}
    told = refused(manifest=given_)
    assert "spec.workerGroupSpecs[0].rayStartParams.num-cpus: " in told and "write" in told


@pytest.mark.parametrize("wrong", ["engine", "output.escalate.to"])
def test_both_engines_of_a_cascade_must_fit(tmp_path: Path, wrong: str) -> None:
    engines = {"engine": {"model": "demo"}, "output.escalate.to": {"model": "demo"}}
    engines[wrong] |= {"tensor_parallel_size": 2}
    rule = {"to": engines["output.escalate.to"], "when": {"probability_below": 0.9}}
    job = make_job(
        engine=engines["engine"],
        sampling={"choice": ["a", "b"]},
        cluster={"kubernetes": {"image": "registry/raybatch:1", "workers": 2}},
        output={"uri": str(tmp_path / "out"), "escalate": rule},
    )
    store = open_store(str(tmp_path / "out/night"))
    for check in (
        lambda: dry_run(job),
        lambda: plan_run(job, "night"),
        lambda: precheck(job, store),
    ):
        with pytest.raises(ConfigError) as caught:
            check()
        text = str(caught.value)
        assert "needs 2 GPUs" in text and f"({wrong}.tensor_parallel_size 2" in text
