"""One process imports vLLM early, and the engines' actors are forked from it."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from prefect_raybatch.imports import launcher, start
from prefect_raybatch.imports import server as import_server
from prefect_raybatch.stages.vllm import forking
from tests.helpers.processes import below, running, until

# Like the process itself, with imports that take no time.
SERVER = """
import sys
from prefect_raybatch.imports import server
from prefect_raybatch.stages.vllm import forking, internals
internals.FRONT_MODULES = internals.CORE_MODULES = ()
forking.PRELOAD, forking.PRELOAD_CORE = "{preload}", "colorsys"
{more}
server.main(int(sys.argv[1]), int(sys.argv[2]))
"""
OPENED = "opened = open({path!r})"  # what an import leaves open
THREAD = (
    "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
)

PROGRAM = """
import atexit, json, os, resource, signal, sys
from multiprocessing import forkserver
told = {
    "pid": os.getpid(), "group": os.getpgid(0), "words": sys.argv, "folder": os.getcwd(),
    "name": __name__, "csv": "csv" in sys.modules, "core": "colorsys" in sys.modules,
    "variable": os.environ.get("OF_WORKER"), "gone": os.environ.get("OF_SERVER"),
    "children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
    "opened": [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
               if os.path.exists(f"/proc/self/fd/{n}")],
    "server": forkserver._forkserver._forkserver_pid,
    "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "oom": open("/proc/self/oom_score_adj").read().strip(),
}
print(json.dumps(told), flush=True)
atexit.register(open, "ended", "w")
if sys.argv[1:2] == ["end"]:
    sys.exit(3)
sys.stdin.read()
"""

# What vLLM does: a core from the fork server, and below it a worker that is spawned.
CORE = """
import multiprocessing, sys
from prefect_raybatch.stages.vllm import forking

def leaf(place):
    open(place, "w").close()

def core(place):
    spawned = multiprocessing.get_context("spawn").Process(target=leaf, args=(place,))
    spawned.start()
    spawned.join()
    print("csv" in sys.modules, "colorsys" in sys.modules, spawned.exitcode, flush=True)

if __name__ == "__main__":
    made = forking.ForkedContext().Process(target=core, args=(sys.argv[1],))
    made.start()
    made.join()
"""


def as_ray_sets_it() -> None:
    """Give this process another limit of open files and another score for a full memory."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (777, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    Path("/proc/self/oom_score_adj").write_text("321")


@dataclass
class Server:
    """A process that forks workers, its socket, and the pipe that keeps it up."""

    process: subprocess.Popen[bytes]
    socket: str
    alive: int | None

    def let_go(self) -> None:
        """Close the pipe."""
        if self.alive is not None:
            os.close(self.alive)
            self.alive = None

    def worker(self, program: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
        """The program with which Ray would start an actor, asked to run `program`."""
        command = [sys.executable, "-I", "-S", launcher.__file__, self.socket, sys.executable]
        return subprocess.Popen(
            [*command, str(program), *words],
            env={**os.environ, "OF_WORKER": "1", **variables},
            preexec_fn=as_ray_sets_it,
            cwd=program.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


@contextmanager
def served(
    folder: Path, preload: str = "csv", more: str = "", stdout: int | None = None
) -> Iterator[Server]:
    script = folder / "server.py"
    script.write_text(SERVER.format(preload=preload, more=more))
    place = str(folder / "socket")
    read, write = os.pipe()
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(place)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, str(script), str(listener.fileno()), str(read)],
            pass_fds=[listener.fileno(), read],
            stdout=stdout,
            # An engine in this process, of another test, keeps its core there.
            env={"RAYBATCH_ENGINE": "1", **os.environ, forking.CORE_APART: "1", "OF_SERVER": "1"},
        )
    os.close(read)
    server = Server(process, place, write)
    try:
        yield server
    finally:
        process.kill()
        process.wait()
        server.let_go()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def told(asked: subprocess.Popen[str]) -> dict[str, object]:
    assert asked.stdout is not None
    return dict(json.loads(asked.stdout.readline()))


