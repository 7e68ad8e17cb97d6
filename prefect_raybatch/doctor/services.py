"""Checks of network services: Prefect's API, the Ray cluster, and their clocks."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import replace
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prefect_raybatch import cpu_limit
from prefect_raybatch.bounded import read_regular_file, within
from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.cluster.reach import token_refusal, unreachable_reason
from prefect_raybatch.cluster.tokens import token_missing, token_sent, token_wrong
from prefect_raybatch.compile.job import size_spec
from prefect_raybatch.doctor.check_result import CheckContext, CheckResult, failed, passed, warned
from prefect_raybatch.doctor.stores import clock_url
from prefect_raybatch.errors import PrefectUnavailable, Problem, RayBatchError
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.job.kubernetes import Kubernetes
from prefect_raybatch.kuberay.api import KubeApi
from prefect_raybatch.sizing.sizes import Capacity, pool_for
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.storage.base import header_time
from prefect_raybatch.storage.redirects import open_without_redirects, redirect_problem
from prefect_raybatch.words import counted

REQUEST_SECONDS = 5.0  # seconds for one request
API = 4.0  # seconds for Prefect's API, including the client's retries
CLUSTER_SECONDS = 60.0  # to start a process and join; a busy machine takes half a minute to start
START_PREFECT = "run prefect server start, or correct PREFECT_API_URL (see prefect config view)"
SKEW_WARN, SKEW_FAIL = 30.0, 300.0  # seconds; S3 refuses signatures from 900 s on
# Sources of Prefect's settings: variables, and files in this folder that contain the given text.
API_VARIABLES = {"PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH"}
API_FILES = ((".env", b"prefect"), ("prefect.toml", b""), ("pyproject.toml", b"tool.prefect"))
MOST_SETTINGS_BYTES = 1 << 20
# Run in a child process: joining a cluster can hang, and ends the process if versions differ.
JOIN_CLUSTER = """
import json, pickle, sys
from dataclasses import asdict
from prefect_raybatch.cluster.connect import connected
from prefect_raybatch.errors import RayBatchError
try:
    with connected(pickle.load(sys.stdin.buffer)) as have:
        print(json.dumps({"have": asdict(have)}))
except RayBatchError as error:
    print(json.dumps({"error": str(error)}))
"""


# --- Prefect ------------------------------------------------------------------------------------


def check_prefect(context: CheckContext) -> Iterator[CheckResult]:
    """Check that Prefect's API answers, and that its version is compatible."""
    url = prefect_api()
    here = metadata.version("prefect")
    if url is None:
        yield warned(
            "Prefect API",
            f"PREFECT_API_URL is not set: commands run without Prefect ({here} is installed), and "
            "flows start a temporary server",
            "for schedules and a lasting page, run prefect server start and prefect config set "
            "PREFECT_API_URL=http://127.0.0.1:4200/api",
        )
        return
    from prefect.client.orchestration import get_client

    if trouble := _api_trouble():
        yield failed("Prefect API", f"{_bare(url)} does not answer: {trouble}"[:300], START_PREFECT)
        return
    with get_client(sync_client=True, httpx_settings={"timeout": REQUEST_SECONDS}) as client:
        there = str(client.api_version())
    text = f"{_bare(url)}, server {there}, client {here}"
    if there.split(".")[:2] != here.split(".")[:2]:
        yield warned("Prefect API", text, "install the same minor version on both sides")
    else:
        yield passed("Prefect API", text)


def check_api() -> None:
    """Raise `PrefectUnavailable` within 5 s if Prefect's API is set and does not answer.

    A flow would otherwise end with a long traceback.
    """
    url = prefect_api()
    if url is not None and (trouble := _api_trouble()):
        raise PrefectUnavailable(
            f"no Prefect API answers at {_bare(url)}: {trouble[:200]}; {START_PREFECT}, or use "
            "--no-prefect"
        )


def _api_trouble() -> str:
    """Return why Prefect's API does not answer; "" if it does."""
    from prefect.client.orchestration import get_client

    def ask() -> Exception | None:
        with get_client(sync_client=True, httpx_settings={"timeout": API}) as client:
            return client.api_healthcheck()

    try:
        error: Exception | None = within(API, ask)
    except TimeoutError as late:
        error = late
    return f"{type(error).__name__}: {error}".partition("\n")[0] if error else ""


