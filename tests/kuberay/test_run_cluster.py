"""A run's cluster at an API server: one for a run, found again by name, ended by who holds it."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command_line import called
from helpers.environ import dying_with_us
from helpers.kube_server import KubeServer, Refused
from helpers.small import make_job
from helpers.tls import untrusted_server

from prefect_raybatch.doctor import services
from prefect_raybatch.errors import (
    ClusterNotReady,
    ClusterUnavailable,
    ConfigError,
    InsufficientResources,
)
from prefect_raybatch.flow.blocks import RayCluster
from prefect_raybatch.flow.reconcile import reconcile_jobs
from prefect_raybatch.job.kubernetes import Kubernetes
from prefect_raybatch.kuberay import api as kube_api
from prefect_raybatch.kuberay.api import KubeApi
from prefect_raybatch.kuberay.manifest import DEADLINE, HOLDER, RunIdentity
from prefect_raybatch.kuberay.run_cluster import RunCluster, delete_expired, notes_of
from prefect_raybatch.policy.in_force import policy_applied
from prefect_raybatch.policy.policy import JobPolicy

RUN = RunIdentity("night", "nightly", "s3://b/out/night", "f" * 64)
NAME = RUN.name


def asked(**fields: Any) -> Kubernetes:
    return Kubernetes(**{"image": "registry/raybatch:1", "workers": 2, **fields})


class Sleeper:
    """Sleeps not at all; each sleep is the next step of what happens meanwhile."""

    def __init__(self, *steps: Callable[[], None]):
        self.steps, self.slept = list(steps), 0

    def __call__(self, seconds: float) -> None:
        self.slept += 1
        assert self.slept < 200, "waits for ever"
        if self.steps:
            self.steps.pop(0)()


def cluster(
    kubernetes: Kubernetes | None = None,
    owner: RunIdentity = RUN,
    told: list[str] | None = None,
    sleep: Sleeper | None = None,
) -> RunCluster:
    kubernetes, sleep = kubernetes or asked(), sleep or Sleeper()
    tell = (lambda text: None) if told is None else told.append
    return RunCluster(kubernetes, owner, KubeApi(kubernetes, 60, sleep), tell, sleep)


def past(kube: KubeServer) -> None:
    """As if its flow had been dead for longer than the lease."""
    kube[NAME]["metadata"]["annotations"][DEADLINE] = "2026-01-01T00:00:00+00:00"


# --- make, wait, end ----------------------------------------------------------------------------


def test_a_cluster_is_made_awaited_and_deleted(kube: KubeServer) -> None:
    told: list[str] = []
    steps = [
        lambda: kube.pod(NAME, "head"),
        lambda: kube.pod(NAME, "worker", 0),
        lambda: kube.pod(NAME, "worker", 1),
    ]
    with cluster(told=told, sleep=Sleeper(*steps)) as made:
        assert made.url == f"http://{NAME}-head-svc.ray.svc:8265"
        made.wait_ready()
        assert [text.rpartition(",")[0] for text in told] == [
            "head not ready",
            "0 of 2 workers ready",
            "1 of 2 workers ready",
            "2 of 2 workers ready",
        ]
        left = datetime.fromisoformat(notes_of(kube[NAME])[DEADLINE]) - datetime.now(UTC)
        assert timedelta(minutes=50) < left <= timedelta(hours=1)
        made.end(keep=True)
    assert kube.names == [] and kube.objects["pods"] == {}


def test_the_flow_names_where_it_reaches_the_job_server(kube: KubeServer) -> None:
    made = cluster(asked(url="https://{name}.{namespace}.example.com/"))
    assert made.url == f"https://{NAME}.ray.example.com"


def test_the_url_that_is_used_is_compared_with_the_policy(kube: KubeServer) -> None:
    """The policy in force names a host; the run key is part of the host that is used."""
    made = cluster(asked(url="https://{name}.com"))
    for hosts in (("*.com",), (f"{NAME}.com",)):
        with policy_applied(JobPolicy("p", hosts=hosts)):
            assert made.url == f"https://{NAME}.com"
    refused = rf"cluster\.kubernetes\.url: .* name the host {NAME}\.com"
    with policy_applied(JobPolicy("p", hosts=("raybatch-run.com",))):
        with pytest.raises(ConfigError, match=refused):
            _ = made.url
        assert cluster().url.endswith(".svc:8265")  # of the cluster's own network


def test_of_many_flows_one_makes_it_and_the_last_holds_it(kube: KubeServer) -> None:
    flows = [cluster() for _ in range(6)]
    threads = [threading.Thread(target=flow.attach) for flow in flows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kube.names == [NAME]
    holder = notes_of(kube[NAME])[HOLDER]
    assert sum(flow.holder == holder for flow in flows) == 1
    for flow in flows:
        if flow.holder != holder:
            flow.end()
    assert kube.names == [NAME], "only its holder ends it"
    next(flow for flow in flows if flow.holder == holder).end()
    assert kube.names == []


def test_a_second_flow_takes_over_and_the_first_lets_go(
    kube: KubeServer, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = cluster(), cluster()
    first.attach()
    uid = kube[NAME]["metadata"]["uid"]
    second.attach()
    assert kube[NAME]["metadata"]["uid"] == uid, "the same cluster"
    first.renew()
    assert f"is held by {second.holder} now" in caplog.text
    deadline = notes_of(kube[NAME])[DEADLINE]
    past(kube)
    first.renew()
    assert notes_of(kube[NAME])[DEADLINE] < deadline, "it no longer renews"
    second.renew()
    assert notes_of(kube[NAME])[DEADLINE] >= deadline
    first.end()
    assert kube.names == [NAME]


FLOW = """
import time
from prefect_raybatch.job.kubernetes import Kubernetes
from prefect_raybatch.kuberay.api import KubeApi
from prefect_raybatch.kuberay.manifest import RunIdentity
from prefect_raybatch.kuberay.run_cluster import RunCluster
made = Kubernetes(image="registry/raybatch:1", workers=2)
whose = RunIdentity("night", "nightly", "s3://b/out/night", "f" * 64)
with RunCluster(made, whose, KubeApi(made)) as cluster:
    print(cluster.holder, flush=True)
    time.sleep(600)
