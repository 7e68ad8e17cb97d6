"""What killed attempts leave goes, and nothing that a driver may still commit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
from helpers.small import SmallRun, small_run

from prefect_raybatch.api import finalize_run
from prefect_raybatch.errors import ConfigError, NoSuchRun
from prefect_raybatch.job.checks import seconds_of
from prefect_raybatch.ledger.layout import commit_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.result.reap import Reaped, orphans, reap
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.run import Run
from prefect_raybatch.storage import FileInfo, open_store

NOW = -60.0  # "older than": everything that is there, whatever a clock's resolution


def files_of(run: SmallRun) -> set[str]:
    return {str(p.relative_to(run.root)) for p in run.root.rglob("*") if p.is_file()}


def finish(run: SmallRun) -> None:
    job = run.job.model_copy(update={"output": run.job.output.model_copy(update={"uri": "x"})})
    found = Run(run.store.uri, "key", run.plan.hash, run.plan.rows, run.plan.shards, False)
    finalize_run(job, found)


def test_a_run_in_progress_keeps_what_may_still_be_committed(tmp_path):
    run = small_run(tmp_path)
    run.commit(0)
    run.commit(1, failed=[3])
    before = files_of(run)
    lost = run.receipt(run.whole(1)).pieces  # the loser of shard 1
    waiting = run.receipt(run.whole(2)).pieces  # its commit may be on its way
    found = reap(run.store, NOW, dry_run=True)
    assert (found.files, found.kept) == ({"pieces": 1}, 1)
    assert len(files_of(run)) == len(before) + 2
    found = reap(run.store, NOW)
    assert found.files == {"pieces": 1} and found.bytes["pieces"] == lost[0].bytes
    assert files_of(run) == before | {f"_raybatch/pieces/{waiting[0].path}"}
    assert reap(run.store, NOW).files == {}


def test_young_files_stay(tmp_path):
    run = small_run(tmp_path)
    run.commit(0)
    (piece,) = run.receipt(run.whole(0)).pieces
    assert reap(run.store, 3600).files == {}
    old = time.time() - 7200
    os.utime(tmp_path / "_raybatch/pieces" / piece.path, (old, old))
    assert reap(run.store, 3600).files == {"pieces": 1}


def test_everything_else_that_a_kill_can_leave(tmp_path):
    run = small_run(tmp_path)
    run.commit(0)
    before = files_of(run)
    left = {
        "_raybatch/input/dead-attempt/part-00000.parquet": "snapshots",
        "_raybatch/shards-0123456789abcdef.parquet": "tables",
        "_raybatch/files-0123456789abcdef.parquet": "tables",
        "_probe-1234/race-0": "probes",
        "_raybatch/commits/.tmp-1234": "unfinished",
        "data/.tmp-5678": "unfinished",
    }
    for name in left:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")
    found = reap(run.store, NOW)
    assert found.files == {"snapshots": 1, "tables": 2, "probes": 1, "unfinished": 2}
    assert found.bytes["tables"] == 10
    assert files_of(run) == before
    run.commit_all()
    finish(run)
    assert verify(run.store).ok


@pytest.mark.parametrize("compact", [True, False])
def test_a_finished_run_keeps_its_result(tmp_path, compact):
    run = small_run(tmp_path, output={"uri": "out", "compact": compact})
    run.commit_all({(0, 1)})
    run.receipt(run.whole(3))  # removed by finalize itself
    finish(run)
    assert len(list((tmp_path / "_raybatch").glob("pieces/*"))) == (0 if compact else 5)
    whole = files_of(run)
    late = run.receipt(run.whole(2)).pieces  # of a zombie that woke after the end
    assert reap(run.store, NOW).files == {"pieces": 1}
    assert late and files_of(run) == whole
    assert verify(run.store).ok


def test_a_run_that_ends_while_its_pieces_are_listed_loses_all_of_them(tmp_path, monkeypatch):
    run = small_run(tmp_path)
    run.commit_all()
    finish(run)
    late = run.receipt(run.whole(2)).pieces
    seen, finished = [], Ledger.finished

    def ending(ledger, plan):
        seen.append(plan)
        return None if len(seen) == 1 else finished(ledger, plan)

    monkeypatch.setattr(Ledger, "finished", ending)
    (orphan,) = orphans(Ledger(run.store), run.plan)
    assert orphan.path == f"_raybatch/pieces/{late[0].path}"


def test_the_pieces_of_a_finished_run_are_not_held_together(tmp_path, monkeypatch):
    """There may be half a million of them."""
    run = small_run(tmp_path)
    run.commit_all()
    finish(run)
    (piece,) = run.receipt(run.whole(2)).pieces
    listed, alive, most = type(run.store).list, set(), 0

    class Seen(FileInfo):
        __slots__ = ("__weakref__",)

    def listing(store, prefix="", recursive=True):
        for info in listed(store, prefix, recursive):
            for number in range(100 if info.path.endswith(piece.path) else 1):
                made = Seen(info.path.replace("-0-", f"-{number}-"), info.size, None, 0)
                alive.add(id(made))
                weakref.finalize(made, alive.discard, id(made))
                yield made

    monkeypatch.setattr(type(run.store), "list", listing)
    given = 0
    for info in orphans(Ledger(run.store), run.plan):
        given, most = given + 1, max(most, len(alive))
        assert isinstance(info, Seen)
    assert given == 100 and most < 5


def test_files_that_only_look_like_ours_stay(tmp_path):
    run = small_run(tmp_path)
    run.commit(0)
    (piece,) = run.receipt(run.whole(0)).pieces  # the loser of shard 0
    for name in (
        f"pieces/{piece.path.removesuffix('.parquet')} (copy).parquet",
        "pieces/00000000-notes.parquet",
        "shards-0123456789abcdef (copy).parquet",
        "files-of-mine.parquet",
    ):
        (tmp_path / "_raybatch" / name).write_bytes(b"12345")
    before = files_of(run)
    assert reap(run.store, NOW).files == {"pieces": 1}
    assert files_of(run) == before - {f"_raybatch/pieces/{piece.path}"}


def test_no_run_directory_is_touched_that_is_none(tmp_path):
    (tmp_path / "_probe-1").mkdir()
    (tmp_path / "_probe-1/x").write_bytes(b"")
    with pytest.raises(NoSuchRun, match="not a run directory"):
        reap(open_store(str(tmp_path)), NOW)
    assert (tmp_path / "_probe-1/x").exists()


def test_durations():
    assert [seconds_of(t) for t in ("90s", "15m", "2h", "3d", "1.5h", "0s")] == [
        90,
        900,
        7200,
        259200,
        5400,
        0,
    ]
    for text in ("", "1", "h", "-1h", "1w", "1h30m", "inf"):
        with pytest.raises(ConfigError, match="is not a duration"):
            seconds_of(text)


STOPPED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from helpers.small import make_job, Ledger, SmallRun, open_store
store = open_store({root!r})
ledger = Ledger(store)
plan = ledger.load_plan()
run = SmallRun(Path({root!r}), plan, ledger.shards(plan), ledger, store, make_job())
receipt = run.receipt(run.whole(0))
print("piece", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
print("won" if ledger.commit(plan, 5, [receipt]) else "lost", flush=True)
"""


