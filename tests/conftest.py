"""Settings for all tests, and the servers that they share.

A server is started when the first test asks for it and ends with the session. What tests keep
apart on it is theirs to choose: a bucket or a prefix, names of flows and work pools, run keys. A
test about a server's own life starts one for itself.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers import environ, postgresql
from helpers.kube_server import KubeServer, serving
from helpers.prefect_server import Prefect, prefect_server, settings_for
from helpers.ray_head import ROOT, Head, start_head
from hypothesis import HealthCheck, settings
from s3server import S3Server, start_s3
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from helpers.command_line import Raybatch

environ.keep_place_for_titles()
for name, value in environ.BUSY.items():
    os.environ.setdefault(name, value)
os.environ["PYTHONPATH"] = environ.python_path()
# Models and adapters are cached apart: what another version left in the user's own cache must not
# decide a test.
CACHE = tempfile.TemporaryDirectory(prefix="raybatch-cache-")
os.environ["RAYBATCH_CACHE"] = CACHE.name
os.environ["RAYBATCH_POLICY"] = environ.POLICY
# Processes that tests start keep what they compile: an engine start is half as dear.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

pytest_plugins = ["helpers.at_once", "helpers.hung"]

# A slow example is no failure, and no timing decides anything.
settings.register_profile(
    "prefect_raybatch",
    deadline=None,
    max_examples=25,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile(  # make chaos: the same tests, for minutes
    "chaos", settings.get_profile("prefect_raybatch"), max_examples=1000
)
settings.load_profile("prefect_raybatch")

# Where several processes run the tests (pytest -n), the files that use a shared server stay in one
# of them, so that there are few of it, and come first, being the longest. Those of Ray and Prefect
# are a group of their own: together with either, one process would work on when the other has
# nothing left. Of other servers the first here counts. Other files go to whoever is free, for the
# same reason those that start engines first, then those of no room, of which some take minutes.
SHARED = {
    "ray": re.compile(r"\b(ray_head|local_ray|imported_vllm|kept_engines)\b"),
    "prefect": re.compile(r"\b(prefect_process|prefect_api|deployed)\b"),
    "s3": re.compile(r"^def \w+\([^)]*\bs3\b|^    s3: S3Server", re.MULTILINE),
}
GROUPS = ["ray", "prefect", "ray and prefect", "s3"]  # in this order
TESTS = Path(__file__).parent
LONG = re.compile(r"\bmark\.e2e\b|\bneeds_vllm\b")
LAST = "test_typing.py"  # once `make types`, which runs beside the tests, has filled mypy's cache
APART = "test_benchmarks.py"  # its tests share nothing, and one process would take 12 minutes
WITH_ENGINES = 900  # seconds that a test in these files may take


@cache
def group(path: Path) -> str:
    """The servers whose fixtures a file of tests names, else the file itself."""
    text = path.read_text(encoding="utf-8")
    used = [name for name, uses in SHARED.items() if uses.search(text)]
    return " and ".join(used[:2]) if used[:2] == ["ray", "prefect"] else [*used, str(path)][0]


@cache
def turn(path: Path) -> int:
    """Which files come before which: those of a server, in its order, the long ones, the rest, and
    `LAST`."""
    if (name := group(path)) in GROUPS:
        return GROUPS.index(name)
    if starts_engines(path):
        return len(GROUPS)
    if path.name == LAST:
        return len(GROUPS) + 3
    return len(GROUPS) + (1 if path.parent == TESTS else 2)


@cache
def starts_engines(path: Path) -> bool:
    return LONG.search(path.read_text(encoding="utf-8")) is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (turn(item.path), *(not asks(item.path) for asks in IN_PROCESS)))
    for item in items:
        if item.get_closest_marker("nightly") is not None:
            item.add_marker(pytest.mark.whole)  # `make test` leaves it out, too
        # An engine alone takes a minute and more to start on a busy machine.
        if starts_engines(item.path) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(WITH_ENGINES))


class ByServer(LoadScopeScheduling):
    """Hands on the tests of a group together, those of `APART` one by one. (pytest-xdist's own
    groups, by marks, are lost on pytest 9.2, where the id of a test cannot be changed.)"""

    def _split_scope(self, nodeid: str) -> str:
        path = self.config.rootpath / nodeid.partition("::")[0]
        return nodeid if path.name == APART else group(path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByServer:
    return ByServer(config, log)


# Most engines of tests are stand-ins, for which vLLM would be imported for nothing.
os.environ.setdefault("RAYBATCH_IMPORT_EARLY", "0")


@pytest.fixture(autouse=True)
def no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage of an engine that is made in this process begins none: it would import vLLM for
    nothing, and every later engine of the process, stand-ins too, would be made by it."""
    begin = "prefect_raybatch.stages.vllm.forking.begin_fork_server"
    monkeypatch.setattr(begin, lambda arguments: None)


