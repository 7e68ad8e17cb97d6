"""User functions that end or hang their process: the row fails, and nothing else does."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engines import with_answers
from helpers.small import MODEL, make_job, receipts, small_run
from helpers.specs import finish_stage, prepare_stage

from prefect_raybatch.cluster.pipeline import Pipeline
from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.output import Output
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.plan import prompt_lengths as tokens
from prefect_raybatch.stages.block import losses, tag
from prefect_raybatch.stages.calls.calling import CALLS_IN_PROCESS, Calls
from prefect_raybatch.stages.calls.isolated import (
    FunctionDied,
    FunctionHung,
    IsolatedFunction,
    NoChild,
    WorkerProcess,
)
from prefect_raybatch.stages.columns import ERROR
from prefect_raybatch.storage import open_store

DEADLY = "helpers.functions:deadly"
APART = Calls(seconds=1.0, in_child=True)


def block(whats: list[str]) -> pa.Table:
    table = pa.table({"id": list(range(len(whats))), "what": whats})
    return tag(table, Unit(0, 0, len(whats)))


def prepared(whats: list[str], calls: Calls) -> list[str | None]:
    """The class that each row failed with in prepare."""
    prompt = Prompt(function="helpers.functions:deadly_ask")
    made = prepare_stage(prompt, dict(MODEL), None, calls=calls)(block(whats))
    return [error and error["kind"] for error in made[ERROR].to_pylist()]


def finished(folder: Path, whats: list[str], calls: Calls) -> tuple[list[Any], list[Any]]:
    """What was said to the good rows, and (row, class, message) of the failed ones."""
    store = open_store(str(folder))
    stage = finish_stage(
        Output(uri="out", postprocess=DEADLY), dict(MODEL), store, "a", calls=calls
    )
    answered = with_answers(block(whats), [None] * len(whats), ["answer"] * len(whats))
    (receipt,) = receipts(stage(answered))
    assert receipt.lost is None
    tables = {p.kind: pq.read_table(folder / "_raybatch/pieces" / p.path) for p in receipt.pieces}
    bad = tables["quarantine"].to_pylist() if "quarantine" in tables else []
    assert {row["stage"] for row in bad} <= {"postprocess"}
    good = tables["data"]["said"].to_pylist()
    return good, [(row["input"]["id"], row["error"], row["message"]) for row in bad]


# --- in the stage's own process -----------------------------------------------------------------


def test_what_is_raised_and_no_exception_fails_its_row(tmp_path: Path) -> None:
    whats = ["fine", "sys.exit", "generator", "panic", "fine"]
    kinds = ["SystemExit", "GeneratorExit", "Panic"]
    assert prepared(whats, CALLS_IN_PROCESS) == [None, *kinds, None]
    good, bad = finished(tmp_path, whats, CALLS_IN_PROCESS)
    assert good == ["FINE"] * 2 and [kind for _, kind, _ in bad] == kinds
    assert bad[0][2] == "no good"


def test_ctrl_c_is_nobodys_row() -> None:
    with pytest.raises(KeyboardInterrupt):
        prepared(["interrupt"], CALLS_IN_PROCESS)


def test_a_node_that_stops_its_workers_fails_no_row() -> None:
    """Ray raises SystemExit at a SIGTERM, wherever the worker is."""
    with pytest.raises(SystemExit):
        prepared(["node stops"], CALLS_IN_PROCESS)


@pytest.mark.parametrize("what", ["loop", "hold"])
def test_a_row_that_takes_too_long_ends_the_process(what: str) -> None:
    """Also where it never gives the interpreter back."""
    code = (
        "from prefect_raybatch.stages.calls.calling import Calls\n"
        f"with Calls(0.2).function({DEADLY!r}, 'f') as function:\n"
        "    function({'what': 'fine'})\n"
        f"    function({{'what': {what!r}}})\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=120)
    assert done.returncode == 1
    assert b"Timeout" in done.stderr and b"in deadly" in done.stderr


def test_an_import_that_does_not_end_ends_the_process() -> None:
    code = (
        "from prefect_raybatch.stages.calls import calling\n"
        "calling.START_SECONDS = 0.2\n"
        "with calling.Calls(0.1).function('helpers.hangs_when_imported:function', 'f'): pass\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=120)
    assert done.returncode == 1 and b"hangs_when_imported.py" in done.stderr


@pytest.mark.parametrize("what", ["fine", "error"])
def test_no_alarm_is_left_behind(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    alarms: list[str] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: alarms.append("on"))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: alarms.append("off"))
    with suppress(LookupError), Calls(0.5).function(DEADLY, "f") as function:
        function({"what": what})
    assert alarms == ["on", "on", "off"]  # for the import, and for the row


# --- in a process of its own --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("exit", FunctionDied, "exit code 3"),
        ("segfault", FunctionDied, "killed by SIGSEGV"),
        ("kill", FunctionDied, "killed by SIGKILL"),
        ("closed", FunctionDied, "it closed its connection"),
        ("loop", FunctionHung, "limits.function_seconds (1 s)"),
        ("hold", FunctionHung, "limits.function_seconds (1 s)"),
    ],
)
def test_a_row_ends_its_child_and_the_next_has_another(what: str, kind: Any, said: str) -> None:
    # Nobody waits for what ends by itself; a busy machine may take its time with it.
    function = IsolatedFunction(DEADLY, "output.postprocess", 1.0 if kind is FunctionHung else 60.0)
    with pytest.raises(kind) as caught:
        function({"what": what})
    assert str(caught.value).startswith(f"output.postprocess {DEADLY}") and said in str(
        caught.value
    )
    assert function({"what": "fine"}) == {"said": "FINE"}


def test_what_a_function_has_started_ends_with_its_child(tmp_path: Path) -> None:
    """Else it stays on a GPU node for ever; and it holds the child's connection open."""
    function = IsolatedFunction(DEADLY, "f", 60.0)
    with pytest.raises(FunctionDied, match="exit code 4"):
        function({"what": "child", "file": str(tmp_path / "copy")})
    assert gone(int((tmp_path / "copy").read_text()), 60)
    assert function({"what": "fine"}) == {"said": "FINE"}