def prefect_api() -> str | None:
    """Return the URL of Prefect's API from environment or profile; None if none is set.

    Without one, a flow starts a temporary server.
    """
    # Importing Prefect's settings takes a second.
    if "prefect.settings" not in sys.modules and not _may_name_api():
        return None
    from prefect.settings import get_current_settings

    return get_current_settings().api.url


def _may_name_api() -> bool:
    """Return whether a variable or file that Prefect reads may set the URL of its API.

    If False, `prefect.settings` need not be imported, which takes a second. May return True without
    a URL being set, e.g. for a variable that names a profile.
    """
    if any(name.upper() in API_VARIABLES for name in os.environ):
        return True
    home = Path(os.environ.get("PREFECT_HOME") or Path("~/.prefect").expanduser())
    return any(
        _mentions(Path(file), text)
        for file, text in (*API_FILES, (home / "profiles.toml", b"prefect_api_url"))
    )


def _mentions(file: Path, text: bytes) -> bool:
    """Return whether a settings file contains `text`, in upper or lower case.

    `text` must be in lower case. True for a file that exists and cannot be read.
    """
    try:
        return text in read_regular_file(file, MOST_SETTINGS_BYTES).lower()
    except FileNotFoundError:
        return False
    except OSError:
        return True


# --- Ray ----------------------------------------------------------------------------------------


