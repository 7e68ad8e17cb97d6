"""What holds a run while a test looks at it (helpers/processes.py), on a machine without limits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from helpers.processes import below, held, until

WORK = """
import pathlib, sys, time
log, pause = pathlib.Path(sys.argv[1]).open("a"), float(sys.argv[2])
while True:
    print("committed", file=log, flush=True)
    time.sleep(pause)
"""


def committed(folder: Path) -> int:
    return sum(path.read_text().count("\n") for path in folder.glob("*.log"))


def find() -> list[psutil.Process]:
    return below(os.getpid(), "committed")


@contextmanager
def working(folder: Path, name: str = "one", pause: float = 0.0) -> Iterator[psutil.Process]:
    """A process that commits without end."""
    command = [sys.executable, "-c", WORK, str(folder / f"{name}.log"), str(pause)]
    with subprocess.Popen(command) as process:
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()


def test_what_could_commit_thousands_of_times_a_second_is_held(tmp_path: Path) -> None:
    looks: list[bool] = []

    def counted() -> list[psutil.Process]:
        looks.append(True)
        return find()

    with held(counted, lambda: committed(tmp_path), every=600.0), working(tmp_path) as process:
        until(lambda: process.status() == psutil.STATUS_STOPPED, 60, "the hold")
        before, seen = committed(tmp_path), len(looks)
        until(lambda: len(looks) >= seen + 3, 60, "more looks of the holder")
        assert committed(tmp_path) == before


def test_one_that_starts_later_is_held_as_well(tmp_path: Path) -> None:
    with held(find, lambda: committed(tmp_path), every=600.0), working(tmp_path) as process:
        until(lambda: process.status() == psutil.STATUS_STOPPED, 60, "the hold")
        with working(tmp_path, "another") as another:
            until(lambda: another.status() == psutil.STATUS_STOPPED, 60, "the hold of another")


def test_it_goes_on_in_each_turn_and_at_the_end(tmp_path: Path) -> None:
    """So that it never stalls, though a commit takes many strokes."""
    with working(tmp_path, pause=0.4) as process:
        with held(find, lambda: committed(tmp_path), every=0.5):
            until(lambda: process.status() == psutil.STATUS_STOPPED, 60, "the hold")
            before = committed(tmp_path)
            until(lambda: committed(tmp_path) >= before + 2, 60, "two more commits")
        until(lambda: process.status() != psutil.STATUS_STOPPED, 60, "the end of the hold")
        before = committed(tmp_path)
        until(lambda: committed(tmp_path) > before, 60, "a commit")


def test_a_run_whose_processes_are_not_found_fails_the_test(tmp_path: Path) -> None:
    looks: list[bool] = []

    def nothing() -> list[psutil.Process]:
        looks.append(True)
        return []

    def hold() -> None:
        with held(nothing, lambda: committed(tmp_path)), working(tmp_path) as process:
            until(lambda: looks, 60, "a look for the processes to hold")
            assert process.is_running()

    with pytest.raises(AssertionError, match="no process is found"):
        hold()