def test_a_worker_is_forked_with_the_imports_and_is_otherwise_like_one_started_alone(
    tmp_path: Path, program: Path
) -> None:
    kept = tmp_path / "kept"
    kept.touch()
    with served(tmp_path, more=OPENED.format(path=str(kept))) as server:
        asked = server.worker(program, "a", "b c")
        found = told(asked)
        assert found["pid"] != asked.pid  # another process, which has the imports
        assert found["csv"] and not found["core"]  # what only the core needs would delay it
        assert found["words"] == [str(program), "a", "b c"] and found["name"] == "__main__"
        assert found["folder"] == str(tmp_path)
        assert (found["variable"], found["gone"]) == ("1", None)
        assert found["group"] == found["pid"]  # Ray ends the group of a worker that has ended
        assert found["children"]
        assert (found["files"], found["oom"]) == (777, "321")
        assert str(kept) in str(found["opened"])  # by imports
        assert server.socket not in str(found["opened"])
        assert asked.poll() is None
        assert asked.stdin is not None
        asked.stdin.close()
        assert asked.wait(60) == 0
        assert (
            server.worker(program, "end").wait(60) == 0
        )  # Ray asks the worker itself how it ended


def test_more_is_imported_while_no_worker_waits(tmp_path: Path, program: Path) -> None:
    (tmp_path / "last.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    more = f"sys.path.append({str(tmp_path)!r}); internals.CORE_MODULES = ('colorsys', 'last')"
    with served(tmp_path, more=more) as server:
        until(lambda: (tmp_path / "imported").exists(), 60, "the last import")
        assert told(server.worker(program, "end"))["core"]


@pytest.mark.parametrize("apart", ["1", "0"])
def test_a_worker_that_waits_imports_the_rest_beside_its_core(
    tmp_path: Path, program: Path, apart: str
) -> None:
    (tmp_path / "called.py").write_text(
        "import select, sys\nselect.select([int(sys.argv[1])], [], [])"  # until a worker calls
    )
    more = (
        f"sys.path.append({str(tmp_path)!r}); internals.CORE_MODULES = ('called', 'colorsys'); "
        f"import os; os.environ[forking.CORE_APART] = {apart!r}"
    )
    with served(tmp_path, more=more) as server:
        found = told(server.worker(program, "end"))
        assert found["csv"]
        assert found["core"] == (apart == "0")


def test_workers_outlive_the_process_and_end_their_own_fork_server(
    tmp_path: Path, program: Path
) -> None:
    with served(tmp_path) as server:
        asked = server.worker(program)
        found = told(asked)
        forks = psutil.Process(int(str(found["server"])))
        server.let_go()
        assert server.process.wait(60) == 0
    assert asked.poll() is None
    assert asked.stdin is not None
    asked.stdin.close()
    assert asked.wait(60) == 0
    until(lambda: not running([forks]), 60, "the server's end")


def test_a_core_of_a_forked_worker_has_the_imports_and_may_spawn_workers(tmp_path: Path) -> None:
    program, place = tmp_path / "core.py", tmp_path / "leaf"
    program.write_text(CORE)
    with served(tmp_path) as server:
        said, _ = server.worker(program, str(place)).communicate(timeout=60)
    assert said == "True True 0\n"  # in the output of the worker
    assert place.exists()


@pytest.mark.parametrize(
    ("preload", "more"),
    [("csv", THREAD), ("a_module_that_is_missing", "")],
    ids=["with a thread", "without the imports"],
)
def test_where_it_cannot_fork_the_worker_starts_alone(
    tmp_path: Path, program: Path, preload: str, more: str
) -> None:
    with served(tmp_path, preload, more) as server:
        asked = server.worker(program, "end")
        found = told(asked)
        assert found["pid"] == asked.pid and not found["csv"]
        assert found["words"] == [str(program), "end"]
        assert asked.wait(60) == 3
        assert server.process.wait(60) is not None


@pytest.mark.parametrize("name", import_server.LOADED_BY)
def test_a_worker_that_loads_from_elsewhere_starts_alone(
    tmp_path: Path, program: Path, name: str
) -> None:
    value = sys.base_prefix if name == "PYTHONHOME" else f"{os.environ.get(name, '')}:/elsewhere"
    if name == "LD_PRELOAD":
        value = ""
    with served(tmp_path) as server:
        asked = server.worker(program, "end", **{name: value})
        assert told(asked)["pid"] == asked.pid
        assert asked.wait(60) == 3
        other = server.worker(program, "end")  # is forked as before
        assert told(other)["pid"] != other.pid
        assert other.wait(60) == 0


def test_a_worker_starts_alone_where_its_fork_ends_before_the_program(
    tmp_path: Path, program: Path
) -> None:
    fails = "server._take_over = lambda call: 1 / 0"
    with served(tmp_path, more=fails) as server:
        asked = server.worker(program, "end")
        assert told(asked)["pid"] == asked.pid
        assert asked.wait(60) == 3


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM], ids=errno.errorcode.get)
def test_the_end_of_a_fork_is_seen_where_the_kernel_cannot_tell_it(
    monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refused(pid: int) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "pidfd_open", refused)
    monkeypatch.setattr(launcher, "ALIVE_EVERY", 0.01)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(launcher.wait_for, process.pid)
        process.communicate(b"\n")
        waiting.result(60)


