"""The engine stage around a stepped engine that answers, refuses, dies or does not start."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers.engine_stage import LAUNCH, block, lost_rows, started
from helpers.engines import Factory, completion
from helpers.heard import wait_for
from helpers.small import MODEL, make_job

from prefect_raybatch import demo, installed
from prefect_raybatch.compile.job import compile_job, model_request, sampling_spec, size_spec
from prefect_raybatch.errors import StoreUnavailable
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.model import adapters
from prefect_raybatch.sizing.sizes import Capacity, sizes_of
from prefect_raybatch.stages import engine as stage_module
from prefect_raybatch.stages.adapted import Adapted
from prefect_raybatch.stages.block import is_lost, lost_block
from prefect_raybatch.stages.columns import (
    ANSWERS,
    CACHED_TOKENS,
    ENGINE_BEGAN,
    ENGINE_SPENT,
    ERROR,
    FINISH,
    MERGED,
    PARAMS,
    POSITION,
    PROMPT_TOKENS,
    TEXTS,
    TOKENS,
)
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage, engine_launch
from prefect_raybatch.stages.vllm import canary, forking, phases, process_note, stepper
from prefect_raybatch.stages.vllm.shorter_start import MEASURED_ONCE
from prefect_raybatch.stages.vllm.stepper import Completion, EngineDied, plain_fields

__all__ = ["started"]  # a fixture


def echo(requests: Any) -> list[Completion]:
    """Each answer says which prompt it belongs to."""
    return [
        Completion([[r.prompt_token_ids[0], 2]], None, "stop", len(r.prompt_token_ids), 1)
        for r in requests
    ]


def dies(requests: Any) -> list[Completion]:
    raise EngineDied("out of memory")


# --- answers ------------------------------------------------------------------------------------


def test_each_answer_comes_to_its_row_and_failed_rows_are_not_asked(started):
    made, factory = started(echo)
    table = made(block(Unit(5, 10, 4), failed=[0, 2]))
    assert [r.prompt_token_ids for r in made.engine.seen[0]] == [[1, 1], [3, 3]]
    assert table[ANSWERS].to_pylist() == [None, [[1, 2]], None, [[3, 2]]]
    assert table[FINISH].to_pylist() == [None, "stop", None, "stop"]
    assert table[PROMPT_TOKENS].to_pylist() == [None, 2, None, 2]
    assert table[CACHED_TOKENS].to_pylist() == [None, 1, None, 1]
    assert [e and e["stage"] for e in table[ERROR].to_pylist()] == [
        "prepare",
        None,
        "prepare",
        None,
    ]
    assert table[POSITION].to_pylist() == [10, 11, 12, 13]
    assert table["id"].to_pylist() == [0, 1, 2, 3]
    assert not {TOKENS, PARAMS} & set(table.column_names)
    assert {ENGINE_BEGAN, ENGINE_SPENT} <= set(table.column_names)
    (arguments,) = factory.arguments
    assert arguments == {"max_num_seqs": 8, "model": demo.demo_model_path(), "revision": None}


def test_a_row_that_the_engine_refuses_is_marked_and_the_others_are_answered(started):
    def some(requests: Any) -> list[Completion]:
        return [Completion([], error=("ValueError", "no")), completion("text", "length")]

    made, _ = started(some)
    table = made(block(Unit(0, 0, 2)))
    assert table[ERROR].to_pylist()[0] == {"stage": "engine", "kind": "ValueError", "message": "no"}
    assert table[ERROR].to_pylist()[1] is None
    assert table[TEXTS].to_pylist() == [None, ["text"]]
    assert table[FINISH].to_pylist() == [None, "length"]
    assert table[ANSWERS].to_pylist() == [None, [[5]]]


def test_a_rows_own_sampling_overrides_the_jobs(started):
    made, _ = started(echo)
    made(block(Unit(0, 0, 2), params={1: '{"max_tokens": 9, "seed": 1}'}))
    asked = {r.prompt_token_ids[0]: r.params for r in made.engine.seen[0]}
    assert asked == {
        0: {"temperature": 0.0, "max_tokens": 4},
        1: {"temperature": 0.0, "max_tokens": 9, "seed": 1},
    }


def test_a_block_of_only_failed_rows_keeps_its_shape(started):
    made, _ = started(echo)
    well = made(block(Unit(0, 0, 2)))
    bad = made(block(Unit(1, 0, 2), failed=[0, 1]))
    assert bad.schema.equals(well.schema)
    assert bad[ANSWERS].to_pylist() == [None, None]


def test_a_lost_block_passes_without_an_engine(started):
    made, _ = started(TypeError("no engine"))
    table = lost_block(Unit(0, 0, 3), Loss("SourceError", "gone", fatal=True))
    assert made(table).equals(table)


# --- deaths -------------------------------------------------------------------------------------


def test_a_death_loses_its_block_and_the_next_block_gets_a_new_engine(started):
    made, factory = started(dies, echo)
    table = made(block(Unit(3, 4, 2)))
    assert lost_rows(table) == [(3, 4, "EngineDied: out of memory", False)]
    assert len(factory.arguments) == 1  # started when it is needed
    assert made(block(Unit(3, 0, 1)))[ANSWERS].to_pylist() == [[[0, 2]]]
    assert len(factory.arguments) == 2


def test_each_part_of_a_bundle_is_reported_lost(started):
    made, _ = started(dies)
    table = made(pa.concat_tables([block(Unit(3, 4, 2)), block(Unit(8, 0, 1))]))
    assert [(s, p) for s, p, _, _ in lost_rows(table)] == [(3, 4), (8, 0)]


def test_blocks_in_flight_at_one_death_start_one_new_engine(started):
    inside = threading.Barrier(3)

    def dies_together(requests: Any) -> list[Completion]:
        inside.wait()
        raise EngineDied("signal 11")

    made, factory = started(dies_together, echo)
    found: list[pa.Table] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(made(block(Unit(n, 0, 1)))))
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(lost_rows(table)[0][0] for table in found) == [0, 1, 2]
    assert not is_lost(made(block(Unit(9, 0, 1))))
    assert len(factory.arguments) == 2


# --- engines that work for no row ---------------------------------------------------------------

FIXED = list(canary.CANARY_PROMPT)


def dies_of(cause: str) -> Callable[[Any], list[Completion]]:
    def run(requests: Any) -> list[Completion]:
        raise EngineDied(cause)

    return run


def dies_on_rows(requests: Any) -> list[Completion]:
    """Answers the fixed prompt alone."""
    if [list(r.prompt_token_ids) for r in requests] != [FIXED]:
        raise EngineDied("poison")
    return echo(requests)


def prompts_of(engine: Any) -> list[list[list[int]]]:
    return [[list(r.prompt_token_ids) for r in call] for call in engine.seen]


def test_an_engine_that_fails_in_each_first_step_ends_the_run_with_its_error(started):
    """The second engine fails on the fixed prompt, so that no third is started."""
    made, factory = started(*[dies_of("RuntimeError: no kernel image")] * 9)
    blocks = [lost_rows(made(block(Unit(shard, 0, 3))))[0] for shard in range(4)]
    assert blocks[0][2:] == ("EngineDied: RuntimeError: no kernel image", False)
    for _, _, reason, fatal in blocks[1:]:
        assert fatal and reason.startswith("EngineDied: RuntimeError: no kernel image. ")
    assert len(factory.arguments) == 2
    assert prompts_of(factory.made[1]) == [[FIXED]]


def test_a_first_row_that_kills_its_engine_is_not_taken_for_the_engine(started):
    made, factory = started(dies_on_rows, dies_on_rows, echo)
    for _ in range(2):
        assert lost_rows(made(block(Unit(0, 0, 1))))[0][2:] == ("EngineDied: poison", False)
    assert not is_lost(made(block(Unit(1, 0, 2))))
    assert prompts_of(factory.made[1]) == [[FIXED], [[0, 0]]]


def test_an_engine_that_died_after_rows_is_followed_by_one_that_is_not_asked(started):
    calls: list[int] = []

    def later(requests: Any) -> list[Completion]:
        calls.append(1)
        return echo(requests) if len(calls) == 1 else dies(requests)

    made, factory = started(later, echo)
    assert [is_lost(made(block(Unit(shard, 0, 1)))) for shard in range(3)] == [False, True, False]
    assert prompts_of(factory.made[1]) == [[[0, 0]]]


def test_rows_answered_in_the_call_that_died_count_as_well(started):
    def half(requests: Any) -> list[Completion]:
        made.engine.rows += 5
        raise EngineDied("out of memory")

    made, factory = started(half, echo)
    assert is_lost(made(block(Unit(0, 0, 9))))
    assert not is_lost(made(block(Unit(0, 0, 1))))
    assert prompts_of(factory.made[1]) == [[[0, 0]]]


@pytest.mark.parametrize(
    ("first", "second", "fatal"),
    [
        (
            "engine process EngineCore (pid 21) ended with exit code -9",
            "engine process EngineCore (pid 3456) ended with exit code -9",
            True,
        ),
        (
            "engine process EngineCore (pid 21) ended with exit code -9",
            "engine process EngineCore (pid 21) ended with exit code -4",
            False,
        ),
        (
            "OutOfMemoryError: tried to allocate 1.5 GiB at 0x7fa2",
            "OutOfMemoryError: tried to allocate 20 GiB at 0x11",
            True,
        ),
        ("OutOfMemoryError: no memory", "RuntimeError: no device", False),
    ],
)
def test_only_the_same_error_ends_a_run_at_once(started, first, second, fatal):
    """Of another one a third engine is asked; its answer counts, and no row is blamed."""
    made, factory = started(dies_of(first), dies_of(second), echo)
    assert is_lost(made(block(Unit(0, 0, 1))))
    table = made(block(Unit(1, 0, 1)))
    assert is_lost(table) == fatal
    if fatal:
        assert lost_rows(table)[0][3] and second in lost_rows(table)[0][2]
        assert len(factory.arguments) == 2
    else:
        assert prompts_of(factory.made[2]) == [[FIXED], [[0, 0]]]


def test_engines_that_fail_each_in_another_way_end_a_run_too(started):
    made, factory = started(*map(dies_of, ["apple", "pear", "plum", "cherry"]))
    assert not lost_rows(made(block(Unit(0, 0, 1))))[0][3]
    (_, _, reason, fatal), *_ = lost_rows(made(block(Unit(1, 0, 1))))
    assert fatal and "plum" in reason
    assert len(factory.arguments) == 3


def test_a_fixed_prompt_that_is_refused_says_nothing_of_the_engine(started):
    def refuses(requests: Any) -> list[Completion]:
        if len(requests) == 1:
            return [Completion([], error=("ValueError", "too long"))]
        return echo(requests)

    made, _ = started(dies, refuses)
    assert is_lost(made(block(Unit(0, 0, 2))))
    assert not is_lost(made(block(Unit(0, 0, 2))))


def test_the_fixed_prompt_is_asked_with_the_jobs_sampling_and_is_short(started):
    sampling = {"temperature": 0.5, "max_tokens": 300, "min_tokens": 9, "choice": ["a"]}
    made, factory = started(dies, echo, launch=replace(LAUNCH, sampling=sampling))
    for _ in range(2):
        made(block(Unit(0, 0, 1)))
    asked = factory.made[1].seen[0][0].params
    assert asked == {"temperature": 0.5, "max_tokens": canary.CANARY_TOKENS, "choice": ["a"]}
    assert canary.fields_for({}) == {"max_tokens": canary.CANARY_TOKENS}
    assert canary.fields_for({"max_tokens": 1}) == {"max_tokens": 1}


# --- engines that take their actor's process with them --------------------------------------------


class Processes:
    """Actors of one attempt, one after the other on a node: each is forked, asks its engine for one
    block, and says what came of it, or dies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        self.folder, self.patch = folder, monkeypatch

    def run(self, *plan: Any, start: Callable[[], None] | None = None) -> tuple[int, list[Any]]:
        """(exit code, what the block came back as: its lost rows, or its answers)."""
        told = self.folder / "told"
        told.unlink(missing_ok=True)
        context = multiprocessing.get_context("fork")
        child = context.Process(target=self._work, args=(told, plan, start))
        child.start()
        child.join(60)
        return child.exitcode or 0, json.loads(told.read_text()) if told.exists() else []

    def _work(self, told: Path, plan: Any, start: Callable[[], None] | None) -> None:
        class Starts(Factory):
            def __call__(self, *arguments: Any) -> Any:
                if start is not None:
                    start()
                return super().__call__(*arguments)

        self.patch.setattr(stepper, "SteppedEngine", Starts(*plan))
        table = EngineStage(replace(LAUNCH, attempt="20260101-ab"))(block(Unit(0, 0, 1)))
        found = lost_rows(table)[0][2:] if is_lost(table) else table[ANSWERS].to_pylist()
        told.write_text(json.dumps(found))
        os._exit(0)  # what other tests left in the process that was forked does not end with it

    def left(self) -> list[Path]:
        """The notes that are still there; their folder stays for the next ones."""
        return notes_in(self.folder)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Processes:
    return Processes(monkeypatch, tmp_path)