"""


def test_after_kill_9_the_next_flow_takes_the_cluster_by_its_name(
    kube: KubeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    command = dying_with_us(sys.executable, "-c", FLOW)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flow:
        assert flow.stdout is not None
        first = flow.stdout.readline().strip()
        flow.kill()
    assert flow.returncode == -signal.SIGKILL
    assert notes_of(kube[NAME])[HOLDER] == first, "its cluster is there, and nobody renews it"
    uid = kube[NAME]["metadata"]["uid"]
    with cluster() as second:
        assert kube[NAME]["metadata"]["uid"] == uid
        assert notes_of(kube[NAME])[HOLDER] == second.holder
        assert f"using the RayCluster {NAME}, previously held by {first}" in caplog.text
        second.end()
    assert kube.names == []


def test_a_status_written_meanwhile_does_not_keep_it_from_ending(kube: KubeServer) -> None:
    made = cluster()
    made.attach()
    kube.put("rayclusters", kube[NAME])  # a new resourceVersion
    made.end()
    assert kube.names == []


def test_one_that_is_ending_is_waited_for_and_made_anew(kube: KubeServer) -> None:
    told: list[str] = []
    first = cluster()
    first.attach()
    kube[NAME]["metadata"]["finalizers"] = ["kept/until-later"]
    first.end()
    uid = kube[NAME]["metadata"]["uid"]
    sleep = Sleeper(lambda: None, lambda: kube.release(NAME))
    second = cluster(told=told, sleep=sleep)
    second.attach()
    assert kube[NAME]["metadata"]["uid"] != uid and sleep.slept == 2
    assert all("former cluster terminating" in text for text in told)


def test_it_is_kept_for_a_while_where_that_is_asked(kube: KubeServer) -> None:
    made = cluster(asked(keep="30m"))
    made.attach()
    made.end(keep=True)
    left = datetime.fromisoformat(notes_of(kube[NAME])[DEADLINE]) - datetime.now(UTC)
    assert timedelta(minutes=29) < left <= timedelta(minutes=30)
    cluster().end_left_over()
    assert kube.names == [NAME], "it is kept on request"
    again = cluster(asked(keep="30m"))
    again.attach()
    again.end()  # cancelled: nobody looks into it
    assert kube.names == []


def test_what_a_dead_flow_left_of_a_whole_run_is_deleted(kube: KubeServer) -> None:
    cluster().attach()
    cluster().end_left_over()
    assert kube.names == []
    cluster().end_left_over()  # nothing is there


# --- another's ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("whose", "why"),
    [
        (RunIdentity("night", "other", RUN.run, RUN.fingerprint), "another run of job nightly"),
        (RunIdentity("night", "nightly", RUN.run, "0" * 64), "raybatch/fingerprint"),
        (RunIdentity("night", "nightly", "s3://b/x", RUN.fingerprint), "run directory: s3://b/out"),
    ],
)
def test_a_cluster_of_another_job_is_refused(
    kube: KubeServer, whose: RunIdentity, why: str
) -> None:
    cluster().attach()
    before = notes_of(kube[NAME])
    second = cluster(owner=whose)
    with pytest.raises(ConfigError, match=why):
        second.attach()
    second.end()
    assert notes_of(kube[NAME]) == before


def test_a_name_that_is_taken_by_others_is_said(kube: KubeServer) -> None:
    kube.put("rayclusters", {"metadata": {"name": NAME, "labels": {}}, "spec": {}})
    with pytest.raises(
        ConfigError, match=rf"not created by raybatch.*kubectl delete raycluster {NAME}"
    ):
        cluster().attach()


def test_another_spec_is_refused_by_its_fields(kube: KubeServer) -> None:
    cluster().attach()
    with pytest.raises(ConfigError, match=r"replicas: 2 there, 3 in the job; .*Delete it"):
        cluster(asked(workers=3)).attach()


# --- what keeps it from coming up ---------------------------------------------------------------


def waiting(reason: str, message: str = "", restarts: int = 0, **more: Any) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    one = {"image": "registry/raybatch:1", "state": state, "restartCount": restarts, **more}
    return {"containerStatuses": [one]}


def test_an_image_that_cannot_be_pulled_ends_the_wait(kube: KubeServer) -> None:
    made = cluster()
    made.attach()
    kube.pod(NAME, "head", **waiting("ImagePullBackOff", "not found"))
    with pytest.raises(ClusterNotReady, match=r"image registry/raybatch:1 .* cannot be pulled"):
        made.wait_ready()


def test_a_head_that_keeps_crashing_ends_the_wait(kube: KubeServer) -> None:
    last = {"lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}
    steps = [lambda: kube.pod(NAME, "head", **waiting("CrashLoopBackOff", "", 3, **last))]
    made = cluster(sleep=Sleeper(*steps))
    made.attach()
    kube.pod(NAME, "head", **waiting("CrashLoopBackOff", "", 1, **last))  # it may still mend
    with pytest.raises(
        ClusterNotReady, match=r"3 restarts, the last after OOMKilled, exit code 137"
    ):
        made.wait_ready()


@pytest.mark.parametrize("kind", ["unschedulable", "quota", "secret", "volume"])
def test_what_may_mend_itself_is_said_once_and_waited_for(
    kube: KubeServer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    made = cluster(sleep=Sleeper(lambda: None, lambda: kube.come_up(NAME, 2)))
    made.attach()
    if kind == "unschedulable":
        no = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: nvidia.com/gpu"}
        kube.pod(NAME, "head", conditions=[no])
        why = "cannot be scheduled: 0/3 nodes: nvidia.com/gpu. Add nodes"
    elif kind == "quota":
        kube.warning(NAME, "FailedToCreateWorkerPod", "forbidden: exceeded quota: gpus")
        why = "a quota is exceeded (forbidden: exceeded quota: gpus)"
    elif kind == "secret":
        kube.pod(NAME, "head", **waiting("CreateContainerConfigError", 'secret "x" not found'))
        why = 'secret "x" not found'
    else:
        kube.warning(f"{NAME}-worker-0", "FailedMount", "no such volume")
        why = "FailedMount: no such volume"
    kube.warning("another-cluster", "FailedMount", "not ours")
    made.wait_ready()
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1 and why in said[0]


def test_the_wait_has_an_end(kube: KubeServer) -> None:
    made = cluster(asked(ready_within="0.001s"))
    made.attach()
    kube.warning(NAME, "FailedToCreateHeadPod", "admission webhook said no")
    with pytest.raises(ClusterNotReady, match=r"head not ready after .*admission webhook said no"):
        made.wait_ready()


def test_one_that_is_deleted_meanwhile_is_said(kube: KubeServer) -> None:
    made = cluster(sleep=Sleeper(lambda: kube.objects["rayclusters"].clear()))
    made.attach()
    with pytest.raises(ClusterNotReady, match="was deleted while it started"):
        made.wait_ready()


# --- an API server that refuses, or is away -----------------------------------------------------


@pytest.mark.parametrize("verb", ["get", "create", "patch"])
def test_a_right_that_is_missing_is_named_with_its_rule(kube: KubeServer, verb: str) -> None:
    if verb == "patch":
        cluster().attach()
    kube.denied.add((verb, "rayclusters"))
    rule = rf'no permission to {verb} rayclusters in namespace ray: .*apiGroups: \["ray.io"\], '
    rule += rf"resources: \[rayclusters\], verbs: \[{verb}\]"
    with pytest.raises(ConfigError, match=rule):
        cluster().attach()


def test_kuberay_that_is_not_installed_is_said(kube: KubeServer) -> None:
    kube.installed = False
    with pytest.raises(ConfigError, match="Install the KubeRay operator"):
        cluster().attach()


def test_a_namespace_that_is_not_there_is_said(kube: KubeServer) -> None:
    with pytest.raises(ConfigError, match="namespace elsewhere does not exist"):
        cluster(asked(namespace="elsewhere")).attach()


def test_a_quota_of_clusters_is_said(kube: KubeServer) -> None:
    kube.quota = "exceeded quota: clusters, requested: 1, used: 3, limited: 3"
    with pytest.raises(InsufficientResources, match=r"a quota is exceeded .*limited: 3"):
        cluster().attach()


def test_an_answer_that_is_lost_makes_no_second_cluster(kube: KubeServer) -> None:
    """The server has done what was asked, and its answer did not come: the next try finds it."""

    def lose(what: str, found: dict[str, Any]) -> None:
        kube.operate = lambda what, found: None
        raise Refused(503, "the server is currently unable to handle the request")

    made = cluster()
    kube.operate = lose
    made.attach()
    assert kube.names == [NAME] and notes_of(kube[NAME])[HOLDER] == made.holder


def test_a_server_that_is_away_is_asked_again_and_that_is_said_once(
    kube: KubeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    kube.away = 5
    cluster().attach()
    said = [r.getMessage() for r in caplog.records if "API server" in r.getMessage()]
    assert len(said) == 2 and "does not answer (503" in said[0] and "answers again" in said[1]


def test_a_server_that_stays_away_is_named(kube: KubeServer) -> None:
    kube.away = 10**6
    with pytest.raises(ClusterUnavailable, match=rf"API server at {kube.url} is unavailable"):
        KubeApi(asked(), patience=0.0).get(NAME)


def test_a_certificate_that_is_not_trusted_is_no_outage(kube: KubeServer, tmp_path: Path) -> None:
    with untrusted_server(tmp_path) as kube.url:
        kube.kubeconfig(tmp_path / "kubeconfig")
        sleep = Sleeper()
        with pytest.raises(ConfigError, match=r"self-signed certificate\. .*certificate-authority"):
            KubeApi(asked(), 60, sleep).get("x")
    assert sleep.slept == 0


def test_a_certificate_authority_that_is_no_pem_is_no_outage(
    kube: KubeServer, tmp_path: Path
) -> None:
    wrong = tmp_path / "ca.der"
    wrong.write_bytes(b"\x30\x82")
    with untrusted_server(tmp_path) as kube.url:
        config = kube.kubeconfig(tmp_path / "kubeconfig")
        value = yaml.safe_load(config.read_text())
        value["clusters"][0]["cluster"]["certificate-authority"] = str(wrong)
        config.write_text(yaml.safe_dump(value))
        sleep = Sleeper()
        with pytest.raises(ConfigError, match=r"certificate-authority: '.*ca\.der' is not a r"):
            KubeApi(asked(), 60, sleep).get("x")
    assert sleep.slept == 0


def test_a_cluster_that_cannot_be_deleted_is_left_to_its_lease(
    kube: KubeServer, caplog: pytest.LogCaptureFixture
) -> None:
    made = cluster()
    made.attach()
    kube.denied.add(("delete", "rayclusters"))
    made.end()
    assert f"kubectl delete raycluster {NAME}, or raybatch reconcile kubernetes/ray" in caplog.text


def test_without_a_kubeconfig_and_outside_of_a_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no kubeconfig, and this is not a pod"):
        KubeApi(asked())


def test_a_context_that_is_not_there_is_named(kube: KubeServer) -> None:
    assert KubeApi(asked(context="test")).namespace == "ray"
    with pytest.raises(ConfigError, match=r"kubernetes\.context: prod"):
        KubeApi(asked(context="prod"))


@pytest.mark.parametrize("current", [None, "", "gone"])
def test_a_named_context_needs_no_current_one(
    kube: KubeServer, tmp_path: Path, current: str | None
) -> None:
    kubeconfig = yaml.safe_load((tmp_path / "kubeconfig").read_text())
    del kubeconfig["current-context"]
    if current is not None:
        kubeconfig["current-context"] = current
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    found = KubeApi(asked(context="test"))
    assert (found.namespace, found.server) == ("ray", kube.url)
    with pytest.raises(ConfigError, match=r"current-context|object with name"):
        KubeApi(asked())


@pytest.mark.parametrize("text", [b"a: [b", b"[1]", b"words", b"\xff\xfe"])
@pytest.mark.parametrize("context", [None, "test"])
def test_a_kubeconfig_that_is_none_is_said(
    kube: KubeServer, tmp_path: Path, text: bytes, context: str | None
) -> None:
    (tmp_path / "kubeconfig").write_bytes(text)
    with pytest.raises(ConfigError, match=r"the kubeconfig .*/kubeconfig cannot be read: .+\. Cor"):
        KubeApi(asked(context=context))


def test_in_a_pod_its_service_account_is_used(
    kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kubernetes import config

    def load(client_configuration: Any) -> None:
        client_configuration.host = kube.url

    (tmp_path / "namespace").write_text("ray\n")
    monkeypatch.setattr(kube_api, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setattr(config, "load_incluster_config", load)
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    found = KubeApi(asked())
    assert (found.namespace, found.server) == ("ray", kube.url) and found.get("x") is None


# --- what nobody keeps alive --------------------------------------------------------------------


def test_a_cluster_past_its_lease_is_deleted_and_no_other(kube: KubeServer) -> None:
    other = RunIdentity("other", "nightly", "s3://b/out/other", "f" * 64)
    for whose in (RUN, other):
        cluster(owner=whose).attach()
    kube.put("rayclusters", {"metadata": {"name": "theirs", "labels": {}}, "spec": {}})
    past(kube)
    assert [action.what for action in reconcile_jobs("kubernetes/ray", dry_run=True)].count(
        "deleted"
    ) == 1
    assert len(kube.names) == 3
    found = {action.job: action for action in reconcile_jobs("kubernetes/ray")}
    assert found[NAME].what == "deleted" and "its lease expired at 2026-01-01" in found[NAME].why
    assert found[other.name].what == "kept" and "lasts until" in found[other.name].why
    assert kube.names == [other.name, "theirs"]


def test_a_flow_that_comes_back_meanwhile_keeps_its_cluster(kube: KubeServer) -> None:
    cluster().attach()
    past(kube)

    class Slow(KubeApi):
        def delete(self, found: Any, unchanged: bool = False) -> bool:
            cluster().attach()
            return super().delete(found, unchanged)

    (told,) = delete_expired(Slow(asked()))
    assert not told.over and told.why == "its flow renewed the lease"
    assert kube.names == [NAME]


def test_the_command_deletes_what_nobody_keeps_alive(
    kube: KubeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster().attach()
    past(kube)
    monkeypatch.setattr(services, "check_api", lambda: None)
    code, out, _ = called(capsys, "reconcile", "kubernetes/ray")
    assert code == 0 and f"deleted  {NAME}" in out
    assert kube.names == []


def test_doctor_asks_the_server_and_names_what_is_missing(kube: KubeServer) -> None:
    fine = services.kubernetes(asked())
    assert fine.found == f"namespace ray at {kube.url}: each run creates a RayCluster"
    kube.denied |= {("delete", "rayclusters"), ("list", "events")}
    assert "no permission to delete rayclusters, list events" in services.kubernetes(asked()).found
    kube.installed = False
    assert "Install the KubeRay operator" in services.kubernetes(asked()).found


def test_a_block_says_the_same_as_a_job() -> None:
    fields = {"image": "registry/raybatch:1", "workers": 2}
    block = RayCluster(kubernetes=fields, token="t")
    assert block.access().kubernetes == asked()
    with pytest.raises(ValueError, match="remove one"):
        RayCluster(kubernetes=fields, job_server="http://h:8265")
    here = make_job(cluster={"address": "auto", "on_crash": "stop"})
    with pytest.raises(ConfigError, match="save it first"):  # its token cannot stand in a job
        block.apply(here)
    job = RayCluster(kubernetes=fields).apply(here)
    made = job.cluster
    assert (made.kubernetes, made.address, made.on_crash) == (asked(), None, "stop")
    assert RayCluster().apply(job).cluster.access.kubernetes is None


def test_reconcile_says_what_it_does_not_know() -> None:
    with pytest.raises(ConfigError, match="write kubernetes/NAMESPACE"):
        reconcile_jobs("kubernetes/My Space")