def wait_until_stopped(pid: int) -> None:
    """A SIGCONT sent before the SIGSTOP would leave the process stopped for ever."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


@pytest.mark.parametrize("winner", ["the stopped one", "another"])
def test_a_driver_stopped_before_its_commit_loses_nothing_to_reap(tmp_path, winner):
    run = small_run(tmp_path)
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    script = STOPPED.format(paths=paths, root=str(tmp_path))
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None and driver.stdout.readline() == "piece\n"
        wait_until_stopped(driver.pid)
        if winner == "another":
            run.commit(0)
        found = reap(run.store, NOW)
        assert found.files == ({} if winner == "the stopped one" else {"pieces": 1})
        os.kill(driver.pid, signal.SIGCONT)
        assert driver.stdout.readline() == ("won" if winner == "the stopped one" else "lost") + "\n"
        assert driver.wait(60) == 0
    finally:
        driver.kill()
        driver.wait()
    for shard in (1, 2, 3):
        run.commit(shard)
    finish(run)
    assert verify(run.store).ok


def test_a_writer_whose_temporary_file_was_reaped_writes_it_again(tmp_path, monkeypatch):
    run = small_run(tmp_path)
    real, calls = os.link, []

    def link(temporary: str, target: str) -> None:
        calls.append(target)
        if len(calls) == 1:
            assert reap(run.store, NOW).files == {"unfinished": 1}
        real(temporary, target)

    monkeypatch.setattr(os, "link", link)
    assert run.commit(0) is not None
    assert len(calls) == 2
    assert run.ledger.read_commit(run.plan, 0).shard == 0


def test_on_s3_uploads_that_were_cut_off_go_too(tmp_path, s3):
    import s3fs

    run = small_run(tmp_path)
    run.commit(0)
    store = open_store("s3://reap/run", s3.options)
    for info in run.store.list():
        store.put(info.path, run.store.read(info.path))
    store.put(f"_raybatch/pieces/00000000-{'d' * 32}.parquet", b"x" * 10)
    fs = s3fs.S3FileSystem(
        key=s3.key,
        secret=s3.secret,
        endpoint_url=s3.endpoint,
        client_kwargs={"region_name": "us-east-1"},
    )
    for key in ("run/data/part-00000.parquet", "other/data/part-00000.parquet"):
        fs.call_s3("create_multipart_upload", Bucket="reap", Key=key)
    assert reap(store, 3600).files == {}
    found: Reaped = reap(store, NOW)
    assert found.files == {"pieces": 1, "unfinished": 1}
    assert reap(store, NOW).files == {}
    left = fs.call_s3("list_multipart_uploads", Bucket="reap")["Uploads"]
    assert [upload["Key"] for upload in left] == ["other/data/part-00000.parquet"]
    assert Ledger(store).is_committed(0) and commit_path(0)