def ends(number: int, only_rows: bool = False) -> Callable[[Any], list[Completion]]:
    def run(requests: Any) -> list[Completion]:
        if not only_rows or list(requests[0].prompt_token_ids) != FIXED:
            os.kill(os.getpid(), number)
        return echo(requests)

    return run


def test_a_process_that_dies_in_each_first_step_ends_the_run_with_its_signal(processes):
    assert processes.run(ends(signal.SIGILL)) == (-signal.SIGILL, [])
    assert processes.run(ends(signal.SIGILL)) == (-signal.SIGILL, [])  # on the fixed prompt
    code, (reason, fatal) = processes.run()  # no engine is started
    assert code == 0 and fatal
    assert reason.startswith("EngineDied: the engine's process ended with SIGILL: illegal ")


def test_a_first_row_that_kills_its_process_is_not_taken_for_the_engine(processes):
    poison = ends(signal.SIGSEGV, only_rows=True)
    for _ in range(4):
        assert processes.run(poison) == (-signal.SIGSEGV, [])
    assert processes.run(echo) == (0, [[[0, 2]]])
    assert processes.left() == []


def test_a_process_that_was_killed_twice_from_outside_is_not_given_up_at_its_start(processes):
    def dying(number: int) -> Callable[[], None]:
        return lambda: os.kill(os.getpid(), number)

    for _ in range(3):
        assert processes.run(start=dying(signal.SIGKILL)) == (-signal.SIGKILL, [])
    assert processes.run(echo) == (0, [[[0, 2]]])
    for _ in range(2):
        assert processes.run(start=dying(signal.SIGILL)) == (-signal.SIGILL, [])
    _, (reason, fatal) = processes.run()
    assert fatal and "SIGILL" in reason and "2 times while the engine started" in reason


