"""Files of a result written by Ray tasks: on a real cluster, with workers that die on the way."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import SmallRun, make_job, small_run
from helpers.specs import reads

from prefect_raybatch.api import finalize_run
from prefect_raybatch.cluster import side_by_side as module
from prefect_raybatch.cluster.side_by_side import copying_for, run_in_parallel, workers_for
from prefect_raybatch.compile.job import cluster_spec
from prefect_raybatch.errors import ClusterUnavailable, CorruptRun, SourceError
from prefect_raybatch.ledger.layout import PART_NOTES
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Part
from prefect_raybatch.result import finalize as finalizing
from prefect_raybatch.result.finalize import finalize
from prefect_raybatch.result.parts import PartTask, write_part
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.run import Run
from prefect_raybatch.source import side_copies, snapshot
from prefect_raybatch.storage import open_store

FAILED = {(1, 1), (4, 3)}


def committed(root: Path) -> SmallRun:
    run = small_run(root, rows=24, per_shard=4)
    run.commit_all(FAILED)
    return run


def end(run: SmallRun) -> None:
    output = run.job.output.model_copy(update={"uri": "x"})
    job = run.job.model_copy(update={"output": output})
    uri = open_store(str(run.root)).uri
    finalize_run(job, Run(uri, "key", run.plan.hash, run.plan.rows, run.plan.shards, False))


def result_of(root: Path) -> dict[str, bytes]:
    paths = [*(root / "data").iterdir(), *(root / "_quarantine").iterdir()]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


# --- tasks --------------------------------------------------------------------------------------


def test_items_are_taken_as_there_is_room_and_a_lost_worker_s_is_done_again(local_ray, tmp_path):
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(9):
            taken.append(number)
            yield number

    def work(number: int) -> int:
        died = tmp_path / str(number)
        if number == 3 and not died.exists():
            died.touch()
            os._exit(1)
        return number * number

    found = run_in_parallel(work, items(), 4)
    first = next(found)
    assert len(taken) == 4
    assert sorted([first, *found]) == [n * n for n in range(9)]


def test_an_error_of_ours_comes_out_as_it_is_and_ends_the_work(local_ray, tmp_path):
    begun, told = tmp_path / "begun", tmp_path / "told"
    begun.mkdir()

    def work(number: int) -> int:
        (begun / str(number)).touch()
        if number == 1:
            raise CorruptRun("pieces/1 is missing")
        while not told.exists():  # nobody is through before the error is
            time.sleep(0.1)
        return number

    with pytest.raises(CorruptRun, match=r"^pieces/1 is missing$"):
        list(run_in_parallel(work, iter(range(1000)), 2))
    told.touch()
    assert {path.name for path in begun.iterdir()} <= {"0", "1"}


# --- finalize -----------------------------------------------------------------------------------


def test_a_result_written_on_a_cluster_is_the_one_written_here(local_ray, tmp_path, monkeypatch):
    run = committed(tmp_path / "away")
    shutil.copytree(tmp_path / "away", tmp_path / "here")
    store = open_store(str(tmp_path / "here"))
    here = replace(run, root=tmp_path / "here", store=store, ledger=Ledger(store))
    monkeypatch.setattr(module, "WORTH_A_TASK", 0)
    finalize(here.ledger, run.plan, run.shards, "_row", 1)
    finalize(run.ledger, run.plan, run.shards, "_row", 1, writers=on_ray)
    assert len(result_of(run.root)) == 8 and result_of(run.root) == result_of(here.root)
    for name in ("data-00002.json", "quarantine-00001.json"):  # as if it was killed before them
        (run.root / PART_NOTES / name).unlink()
    monkeypatch.setattr(finalizing, "write_sequentially", None)  # nobody writes here
    end(run)
    assert verify(run.store).ok and result_of(run.root) == result_of(here.root)
    assert not list((run.root / PART_NOTES).glob("*"))


def on_ray(
    write: Callable[[PartTask], Part], tasks: Iterator[PartTask], size: int
) -> Iterable[Part]:
    return run_in_parallel(write, tasks, 4)


def test_an_input_copied_on_a_cluster_is_the_one_copied_here(local_ray, tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()

    def rows_of(number: int) -> str:
        rows = (f"{n},{n / 4 if number == 9 else n}\n" for n in range(number, 30))
        return "a,b\n" + "".join(rows)

    for number in range(12):
        (tmp_path / "in" / f"{number:02d}.csv").write_text(rows_of(number))
    monkeypatch.setattr(module, "WORTH_A_TASK", 0)
    monkeypatch.setattr(side_copies, "SHARE_FILES", 2)
    job = make_job(cluster={"address": "auto"})
    found = []
    for name, reachable in (("away", True), ("here", False)):
        place, given = open_store(str(tmp_path / name)), reads(uri=str(tmp_path / "in"))
        used = partial(
            lambda reached, size, remote: copying_for(cluster_spec(job), size, reached), reachable
        )
        made = snapshot(given, place, "attempt", used)
        assert len(made.files) == 6
        found.append(pa.concat_tables(pq.read_table(f"{place.uri}/{f.uri}") for f in made.files))
        (tmp_path / "in" / "07.csv").write_text("a,b\n1,2\n1,2,3\n" + "1,2\n" * 29)
        with pytest.raises(SourceError, match=r"in/07.csv, line 3 has 3 columns"):
            snapshot(given, place, "attempt", used)
        (tmp_path / "in" / "07.csv").write_text(rows_of(7))
    assert found[0].schema.types == [pa.int64(), pa.string()]  # 2 and 2.25 as they are written
    assert found[0].equals(found[1])


def test_a_task_that_wakes_after_the_end_writes_nothing(tmp_path):
    run = committed(tmp_path)
    tasks: list[PartTask] = []

    def kept(
        write: Callable[[PartTask], Part], found: Iterator[PartTask], size: int
    ) -> Iterator[Part]:
        for task in found:
            tasks.append(task)
            yield write(task)

    finalize(run.ledger, run.plan, run.shards, "_row", 1, writers=kept)
    pieces = tmp_path / "_raybatch/pieces"
    shutil.copytree(pieces, tmp_path / "kept")
    end(run)
    before = result_of(tmp_path)
    for task in tasks:
        with pytest.raises(CorruptRun, match="missing"):
            write_part(run.store, task)
    shutil.copytree(tmp_path / "kept", pieces, dirs_exist_ok=True)  # it had read its pieces before
    for task in tasks:
        write_part(run.store, task)
    assert result_of(tmp_path) == before
    (tmp_path / tasks[0].path).write_bytes(b"PAR1")
    with pytest.raises(CorruptRun, match="finished"):
        write_part(run.store, tasks[0])


@pytest.mark.parametrize("what", ["another", "too few", "twice"])
def test_who_writes_is_not_trusted(tmp_path, what):
    run = committed(tmp_path)

    def wrong(
        write: Callable[[PartTask], Part], found: Iterator[PartTask], size: int
    ) -> Iterator[Part]:
        parts = [write(task) for task in found]
        if what == "too few":
            yield from parts[1:]
        yield from [*parts, parts[0]] if what == "twice" else parts
        yield Part("data/part-00099.parquet", 1, 1, "0")

    with pytest.raises(CorruptRun, match="part-000"):
        finalize(run.ledger, run.plan, run.shards, "_row", 1, writers=wrong)


# --- where --------------------------------------------------------------------------------------


def test_small_results_and_those_without_a_cluster_are_written_here(monkeypatch):
    asked: list[str] = []

    @contextmanager
    def away(job: object, user: object) -> Iterator[None]:
        asked.append("connected")
        raise ClusterUnavailable("no Ray cluster answers at 10.0.0.1:6379")
        yield

    monkeypatch.setattr(module, "connected", away)
    monkeypatch.setattr(module, "CLUSTER_SESSION", Outside())
    with workers_for(cluster_spec(make_job()), (1 << 30) - 1) as workers:
        assert workers == 0 and not asked
    served = make_job(cluster={"job_server": "http://10.0.0.1:8265"})
    with workers_for(cluster_spec(served), 1 << 40) as workers:
        assert workers == 0 and not asked
    with workers_for(cluster_spec(make_job()), 1 << 30) as workers:
        assert workers == 0 and asked == ["connected"]


class Outside:
    @contextmanager
    def visited(self) -> Iterator[bool]:
        yield False