@pytest.fixture(autouse=True)
def tellers_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the threads that report the start of an engine in this process: a test that breaks off a
    run leaves its engine."""
    from prefect_raybatch.stages.vllm.phases import StartReporter

    made: list[StartReporter] = []
    start = StartReporter.start

    def noted(teller: StartReporter) -> StartReporter:
        made.append(teller)
        return start(teller)

    with monkeypatch.context() as patch:
        patch.setattr(StartReporter, "start", noted)
        yield
    for teller in made:
        teller.end()


@pytest.fixture(autouse=True, scope="module")
def vllms_variables_stay_in_a_file() -> Iterator[None]:
    """An engine sets vLLM's variables in its process. If that is the tests' process, the processes
    that the tests of another file start would inherit them: their engines had no core of their own,
    and a test waited for one until its time was over."""

    def of_vllm() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}

    before = of_vllm()
    yield
    for name in of_vllm().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True, scope="module")
def engines_of_ask_end() -> Iterator[None]:
    """An engine that waits for a next call of `ask` would keep those of later tests too."""
    yield
    if running := sys.modules.get("prefect_raybatch.frames.running"):
        running.end_engines()


@pytest.fixture(autouse=True)
def nothing_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process leaves its files to the system, which waits for no disk. What fsync is for, no
    test can see: the simulation's own disk counts the calls."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def plots_are_empty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of this process have empty pictures: to draw them is most of the time of a small run.
    The tests of a file that looks at them (`DRAWS = True`) and processes of their own draw."""
    if not getattr(request.module, "DRAWS", False):
        empty = '<svg xmlns="http://www.w3.org/2000/svg"/>'
        monkeypatch.setattr("prefect_raybatch.report.plots.picture_of", lambda names, plots: empty)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with start_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def s3(s3_server: S3Server, request: pytest.FixtureRequest) -> S3Server:
    """The S3 server, with a bucket of this module's own: BUCKET, or the module's name."""
    module = request.module.__name__.rpartition(".")[2]
    name = module.removeprefix("test_").replace("_", "-")
    s3_server.create_bucket(getattr(request.module, "BUCKET", name))
    return s3_server


HEAD_PATH = f"{ROOT}{os.pathsep}{environ.python_path()}"


@pytest.fixture(scope="session")
def ray_head() -> Iterator[Head]:
    """A Ray head of four CPUs with its job server; its workers can import the tests' helpers."""
    with start_head(4, PYTHONPATH=HEAD_PATH) as head:
        yield head
        close_shared(None)


@pytest.fixture(scope="module")
def local_ray(ray_head: Head) -> None:
    """Make this process a driver of the shared head, until a test comes whose file does not ask for
    that: for each driver Ray starts workers of its own, which takes half a minute of a core."""
    import ray

    if not ray.is_initialized():
        patch = AS_DRIVER.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("RAY_AUTH_MODE", "disabled")  # as the head
        ray.init(address=ray_head.address, logging_level="error", log_to_driver=False)
        AS_DRIVER.callback(ray.shutdown)
    address = ray.get_runtime_context().gcs_address  # by the machine's name for itself
    assert address.rpartition(":")[2] == ray_head.address.rpartition(":")[2]