def test_an_actor_killed_on_the_fixed_prompt_gets_a_second_chance(processes):
    """Ray ends the actors of a pass with it, whatever they are doing."""
    for _ in range(3):
        assert processes.run(ends(signal.SIGKILL)) == (-signal.SIGKILL, [])
    _, (reason, fatal) = processes.run()
    assert fatal and reason.startswith(f"EngineDied: {process_note.SILENT}. ")


def notes_in(folder: Path) -> list[Path]:
    folders = [one for one in folder.glob("raybatch-notes-*") if one.is_dir()]
    return [path for one in folders if not one.is_symlink() for path in one.iterdir()]


def test_notes_lie_where_nobody_else_can_enter(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name = f"raybatch-notes-{os.getuid()}-"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"{name}link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"{name}file").touch(mode=0o600)
    (tmp_path / f"{name}open").mkdir(mode=0o755)
    os.mkfifo(tmp_path / f"{name}pipe")
    for number in range(2):
        mine = process_note.ProcessNote(f"mine{number}")
        mine.write(process_note.ROWS)
    first, second = notes_in(tmp_path)
    assert first.parent == second.parent and stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (first, second)} == {0o600}
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "link", "folder", "socket", "device"])
@pytest.mark.parametrize("attempt", ["mine", "other"])
def test_what_is_planted_among_the_notes_stops_no_engine(tmp_path, monkeypatch, kind, attempt):
    """A pipe would be waited for until somebody writes to it, for ever as a rule."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = process_note.ProcessNote("mine")
    mine.write(process_note.ROWS)
    (own,) = notes_in(tmp_path)
    for folder in (tmp_path, own.parent):
        path = folder / f"{attempt}-planted.note"
        if kind == "folder":
            path.mkdir()
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as made:
                monkeypatch.chdir(folder)  # the path of a socket is short
                made.bind(path.name)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "link":
            secret = folder / "secret"
            secret.write_text(json.dumps(asdict(process_note.PredecessorNote("prompt", 9))))
            path.symlink_to(secret)
        else:
            pipe = path if kind == "pipe" else folder / "pipe"
            os.mkfifo(pipe)
            if pipe != path:
                path.symlink_to(pipe)
        if not path.is_symlink():
            os.utime(path, (0, 0))
    assert process_note.ProcessNote("mine").read_predecessor() is None


def test_only_what_a_dead_actor_of_the_attempt_left_is_taken_and_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive, other = process_note.ProcessNote("mine"), process_note.ProcessNote("other")
    alive.write(process_note.ROWS)
    other.write(process_note.ROWS)
    for mine in (
        process_note.ProcessNote("mine"),
        process_note.ProcessNote("min"),
        process_note.ProcessNote("mine-too"),
        process_note.ProcessNote(""),
    ):
        assert mine.read_predecessor() is None
    dead = multiprocessing.get_context("fork").Process(
        target=lambda: process_note.ProcessNote("mine").write(process_note.PROMPT, 2, "before")
    )
    dead.start()
    dead.join()
    found = [process_note.ProcessNote("mine").read_predecessor() for _ in range(2)]
    assert found == [
        process_note.PredecessorNote(process_note.PROMPT, 2, "before", process_note.SILENT),
        None,
    ]
    alive.remove_note()
    (path,) = notes_in(tmp_path)
    os.utime(path, (0, 0))
    assert (
        process_note.ProcessNote("mine").read_predecessor() is None and path.exists()
    )  # old, and its process is alive
    os.utime(path, (0, 0))
    other.file.close()
    assert process_note.ProcessNote("mine").read_predecessor() is None and not path.exists()


def test_without_an_attempt_nothing_is_noted(started, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made, _ = started(dies, echo)
    made(block(Unit(0, 0, 1)))
    assert list(tmp_path.iterdir()) == []


# --- engines that do not start ------------------------------------------------------------------


@pytest.fixture
def no_misfits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message names packages, whatever builds are installed."""
    monkeypatch.setattr(installed, "misfits_line", lambda: "")