def test_a_worker_starts_alone_once_the_process_has_ended(tmp_path: Path, program: Path) -> None:
    with served(tmp_path) as server:
        pass
    asked = server.worker(program, "end")
    assert told(asked)["pid"] == asked.pid
    assert asked.wait(60) == 3


def test_the_process_ends_with_its_block_also_while_it_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(start.SWITCH, "1")
    monkeypatch.delenv(forking.METHOD, raising=False)  # an engine of this process sets it
    with start.import_process(None, {"A": "1"}, {"OMP_NUM_THREADS": "1"}):
        first = start.actor_options({"A": "1"})
        with start.import_process(None, {"A": "1"}, {}):  # within another block it does nothing
            assert start.actor_options({"A": "1"}) == first
        assert start.actor_options({"A": "1"}) == first
        assert start.actor_options({"A": "2"}) == {}  # engines with other variables
        assert start.actor_options(None) == {}  # a hosted model
        words = str(first["runtime_env"])
        (process,) = below(os.getpid(), start.IMPORT_SERVER)
        place = next(Path(word.strip("'\"")) for word in words.split() if word.endswith("/socket"))
        assert place.exists() and place.parent.stat().st_mode & 0o077 == 0
    assert start.actor_options({"A": "1"}) == {}
    assert not running([process]) and not place.parent.exists()


@pytest.mark.parametrize(
    "variables",
    [None, {start.SWITCH: "0"}, {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}],
    ids=["no engine", "switched off", "vLLM's way of making processes is given"],
)
def test_nothing_is_imported_early(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str] | None
) -> None:
    monkeypatch.setenv(start.SWITCH, "1")
    monkeypatch.delenv(forking.METHOD, raising=False)  # an engine of this process sets it
    with start.import_process(None, variables, {}):
        assert start.actor_options(variables) == {}


def test_a_process_whose_imports_hang_ends_and_the_worker_starts_alone(
    tmp_path: Path, program: Path
) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(600)\n")
    soon = f"sys.path.append({str(tmp_path)!r}); server.IMPORTS_WAIT = 1"
    with served(tmp_path, "hangs", soon) as server:
        asked = server.worker(program, "end")
        assert told(asked)["pid"] == asked.pid
        assert asked.wait(60) == 3
        assert server.process.wait(60) < 0


def test_the_core_gets_no_fork_server_where_it_is_in_the_actor(
    tmp_path: Path, program: Path
) -> None:
    inside = "import os; os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] = '0'"  # of the engine
    with served(tmp_path, more=inside) as server:
        assert told(server.worker(program, "end"))["server"] is None


ASKS = """
from importlib import metadata
from importlib.metadata import packages_distributions
found = packages_distributions()
print(sorted(found)[0], found == packages_distributions() == metadata.packages_distributions())
"""
FOUND = "print('{\"!found\": []}')"


@pytest.mark.parametrize(
    ("lister", "first"),
    [
        (FOUND, "!found"),
        (f"{FOUND}; import sys; sys.exit(1)", None),
        ("import os; os.kill(os.getpid(), 9)", None),
    ],
    ids=["listed", "failed", "killed"],
)
def test_packages_are_listed_beside_the_imports(
    tmp_path: Path, lister: str, first: str | None
) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    more = f"sys.path.append({str(tmp_path)!r}); server.LIST_PACKAGES = {lister!r}"
    own = sorted(metadata.packages_distributions())[0]
    with served(tmp_path, "asks", more, stdout=subprocess.PIPE) as server, server.process as asks:
        assert asks.stdout is not None
        assert asks.stdout.readline().decode() == f"{first or own} True\n"
        asks.kill()


def test_what_lists_packages_finds_them() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", import_server.LIST_PACKAGES], capture_output=True, check=True
    )
    found, own = json.loads(done.stdout), metadata.packages_distributions()
    assert found["pytest"] == own["pytest"] and found["yaml"] == own["yaml"]


def test_a_call_that_is_cut_off_harms_no_other(tmp_path: Path, program: Path) -> None:
    with served(tmp_path) as server:
        with socket.socket(socket.AF_UNIX) as cut:
            cut.connect(server.socket)
            assert cut.recv(1) == launcher.FORK_REQUEST
        with socket.socket(socket.AF_UNIX) as odd:
            odd.connect(server.socket)
            assert odd.recv(1) == launcher.FORK_REQUEST
            odd.sendall(launcher.SIZE.pack(2) + b"[]")
        asked = server.worker(program, "end")
        assert told(asked)["pid"] != asked.pid