def check_cluster(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the cluster of a run answers and is large enough for the job."""
    spec = context.cluster()
    access = spec.access
    if access.kubernetes is not None:
        yield kubernetes(access.kubernetes)
        return
    if access.job_server:
        yield job_server(access)
        return
    address = cluster.address_of(spec)
    if address is None:
        job = context.keyed()
        yield _local(size_spec(job) if job else None)
        return
    remedy = "start it (ray start --head), or correct cluster.address or RAY_ADDRESS"
    if trouble := unreachable_reason(address):
        yield failed("cluster", f"no Ray head answers at {address}: {trouble}", remedy)
        return
    if refused := token_refusal(address, access):
        yield _problem(refused)
        return
    found = _join(spec, address)
    if "error" in found:
        # Ray's own text names both versions when they differ.
        yield failed(
            "cluster",
            str(found["error"])[:500],
            f"{remedy}; use the same versions of Ray and Python",
        )
        return
    have = Capacity(**found["have"])
    kinds = ((have.nodes, "node"), (have.cpus, "CPU"), (have.gpus, "GPU"))
    text = f"{address}: {', '.join(counted(number, kind) for number, kind in kinds)}"
    yield passed("cluster", f"{text}; Ray {metadata.version('ray')} and Python as here")
    if (job := context.keyed()) is not None:
        cluster.check_fit(size_spec(job), have)


def _local(sizes: SizeSpec | None) -> CheckResult:
    cpus = cpu_limit.usable_cpus()
    text = f"cluster.address is not set: each run starts a local one with {counted(cpus, 'CPU')}"
    if sizes is None:
        return passed("cluster", text)
    if (need := _cpus_needed(sizes)) > cpus:
        return warned(
            "cluster",
            f"{text}; the job asks for {need:g}",
            "the job runs, but its tasks share CPUs: lower engine.replicas or engine.num_cpus, or "
            "set cluster.address to a larger cluster",
        )
    return passed("cluster", text)


def _cpus_needed(spec: SizeSpec) -> float:
    have = Capacity(0, 0, 1, "this machine")
    return cluster.needs(spec, pool_for(spec, have)).cpus


def _join(spec: ClusterSpec, address: str) -> dict[str, Any]:
    token = spec.access.token
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}
    named = replace(spec, loaded=ClusterAccess(address), block=None)
    try:
        done = subprocess.run(
            [sys.executable, "-c", JOIN_CLUSTER],
            input=pickle.dumps(named),
            env={**os.environ, **env},
            capture_output=True,
            timeout=CLUSTER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"{address} listens but could not be joined within {CLUSTER_SECONDS:g} s"}
    lines = done.stdout.splitlines()
    trouble = done.stderr.decode(errors="replace").strip()[-500:]
    if done.returncode or not lines:
        return {"error": trouble or f"joining ended with exit code {done.returncode}"}
    return dict(json.loads(lines[-1]))


def job_server(access: ClusterAccess) -> CheckResult:
    """Check that Ray's job server answers, and that it runs the Ray version installed here."""
    url = str(access.job_server)
    remedy = "start the head with its dashboard, open port 8265, or correct cluster.job_server"
    token = token_sent(access)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    asked = urllib.request.Request(f"{url}/api/version", headers={**headers, **access.headers})
    try:
        with open_without_redirects(asked, REQUEST_SECONDS) as answer:
            there = str(json.load(answer)["ray_version"])
    except urllib.error.HTTPError as error:
        who = f"the job server {url}"
        if error.code in (401, 403):
            problem = token_missing if error.code == 401 else token_wrong
            return _problem(problem(who, access))
        if 300 <= error.code < 400:
            found = redirect_problem(url, error.headers.get("Location"))
            return _problem(replace(found, fault=f"the job server {found.fault}"))
        return failed("cluster", f"{who} does not answer: {error}", remedy)
    except (OSError, ValueError, KeyError) as error:
        return failed("cluster", f"the job server {url} does not answer: {error}", remedy)
    here, text = metadata.version("ray"), f"job server {url}, Ray {there}"
    if there != here:
        return failed("cluster", f"{text}, but {here} here", "install the same Ray version on both")
    return passed("cluster", text)


def _problem(problem: Problem) -> CheckResult:
    """Return a problem of the cluster as a failed finding; its remedy begins in lower case."""
    return failed("cluster", problem.fault, f"{problem.remedy[0].lower()}{problem.remedy[1:]}")


def kubernetes(kubernetes: Kubernetes) -> CheckResult:
    """Check the API server, KubeRay, and this user's permission to create a cluster."""
    try:
        api = KubeApi(kubernetes)
        with api.briefly(REQUEST_SECONDS):
            api.clusters(limit=1)
            lacking = api.forbidden()
    except RayBatchError as error:
        return failed("cluster", str(error), error.remedy)
    where = f"namespace {api.namespace} at {_bare(api.server)}"
    if lacking:
        remedy = "apply deployments/kuberay-rbac.yaml, with a role binding for the flow's user"
        return failed("cluster", f"{where}: no permission to {', '.join(lacking)}", remedy)
    return passed("cluster", f"{where}: each run creates a RayCluster")


# --- clocks -------------------------------------------------------------------------------------


def check_clock(context: CheckContext) -> Iterator[CheckResult]:
    """Compare this machine's clock with those of the Prefect server and the object store."""
    api = prefect_api()
    servers = [("Prefect's server", f"{api}/health")] if api else []
    yield from _compared([*servers, *_store_clocks(context)])


def check_store_clock(context: CheckContext) -> Iterator[CheckResult]:
    """Compare this machine's clock with the object store's, not with Prefect's."""
    yield from _compared(_store_clocks(context))


def _compared(servers: Iterable[tuple[str, str]]) -> Iterator[CheckResult]:
    """Compare this machine's clock with the clocks of `servers`, given as (name, URL) pairs.

    No finding if no server gives its time.
    """
    compared = []
    for name, url in servers:
        ahead = _ahead(url)
        if ahead is None:
            continue
        compared.append(f"{ahead:+.0f} s from {name}")
        if abs(ahead) >= SKEW_WARN:
            make = failed if abs(ahead) >= SKEW_FAIL else warned
            yield make(
                "clock",
                compared[-1],
                "set the clock (chronyc makestep, or timedatectl set-ntp true): schedules run at "
                "wrong times, and S3 and Azure refuse requests if it is off by 15 minutes",
            )
            return
    if compared:
        yield passed("clock", "; ".join(compared))


def _store_clocks(context: CheckContext) -> Iterator[tuple[str, str]]:
    job = context.keyed()
    if job and (url := clock_url(job.output.uri, job.output.options)):
        yield "the object store", url


def _ahead(url: str) -> float | None:
    """Return by how many seconds this machine's clock is ahead of a server's; None if unknown."""
    before = time.time()
    try:
        with open_without_redirects(url, REQUEST_SECONDS) as answer:
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as error:  # a refusal has a date too
        date = error.headers.get("Date")
    except (OSError, HTTPException):
        return None  # whether it answers is another check
    if (seconds := header_time(date)) is None:
        return None
    there = seconds + 0.5  # it gives whole seconds
    off = (before + time.time()) / 2 - there
    return off if abs(off) > 1 + (time.time() - before) / 2 else 0.0


def _bare(url: str) -> str:
    """Return a URL with only scheme, host and path, because the other parts may be credentials."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