@pytest.mark.usefixtures("no_misfits")
def test_a_wrong_argument_is_fatal_and_not_tried_again(started):
    made, factory = started(TypeError("unexpected keyword 'x'"))
    for shard in range(2):
        table = made(block(Unit(shard, 0, 3)))
        assert lost_rows(table) == [(shard, 0, "TypeError: unexpected keyword 'x'", True)]
    assert len(factory.arguments) == 1


def test_memory_that_is_not_free_yet_is_tried_again(started):
    made, factory = started(RuntimeError("no memory"), echo)
    assert not is_lost(made(block(Unit(0, 0, 1))))
    assert len(factory.arguments) == 2


def test_memory_that_was_measured_for_an_earlier_engine_is_measured_anew(started, monkeypatch):
    monkeypatch.setenv(MEASURED_ONCE, "1")
    made, factory = started(ValueError("the KV cache is too small"), echo)
    assert not is_lost(made(block(Unit(0, 0, 1))))
    assert len(factory.arguments) == 2
    assert os.environ[MEASURED_ONCE] == "0"


def test_an_engine_that_started_late_is_also_restarted_after_a_death(started):
    made, factory = started(RuntimeError("no memory"), dies, echo)
    assert lost_rows(made(block(Unit(0, 0, 1))))[0][2:] == ("EngineDied: out of memory", False)
    assert not is_lost(made(block(Unit(0, 0, 1))))
    assert len(factory.arguments) == 3