@pytest.fixture(scope="module")
def imported_vllm(local_ray: None) -> None:
    """Fork engines of runs of this process, on the shared head, from one process that has imported
    vLLM, until a test comes whose file does not ask for that. Each engine that imports it by itself
    takes ten seconds of a core more."""
    from helpers.kept_engines import imported

    if not FORKING:
        FORKED.enter_context(imported(PYTHONPATH=HEAD_PATH))
        FORKING.append(True)


@pytest.fixture(scope="module")
def kept_engines(imported_vllm: None) -> None:
    """Let runs of this process use engines of earlier ones, until a test comes whose file does not
    ask for that. Each engine that a command starts by itself takes half a minute of a core and
    more."""
    from helpers.kept_engines import kept

    if not KEEPING:
        KEPT.enter_context(kept())
        KEEPING.append(True)


AS_DRIVER = ExitStack()  # closed when this process is to be no driver of Ray any more
FORKED = ExitStack()  # closed before: the process that imports vLLM
FORKING: list[bool] = []
KEPT = ExitStack()  # closed before that: engines that this process keeps
KEEPING: list[bool] = []


@cache
def drives_ray(path: Path) -> bool:
    return names(path, "local_ray|imported_vllm|kept_engines")


@cache
def forks_engines(path: Path) -> bool:
    return names(path, "imported_vllm|kept_engines")


@cache
def keeps_engines(path: Path) -> bool:
    return names(path, "kept_engines")


def names(path: Path, fixtures: str) -> bool:
    return re.search(rf"\b({fixtures})\b", path.read_text(encoding="utf-8")) is not None


IN_PROCESS = (drives_ray, forks_engines, keeps_engines)  # files that ask for more come first


def close_shared(path: Path | None) -> None:
    """Close what the tests of the next file, if any, do not ask for."""
    if path is None or not keeps_engines(path):
        KEPT.close()
        KEEPING.clear()
    if path is None or not forks_engines(path):
        FORKED.close()
        FORKING.clear()
    if path is None or not drives_ray(path):
        AS_DRIVER.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(nextitem: pytest.Item | None) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        close_shared(None if nextitem is None else nextitem.path)


@pytest.fixture
def raybatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Raybatch:
    """Run commands in this process, in the test's folder; return (exit status, stdout, stderr)."""
    from helpers.command_line import called

    monkeypatch.chdir(tmp_path)
    return partial(called, capsys)


@pytest.fixture
def example(raybatch: Raybatch) -> Raybatch:
    """As `raybatch`, where the bundled example job is."""
    assert raybatch("init", "--example")[0] == 0
    return raybatch


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of this process need no Ray, and take a tenth of a second."""
    from helpers.without_ray import instead_of_ray

    instead_of_ray(monkeypatch)


@pytest.fixture(scope="session")
def prefect_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    """A Prefect server, and the worker that a test starts for it. On SQLite it loses an event or
    an artifact now and then while many write, as docs/how-to/schedule.md says."""
    with ExitStack() as stack:
        database = stack.enter_context(postgresql.for_prefect())
        home = tmp_path_factory.mktemp("prefect")
        yield stack.enter_context(prefect_server(home, **database))


@pytest.fixture(scope="session")
def deployed(prefect_process: Prefect) -> Prefect:
    """The shared Prefect server with deployments/prefect.yaml and a worker that runs them."""
    prefect_process.env["RAY_AUTH_MODE"] = "disabled"  # as the shared head
    prefect_process.deploy()
    prefect_process.work()
    return prefect_process


@pytest.fixture(scope="module")
def prefect_api(prefect_process: Prefect) -> Iterator[None]:
    """Flows of this process run against the shared Prefect server."""
    with settings_for(prefect_process):
        yield


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    """An API server of Kubernetes that the environment's kubeconfig names."""
    with serving(KubeServer()) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        yield server