MANY_FILES = """
import contextlib, os, sys
from prefect_raybatch.stages.calls import child

def one_by_one(first, end):  # as Python has it where there is no close_range
    for fd in range(first, end):
        with contextlib.suppress(OSError):
            os.close(fd)

os.sysconf, os.closerange = lambda name: 1 << 30, one_by_one
leader = int(sys.argv[1])
child._kill_after(os.pidfd_open(leader), leader)
"""


def test_a_process_that_may_open_a_thousand_million_files_closes_those_it_has() -> None:
    """As in a container without a limit on them."""
    leader = subprocess.Popen(["sleep", "600"], start_new_session=True)
    command = [sys.executable, "-c", MANY_FILES, str(leader.pid)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    watching = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
    try:
        assert watching.stdout is not None
        assert wait([watching.stdout], 120) == [watching.stdout]
        assert watching.stdout.read() == b"" and watching.poll() is None
        leader.kill()
        assert watching.wait(120) == 0
    finally:
        for one in (leader, watching):
            one.kill()
            one.wait()


def test_what_is_raised_comes_back_by_name_from_the_same_child() -> None:
    function = IsolatedFunction(DEADLY, "f", 60.0)
    child = function.child()
    for what, kind, text in (
        ("error", "LookupError", "not there"),
        ("sys.exit", "SystemExit", "no good"),
        ("interrupt", "KeyboardInterrupt", ""),
        ("generator", "GeneratorExit", "over"),
        ("panic", "Panic", "index out of bounds"),
        ("unpicklable", "TypeError", "cannot pickle '_thread.lock' object"),
    ):
        with pytest.raises(Exception) as caught:
            function({"what": what})
        assert (type(caught.value).__name__, str(caught.value)) == (kind, text)
    assert function({"what": "forked"}) == {"said": "FORKED"}  # and no answer of the copy
    assert function({"what": "fine" * 1_000_000}) == {"said": "FINE" * 1_000_000}
    assert function.child() is child


def test_an_end_between_two_rows_is_no_rows_fault() -> None:
    function = IsolatedFunction(DEADLY, "f", 60.0, deaths=1)
    pid = function.child().process.pid
    assert function({"what": "later"}) == {"said": "LATER"}
    assert gone(pid, 60)
    assert function({"what": "fine"}) == {"said": "FINE"}


def test_a_row_has_as_many_tries_as_the_limit_says(tmp_path: Path) -> None:
    row = {"what": "once", "file": str(tmp_path / "tried")}
    assert IsolatedFunction(DEADLY, "f", 60.0, deaths=2)(row) == {"said": "ONCE"}
    with pytest.raises(FunctionDied, match=r"exit code 3\), in each of 2 tries"):
        IsolatedFunction(DEADLY, "f", 60.0, deaths=2)({"what": "exit"})


@pytest.fixture
def loops_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that loops is late at once, and no other row is late on a machine of any speed."""
    say, hear = WorkerProcess.say, WorkerProcess.hear
    rows: dict[WorkerProcess, Any] = {}

    def noted(child: WorkerProcess, data: bytes) -> None:
        rows[child] = pickle.loads(data)
        say(child, data)

    def heard(child: WorkerProcess, seconds: float | None) -> Any:
        is_late = seconds == LATE and rows[child]["what"] == "loop"
        return hear(child, 0.0 if is_late else None)

    monkeypatch.setattr(WorkerProcess, "say", noted)
    monkeypatch.setattr(WorkerProcess, "hear", heard)


LATE = 0.2


@pytest.mark.usefixtures("loops_are_late")
def test_rows_that_hang_one_after_the_other_hang_the_block_and_not_the_run() -> None:
    """What a function waits for may be away: at ten minutes a row a shard would take weeks."""
    calls = Calls(seconds=LATE, in_child=True)
    assert prepared(["loop", "loop", "fine", "loop", "loop"], calls)[2] is None
    stage = prepare_stage(
        Prompt(function="helpers.functions:deadly_ask"), dict(MODEL), None, calls=calls
    )
    (why,) = losses(stage(block(["loop"] * 3 + ["fine"] * 9)))
    assert why.kind == "BlockHung" and why.message.startswith("prompt.function")
    assert "3 rows in a row" in why.message


def test_a_function_that_cannot_be_had_is_told_as_ever() -> None:
    with pytest.raises(ConfigError, match=r"f: helpers\.functions has no function 'nowhere'"):
        IsolatedFunction("helpers.functions:nowhere", "f", None)
    with pytest.raises(NoChild, match=r"imported the function's module \(exit code 7\)"):
        IsolatedFunction("helpers.ends_when_imported:function", "f", None)


def test_a_child_ends_with_its_parent_also_in_a_row(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    row = {"what": "busy child", "file": str(copy)}
    code = (
        "import os, pathlib, signal, threading, time\n"
        "from prefect_raybatch.stages.calls.isolated import IsolatedFunction\n"
        f"function = IsolatedFunction({DEADLY!r}, 'f', None)\n"
        "print(function.child().process.pid, flush=True)\n"
        "def kill():\n"
        f"    copy = pathlib.Path({str(copy)!r})\n"
        "    while not (copy.exists() and copy.read_text()): time.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "threading.Thread(target=kill).start()\n"
        f"function({row!r})\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, timeout=99)
    assert gone(int(done.stdout), 60)
    assert gone(int(copy.read_text()), 60)  # what the function has started, too


def test_a_child_ends_when_nobody_wants_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    child = WorkerProcess(DEADLY, "f", None)
    pid = child.process.pid
    assert psutil.pid_exists(pid)
    del child
    gc.collect()
    assert gone(pid, 60)


def gone(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_stages_put_the_failure_to_the_row(tmp_path: Path) -> None:
    assert prepared(["fine", "exit", "loop", "interrupt", "fine"], APART) == [
        None,
        "FunctionDied",
        "FunctionHung",
        "KeyboardInterrupt",
        None,
    ]
    good, bad = finished(tmp_path, ["fine", "exit", "loop", "fine"], APART)
    assert good == ["FINE"] * 2
    assert [row[:2] for row in bad] == [(1, "FunctionDied"), (2, "FunctionHung")]
    assert bad[0][2].startswith(f"output.postprocess {DEADLY} ended its process (exit code 3). ")


def test_a_node_without_room_for_a_child_loses_the_block_and_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = Prompt(function="helpers.ends_when_imported:function")
    stage = prepare_stage(prompt, dict(MODEL), None, calls=APART)
    (why,) = losses(stage(block(["fine", "fine"])))
    assert str(why).startswith("NoChild: prompt.function helpers.ends_when_imported:function")


def test_a_sample_of_prompts_does_not_end_the_driver() -> None:
    rows = [{"what": what, "not_in": os.getpid()} for what in ("fine", "exit", "fine")]
    job = make_job(prompt={"function": "helpers.functions:deadly_ask"})
    found = tokens.measure(compile_job(job), MODEL, [("in.parquet", 0, pa.Table.from_pylist(rows))])
    assert (found.rows, found.failed) == (2, 1)


@pytest.mark.usefixtures("loops_are_late")
def test_a_sample_whose_function_hangs_for_each_row_says_so() -> None:
    limits = {"function_seconds": LATE}
    job = make_job(prompt={"function": "helpers.functions:deadly_ask"}, limits=limits)
    table = pa.table({"what": ["loop"] * 4})
    with pytest.raises(
        ConfigError, match=r"prompt\.function helpers\.functions:deadly_ask did not return"
    ):
        tokens.measure(compile_job(job), MODEL, [("in.parquet", 0, table)])


@pytest.mark.parametrize("never", [0, None])
def test_the_limit_can_be_taken_away(never: float | None) -> None:
    job = make_job(limits={"function_seconds": never})
    assert job.limits.function_seconds == 0
    assert BatchJob.from_dict(job.to_dict()).limits.function_seconds == 0


def test_a_unit_that_is_isolated_is_alone_in_its_read_task_too(tmp_path: Path) -> None:
    run = small_run(tmp_path, rows=300, per_shard=1)
    size: Any = None
    pipeline = Pipeline(compile_job(run.job), run.plan, run.shards, run.store, "a", size)
    units = [run.whole(shard) for shard in range(300)]
    assert [len(task.units) for task in pipeline.read_tasks(units, True)] == [1] * 300
    assert len(pipeline.read_tasks(units, False)) < 300


def test_an_isolated_pass_asks_rows_of_committed_shards(tmp_path: Path) -> None:
    """The driver sends them to see whether engines work at all."""
    run = small_run(tmp_path, rows=4, per_shard=2)
    run.commit(0)
    size: Any = None
    pipeline = Pipeline(compile_job(run.job), run.plan, run.shards, run.store, "a", size)
    assert [pipeline.skips(False)(shard) for shard in (0, 1)] == [True, False]
    assert [pipeline.skips(True)(shard) for shard in (0, 1)] == [False, False]