@pytest.mark.usefixtures("no_misfits")
def test_an_engine_that_never_starts_is_fatal(started):
    made, _ = started(*(RuntimeError(f"try {n}") for n in range(1, canary.ENGINE_STARTS + 1)))
    assert lost_rows(made(block(Unit(0, 0, 1)))) == [
        (0, 0, f"RuntimeError: try {canary.ENGINE_STARTS}", True)
    ]


class Outage(Adapted):
    """Adapters in a store that does not answer the first `left` times."""

    left = 1

    def copy_to_node(self, numbers: dict[str, int] | None = None) -> dict[str, Any]:
        Outage.left -= 1
        if Outage.left >= 0:
            raise StoreUnavailable("s3://b/adapter: 503")
        return super().copy_to_node(numbers)


def test_a_store_that_is_away_while_adapters_are_copied_leaves_rows_for_a_later_pass(
    started, monkeypatch
):
    monkeypatch.setattr(Outage, "left", 1)
    made, _ = started(echo, launch=replace(LAUNCH, adapted=Outage(None)))
    ((_, _, why, fatal),) = lost_rows(made(block(Unit(0, 0, 1))))
    assert why == "StoreUnavailable: s3://b/adapter: 503" and not fatal
    made.take_over(LAUNCH)  # the next pass
    assert not is_lost(made(block(Unit(0, 0, 1))))


@pytest.mark.usefixtures("no_misfits")
def test_a_store_that_is_away_while_the_model_is_fetched_is_asked_again(started):
    error = StoreUnavailable("s3://b/model: 503")
    made, factory = started(error, echo)
    assert not is_lost(made(block(Unit(0, 0, 1)))) and len(factory.arguments) == 2
    made, factory = started(*[error] * canary.ENGINE_STARTS)
    ((_, _, why, fatal),) = lost_rows(made(block(Unit(0, 0, 1))))
    assert why == "StoreUnavailable: s3://b/model: 503" and not fatal
    assert len(factory.arguments) == canary.ENGINE_STARTS


def test_a_store_that_is_away_while_the_labels_tokenizer_is_fetched_is_not_fatal(
    started, monkeypatch
):
    def away(*_: Any) -> Any:
        raise StoreUnavailable("s3://b/model: 503")

    monkeypatch.setattr(stage_module.models, "tokenizer_place", away)
    made, _ = started(echo, launch=replace(LAUNCH, labels=("a", "b")))
    ((_, _, why, fatal),) = lost_rows(made(block(Unit(0, 0, 1))))
    assert why.startswith("StoreUnavailable: ") and "503" in why and not fatal


# --- the spec -----------------------------------------------------------------------------------


def test_the_environment_is_set_before_the_engine_starts(started, monkeypatch):
    monkeypatch.setenv("RAYBATCH_TEST", "before")
    seen: list[str | None] = []

    class Looks(Factory):
        def __call__(self, arguments: dict[str, Any], hang_seconds: float | None = None) -> Any:
            seen.append(os.environ.get("RAYBATCH_TEST"))
            return super().__call__(arguments, hang_seconds)

    monkeypatch.setattr(stepper, "SteppedEngine", Looks(echo))
    EngineStage(EngineLaunch(dict(MODEL), {}, {}, {"RAYBATCH_TEST": "set"}))
    assert seen == ["set"]


def launch_for(job: BatchJob, gpus: int = 0) -> EngineLaunch:
    size = sizes_of(size_spec(job), 1000, 50, Capacity(16, gpus, 1, "here"))
    return engine_launch(compile_job(job), dict(MODEL), size)


EMBEDS = {"task": "embed"}


@pytest.mark.parametrize(
    ("engine", "gpus", "apart"),
    [
        (EMBEDS, 2, "0"),
        ({**EMBEDS, "env": {forking.CORE_APART: "1"}}, 2, "1"),
        ({**EMBEDS, "tensor_parallel_size": 2}, 2, None),
        ({**EMBEDS, "numa_bind": True}, 2, None),
        ({}, 2, None),
        ({}, 0, "0"),
    ],
)
def test_an_engine_that_pools_on_one_gpu_has_its_core_in_its_actors_process(
    engine: dict[str, Any], gpus: int, apart: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(forking.CORE_APART, raising=False)
    sampling: dict[str, Any] = {} if "task" in engine else {"max_tokens": 8}
    job = make_job(engine=engine, sampling=sampling, prompt={"template": "{Company}"})
    assert launch_for(job, gpus).env.get(forking.CORE_APART) == apart


@pytest.mark.parametrize(
    ("groups", "given"),
    [
        ({"output": {"uri": "o", "reasoning_parser": "qwen3"}}, None),
        (
            {
                "output": {"uri": "o", "reasoning_parser": "qwen3"},
                "sampling": {"choice": ["yes", "no"]},
            },
            "qwen3",
        ),
        (
            {
                "output": {"uri": "o", "reasoning_parser": "qwen3"},
                "prompt": {"function": "helpers.functions:as_text"},
            },
            "qwen3",
        ),
        (
            {
                "output": {"uri": "o", "reasoning_parser": "qwen3"},
                "sampling": {"thinking_token_budget": 8},
            },
            "qwen3",
        ),
        ({"engine": {"reasoning_parser": "olmo3"}, "sampling": {"choice": ["yes"]}}, "olmo3"),
        ({"sampling": {"choice": ["yes", "no"]}}, None),
    ],
)
def test_an_engine_knows_of_thinking_where_the_answer_has_a_form(groups, given):
    """Else the form would be forced upon the thinking, or a budget of it refused."""
    spec = launch_for(make_job(**groups))
    assert spec.arguments.get("reasoning_parser") == given
    parsed = "reasoning_parser" in groups.get("output", {})
    assert spec.sampling.get("skip_special_tokens") is (False if parsed else None)


GIB = 2**30


@pytest.mark.parametrize(
    ("there", "planned", "same"),
    [
        (139.8 * GIB, 141 * 10**9, True),  # as planned, or a little less than the data sheet
        (80 * GIB, 80 * 10**9, True),
        (70 * GIB, 141 * 10**9, False),  # a part of a GPU: the share is reckoned anew
        (70 * GIB, 0, False),  # nobody knew the GPU
    ],
)
def test_a_packed_engine_keeps_to_its_share_of_the_gpu_that_is_there(
    there, planned, same, monkeypatch
):
    platform = types.SimpleNamespace(get_device_total_memory=lambda: int(there))
    fake = types.SimpleNamespace(current_platform=platform)
    monkeypatch.setitem(sys.modules, "vllm.platforms", fake)
    monkeypatch.setattr(stepper, "SteppedEngine", Factory(echo))
    share = {"kv_cache_memory_bytes": 7, "gpu_memory_utilization": 0.46} if planned else {}
    arguments = {"max_num_batched_tokens": 2048, "max_num_seqs": 8}
    found = EngineStage(EngineLaunch(dict(MODEL), {}, arguments, {}, 2, planned, share)).arguments()
    if same:
        assert found["kv_cache_memory_bytes"] == 7
    else:
        assert 28 * GIB < found["kv_cache_memory_bytes"] < 32 * GIB
        assert found["gpu_memory_utilization"] == 0.46
    assert found["max_num_seqs"] == 8
    spec = EngineLaunch(dict(MODEL), {}, arguments, {}, 2, planned, share, encodes=True)
    found = EngineStage(spec).arguments()
    assert "kv_cache_memory_bytes" not in found and found["gpu_memory_utilization"] == 0.46


def test_a_shard_that_another_driver_committed_meanwhile_is_not_inferred(started):
    done = {3}
    asked = EngineLaunch(dict(MODEL), {}, {}, done=lambda shard: shard in done)
    engine, factory = started(lambda requests: [completion("a") for _ in requests], launch=asked)
    assert engine(block(Unit(3, 0, 4))).num_rows == 0
    assert engine(block(Unit(4, 0, 4))).num_rows == 4
    assert factory.plan == [] and list(
        lost_block(Unit(3, 0, 2), Loss("", "why")).to_pylist()
    ) == list(engine(lost_block(Unit(3, 0, 2), Loss("", "why"))).to_pylist())


def test_a_store_that_does_not_say_whether_a_shard_is_committed_costs_no_rows(started):
    def done(shard: int) -> bool:
        raise StoreUnavailable("503")

    asked = EngineLaunch(dict(MODEL), {}, {}, done=done)
    engine, _ = started(lambda requests: [completion("a") for _ in requests], launch=asked)
    assert engine(block(Unit(0, 0, 4))).num_rows == 4


# --- order and equal requests -------------------------------------------------------------------


def prepared(prompts: list[list[int]], params: dict[int, str] | None = None) -> pa.Table:
    table = block(Unit(0, 0, len(prompts)), params=params)
    column = pa.array(prompts, pa.list_(pa.int32()))
    return table.set_column(table.column_names.index(TOKENS), TOKENS, column)


def test_rows_go_to_the_engine_in_its_order_and_answers_come_back_in_theirs(started):
    prompts = [[4], [1, 1, 1], [2, 2], [3, 3, 3, 3]]
    made, _ = started(echo)
    table = made(prepared(prompts))
    assert [len(r.prompt_token_ids) for r in made.engine.seen[0]] == [4, 3, 2, 1]
    assert table[ANSWERS].to_pylist() == [[[4, 2]], [[1, 2]], [[2, 2]], [[3, 2]]]
    assert table[PROMPT_TOKENS].to_pylist() == [1, 3, 2, 4]
    plain, _ = started(echo, launch=replace(LAUNCH, sort=False))
    assert plain(prepared(prompts))[ANSWERS].equals(table[ANSWERS])
    assert [r.prompt_token_ids for r in plain.engine.seen[0]] == prompts


def test_equal_requests_are_asked_once_and_counted_once(started):
    prompts = [[7], [8], [7], [7], [8]]
    own = {3: '{"max_tokens": 9}'}
    made, _ = started(echo)
    table = made(prepared(prompts, own))
    assert len(made.engine.seen[0]) == 3
    assert [a[0][0] for a in table[ANSWERS].to_pylist()] == [7, 8, 7, 7, 8]
    assert table[MERGED].to_pylist() == [False, False, True, False, True]
    assert table[PROMPT_TOKENS].to_pylist() == [1, 1, 1, 1, 1]  # finish counts those not merged
    assert table[CACHED_TOKENS].to_pylist() == [1, 1, None, 1, None]
    assert table[FINISH].to_pylist() == ["stop"] * 5
    each, _ = started(echo, launch=replace(LAUNCH, merge=False))
    assert each(prepared(prompts, own))[ANSWERS].equals(table[ANSWERS])
    assert len(each.engine.seen[0]) == 5


def test_a_request_that_is_refused_fails_all_its_rows(started):
    def refuses(requests: Any) -> list[Completion]:
        return [Completion([], error=("ValueError", "no")) for _ in requests]

    made, _ = started(refuses)
    table = made(prepared([[7], [7]]))
    assert [e["message"] for e in table[ERROR].to_pylist()] == ["no", "no"]
    assert table[ANSWERS].to_pylist() == [None, None]


def test_nothing_is_asked_once_beside_a_logits_processor_of_the_users():
    """It may keep a state, or count."""
    spec = launch_for(make_job(engine={"logits_processors": ["mine:Processor"]}))
    assert spec.merge is False


def test_tokens_of_a_bias_are_numbers_again():
    """A job is JSON on its way, and vLLM compares them with numbers."""
    job = make_job(sampling={"logit_bias": {7: 1.5}})
    assert plain_fields(sampling_spec(job).fields)["logit_bias"] == {7: 1.5}


# --- from one run to the next -----------------------------------------------------------------


def test_the_next_run_takes_the_engine_over(started: Any) -> None:
    told: list[Any] = []
    stage, factory = started(echo)
    stage(block(Unit(0, 0, 2)))
    asked = replace(
        LAUNCH, sampling={"max_tokens": 9}, tell=lambda engine, marks: told.append(dict(marks))
    )
    stage.take_over(asked)
    stage(block(Unit(0, 0, 2)))
    assert len(factory.made) == 1, "no other engine is started"
    assert [call[0].params for call in factory.made[0].seen] == [LAUNCH.sampling, asked.sampling]
    wait_for(lambda: bool(told))
    assert set(told[0]) == {phases.FIRST_STEP, phases.STEPPED}, "nothing is left to start"
    stage.close()
    assert factory.made[0].closed and stage.engine is None


def test_what_was_refused_to_one_run_is_tried_again_for_the_next(started: Any) -> None:
    stage, factory = started(ValueError("no such model"), echo)
    assert stage.ready() is None
    stage.take_over(LAUNCH)
    assert stage.ready() is factory.made[0]


def test_an_engine_that_was_started_for_a_run_to_come_tells_its_start_as_that_runs(
    started: Any,
) -> None:
    told: list[Any] = []
    ahead = replace(LAUNCH, untaken=True, tell=lambda engine, marks: told.append(engine))
    stage, factory = started(echo, launch=ahead)
    wait_for(lambda: bool(told))
    own: list[Any] = []
    stage.take_over(replace(LAUNCH, tell=lambda engine, marks: own.append(engine)))
    stage(block(Unit(0, 0, 2)))
    assert len(factory.made) == 1 and not own, "who told of the start goes on with it"


def test_a_start_ahead_of_its_run_that_failed_is_told_and_not_tried_again(started: Any) -> None:
    stage, factory = started(
        ValueError("no such model"), echo, launch=replace(LAUNCH, untaken=True)
    )
    stage.take_over(LAUNCH)
    ((_, _, why, fatal),) = lost_rows(stage(block(Unit(0, 0, 1))))
    assert fatal and "no such model" in why and not factory.made
    stage.take_over(LAUNCH)
    assert stage.ready() is factory.made[0], "the next pass tries it, as ever"


def test_an_engine_that_died_between_two_runs_is_started_anew(started: Any) -> None:
    stage, factory = started(echo, echo)
    factory.made[0].died = "killed"
    stage.take_over(LAUNCH)
    assert stage.ready() is factory.made[1] and factory.made[0].closed


def test_a_run_whose_labels_cannot_be_read_is_refused_and_holds_no_engine(started: Any) -> None:
    stage, factory = started(echo)
    nowhere = {**MODEL, "tokenizer": "/nowhere"}
    stage.take_over(replace(LAUNCH, model=nowhere, labels=("a", "b")))
    assert stage.ready() is None and factory.made[0].closed
    ((_, _, why, fatal),) = lost_rows(stage(block(Unit(0, 0, 1))))
    assert fatal and "/nowhere" in why


def adapted(folder: Path, **contents: str) -> Adapted:
    """Adapters in folders of these names, as a plan keeps them."""
    pinned = {}
    for name, content in contents.items():
        place = folder / f"{name}-{content}"
        place.mkdir(exist_ok=True)
        for file in adapters.ADAPTER_FILES:
            (place / file).write_text(content)
        identity = adapters.identities(model_request(Engine(model="demo", adapter=str(place))))[""]
        pinned[name] = {"source": str(place), "revision": None, "identity": identity, "rank": 4}
    return Adapted("which", pinned)


def test_adapters_of_the_next_run_have_numbers_of_their_own_in_the_engine(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes two of one number for the same, also where the run of the first one is over."""
    monkeypatch.setenv("RAYBATCH_CACHE", str(tmp_path / "cache"))
    stage, factory = started(echo)
    known: dict[str, set[int]] = {}
    for contents in ({"a": "one", "b": "two"}, {"a": "two", "c": "three"}, {"a": "one"}):
        stage.take_over(replace(LAUNCH, adapted=adapted(tmp_path, **contents)))
        table = block(Unit(0, 0, len(contents)))
        stage(table.append_column("which", pa.array(list(contents))))
        for request in factory.made[0].seen[-1]:
            assert request.adapter is not None
            _, number, path = request.adapter
            content = (Path(path) / adapters.ADAPTER_CONFIG).read_text()
            known.setdefault(content, set()).add(number)
    assert len(factory.made) == 1, "no other engine is started"
    assert sorted(known) == ["one", "three", "two"] and all(len(n) == 1 for n in known.values())
    assert len(set.union(*known.values())) == 3


def test_a_run_whose_adapters_changed_is_refused_and_holds_no_engine(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYBATCH_CACHE", str(tmp_path / "cache"))
    stage, factory = started(echo, echo)
    changed = adapted(tmp_path, a="one")
    (tmp_path / "a-one" / adapters.ADAPTER_WEIGHTS).write_text("other")
    stage.take_over(replace(LAUNCH, adapted=changed))
    assert stage.ready() is None and factory.made[0].closed
    ((_, _, why, fatal),) = lost_rows(stage(block(Unit(0, 0, 1))))
    assert fatal and "changed after the run was planned" in why
    stage.take_over(LAUNCH)
    assert stage.ready() is factory.made[1]
