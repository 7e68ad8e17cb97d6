"""The runs of an output folder: listed, the newest complete one found, old ones removed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.retries import FAILED, commit, end, first_run, retried
from helpers.small import SmallRun, input_rows
from s3server import S3Server

from prefect_raybatch import open_run
from prefect_raybatch.api import default_run_key, finalize_whole, publish_run
from prefect_raybatch.cli.commands import main
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.errors import (
    ConfigError,
    CorruptRun,
    NoSuchRun,
    StoreError,
    StoreUnavailable,
)
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.family import locate_run
from prefect_raybatch.ledger.forks import fork_key
from prefect_raybatch.ledger.last_attempt import (
    JUDGING,
    MEASURING,
    PUBLISHING,
    LastAttempt,
    read_last_attempt,
)
from prefect_raybatch.ledger.layout import (
    LAST_ATTEMPT,
    PIECES,
    PLAN,
    PRUNED,
    SUCCESS,
    commit_path,
    published_path,
)
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.result.reap import reap
from prefect_raybatch.result.verify_chain import verify_chain
from prefect_raybatch.runs.listing import COMPLETED, RunLine, latest_complete, list_runs
from prefect_raybatch.runs.prune import prune_runs
from prefect_raybatch.runs.repair import repair_run
from prefect_raybatch.runs.run_history import history_of, with_retries
from prefect_raybatch.spec.run import Identity
from prefect_raybatch.storage import open_store
from prefect_raybatch.storage.local import LocalStore


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three complete runs, the first with a retry, one unfinished, one of another job."""
    root = tmp_path_factory.mktemp("several")
    for key in ("one", "two", "three"):
        run = first_run(root, key=key)
        if key == "one":
            retried(run.store.uri)
    first_run(root, key="open", finish=False)
    first_run(root, key="other", name="another")
    (root / "notes").mkdir()
    (root / "notes/read-me.txt").write_text("no run")
    return root


@pytest.fixture
def out(several: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(several, tmp_path / "out", copy_function=shutil.copy2))


def test_runs_are_listed_newest_first_with_their_state(several):
    lines = list_runs(str(several))
    begun = [line.created for line in lines if line.created is not None]
    assert begun == sorted(begun, reverse=True) and len(begun) == 6
    by_key = {line.run_key: line for line in lines}
    one, unfinished, retry = by_key["one"], by_key["open"], by_key["one.r1"]
    assert (one.state, one.rows, one.good) == ("completed", 20, 20 - len(FAILED))
    assert (one.quarantined, one.shards, one.committed) == (len(FAILED), 4, 4)
    assert one.finished is not None and one.created is not None and one.finished > one.created
    assert (unfinished.state, unfinished.good, unfinished.committed) == ("unfinished", None, 4)
    assert retry.parent == "one" and retry.rows == len(FAILED)
    assert [line.run_key for line in list_runs(str(several), job="another")] == ["other"]


def test_rows_that_a_retry_answered_are_no_longer_in_quarantine(tmp_path):
    root = first_run(tmp_path, key="one").store.uri
    (page,) = history_of(str(tmp_path), job="nightly")
    assert (page.runs[0].good, page.runs[0].quarantined) == (16, 4)
    child = retried(root, failed={7: "ValueError"})
    (page,) = history_of(str(tmp_path), job="nightly")
    assert (page.runs[0].good, page.runs[0].quarantined) == (19, 1)
    retried(child)
    (page,) = history_of(str(tmp_path), job="nightly")
    (line,) = page.runs
    assert (line.run_key, line.good, line.quarantined) == ("one", 20, 0)


def test_a_damaged_run_is_listed_with_what_is_wrong(out):
    (out / "two" / PLAN).write_text("{")
    (line,) = [line for line in list_runs(str(out)) if line.run_key == "two"]
    assert line.state == "not readable" and "plan.json" in line.trouble


def test_the_newest_complete_run_is_the_one_that_finished_last(out):
    found = latest_complete(str(out), job="nightly")
    assert found.run_key == "three"
    assert open_run(found.run).dataset().count_rows() == 20 - len(FAILED)
    with pytest.raises(NoSuchRun, match="no completed run of the job nobody"):
        latest_complete(str(out), job="nobody")


def test_all_but_the_newest_complete_runs_go_with_their_retries(out):
    planned = prune_runs(str(out), 1, dry_run=True)
    assert set(planned.removed) == {"one", "one.r1", "two"} and planned.bytes > 1000
    assert set(planned.kept) == {"three", "open", "other"}
    assert planned.kept["open"].startswith("open is not complete (")
    assert (out / "one" / SUCCESS).exists()
    found = prune_runs(str(out), 1)
    assert found.removed == planned.removed and found.kept == planned.kept
    assert sorted(path.name for path in out.iterdir()) == ["notes", "open", "other", "three"]
    assert prune_runs(str(out), 1).removed == {}


def test_a_family_stays_while_a_retry_of_it_is_not_complete(out):
    (out / "one.r1" / SUCCESS).unlink()
    found = prune_runs(str(out), 1)
    assert set(found.removed) == {"two"}
    assert found.kept["one"] == "one.r1 is not complete (unfinished)"


def test_an_old_run_is_no_newer_after_its_retry(tmp_path):
    for number in (1, 2, 3):
        first_run(tmp_path, key=f"night{number}", created=f"2026-01-0{number}T00:00:00+00:00")
    retried(str(tmp_path / "night1"))
    found = prune_runs(str(tmp_path), 1)
    assert set(found.removed) == {"night1", "night1.r1", "night2"}
    assert set(found.kept) == {"night3"}


def test_a_repaired_run_is_as_old_as_its_original(tmp_path):
    for number in (1, 2):
        run = first_run(tmp_path, key=f"night{number}", created=f"2026-01-0{number}T00:00:00+00:00")
    (tmp_path / "night1/data/part-00000.parquet").write_bytes(b"broken")
    repair_run(str(tmp_path / "night1"))
    fork = Ledger(open_store(str(tmp_path / "night1.m1")))
    plan = fork.load_plan()
    assert plan is not None
    for shard in (~fork.committed(plan)).nonzero()[0].tolist():
        rows = run.block(run.whole(shard)).select(["id", "Company", "tags"])
        commit(fork, run.job, shard, rows, FAILED)
    end(run.job, fork.store.uri)
    assert not prune_runs(str(tmp_path), 2, dry_run=True).removed
    found = prune_runs(str(tmp_path), 1)
    assert set(found.removed) == {"night1", "night1.m1"} and set(found.kept) == {"night2"}


def test_a_repaired_run_keeps_the_run_that_it_continues_and_its_retries(tmp_path):
    run = first_run(tmp_path)
    retried(run.store.uri)
    (tmp_path / "key" / commit_path(0)).unlink()
    repair_run(run.store.uri)
    fork = Ledger(open_store(str(tmp_path / "key.m1")))
    commit(fork, run.job, 0, input_rows(0, 5), FAILED)
    end(run.job, fork.store.uri)
    assert set(prune_runs(str(tmp_path), 1).kept) == {"key", "key.r1", "key.m1"}
    first_run(tmp_path, key="next")
    found = prune_runs(str(tmp_path), 1)
    assert set(found.removed) == {"key", "key.r1", "key.m1"} and set(found.kept) == {"next"}


def repair_twice(run: SmallRun) -> None:
    """Repair the complete run `key`, and then the repaired run; key.m1 and key.m2 are complete."""
    for key in ("key", "key.m1"):
        (run.root.parent / key / commit_path(0)).unlink()
        repair_run(str(run.root.parent / key))
        fork = Ledger(open_store(str(run.root.parent / fork_key(key))))
        commit(fork, run.job, 0, input_rows(0, 5), FAILED)
        end(run.job, fork.store.uri)


def test_no_step_is_left_for_a_repaired_run_also_if_the_next_one_was_deleted(tmp_path):
    run = first_run(tmp_path)
    repair_twice(run)
    LastAttempt("key", run.job.name, JUDGING, 1.0, "me@elsewhere", 1, outcome="failed").put(
        run.store
    )
    shutil.rmtree(tmp_path / "key.m1")
    first_run(tmp_path, key="next")
    assert set(prune_runs(str(tmp_path), 1).removed) == {"key", "key.m2"}


def test_a_repaired_run_keeps_the_first_run_also_if_the_one_between_was_deleted(tmp_path):
    run = first_run(tmp_path)
    retried(run.store.uri)
    repair_twice(run)
    shutil.rmtree(tmp_path / "key.m1")
    assert set(prune_runs(str(tmp_path), 1).kept) == {"key", "key.r1", "key.m2"}
    first_run(tmp_path, key="next")
    found = prune_runs(str(tmp_path), 1)
    assert set(found.removed) == {"key", "key.r1", "key.m2"} and set(found.kept) == {"next"}


def test_the_retry_of_a_deleted_run_whose_key_looks_like_a_repair_belongs_to_no_other_run(tmp_path):
    first_run(tmp_path)
    retried(first_run(tmp_path, key="key.m2").store.uri)
    first_run(tmp_path, key="next")
    shutil.rmtree(tmp_path / "key.m2")
    found = prune_runs(str(tmp_path), 1)
    assert set(found.removed) == {"key"} and set(found.kept) == {"key.m2.r1", "next"}
    assert "retries failed rows of key.m2, which does not exist" in found.kept["key.m2.r1"]


@pytest.mark.parametrize("path", [PLAN, SUCCESS])
def test_an_unreadable_repaired_run_keeps_the_run_that_it_continues_and_its_retries(tmp_path, path):
    run = first_run(tmp_path)
    retried(run.store.uri)
    repair_twice(run)
    first_run(tmp_path, key="next")
    for key in ("key.m2", "key.m1"):
        (tmp_path / key / path).write_text("{")
        found = prune_runs(str(tmp_path), 1)
        assert not found.removed and {"key", "key.r1", "key.m1", "key.m2"} < set(found.kept)


def test_a_run_that_was_repaired_before_it_was_complete_does_not_keep_the_repaired_one(tmp_path):
    run = first_run(tmp_path, finish=False)
    piece = next((tmp_path / "key" / PIECES).iterdir())
    piece.unlink()
    (lost,) = repair_run(run.store.uri).lost
    fork = Ledger(open_store(str(tmp_path / "key.m1")))
    commit(fork, run.job, lost, input_rows(5 * lost, 5), FAILED)
    end(run.job, fork.store.uri)
    first_run(tmp_path, key="next")
    found = prune_runs(str(tmp_path), 1)
    assert set(found.removed) == {"key.m1"} and set(found.kept) == {"next", "key"}


def unpublished(root: Path) -> SmallRun:
    """An old complete run that is not published to its target; returns it. A newer one is there."""
    output = {"publish": [{"name": "lake", "format": "jsonl", "uri": f"{root}/lake/{{run_key}}"}]}
    run = first_run(root / "out", key="night1", created="2026-01-01T00:00:00+00:00", output=output)
    first_run(root / "out", key="night2", output=output)
    return run


def test_a_run_that_is_not_published_stays_until_it_is(tmp_path):
    run = unpublished(tmp_path)
    out = str(tmp_path / "out")
    found = prune_runs(out, 1)
    assert not found.removed
    assert found.kept["night1"] == (
        "night1 is not published to lake; run `raybatch publish` on it, or delete its folder"
    )
    assert found.kept["night2"].startswith("one of the newest"), "also unpublished, but not read"
    publish_run(run.job, run.store.uri)
    assert set(prune_runs(out, 1).removed) == {"night1"}


def test_a_retry_that_is_not_published_keeps_its_run(tmp_path):
    run = unpublished(tmp_path)
    publish_run(run.job, run.store.uri)
    retried(run.store.uri, job=run.job)
    found = prune_runs(str(tmp_path / "out"), 1)
    assert not found.removed and "night1.r1 is not published to lake" in found.kept["night1"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"phase": JUDGING, "outcome": "failed"}, "a step of night1 is not done (not judged: "),
        ({"phase": MEASURING, "by": "me@elsewhere"}, "night1 is being measured since "),
        ({"phase": PUBLISHING, "by": "me@elsewhere"}, "night1 is being published since "),
    ],
)
def test_a_run_with_a_step_that_is_not_done_stays(tmp_path, changes, reason):
    run = unpublished(tmp_path)
    publish_run(run.job, run.store.uri)
    attempt = read_last_attempt(run.store)
    assert attempt is not None
    replace(attempt, ended=None, **changes).put(run.store)
    found = prune_runs(str(tmp_path / "out"), 1)
    assert not found.removed and found.kept["night1"].startswith(reason)


@pytest.mark.parametrize("path", [LAST_ATTEMPT, published_path("lake")])
def test_a_run_whose_records_cannot_be_read_stays(tmp_path, path):
    run = unpublished(tmp_path)
    publish_run(run.job, run.store.uri)
    run.store.put(path, b"{")
    found = prune_runs(str(tmp_path / "out"), 1)
    assert not found.removed and "cannot be read" in found.kept["night1"]


def test_young_runs_and_other_jobs_stay(out):
    assert prune_runs(str(out), 1, older_than=3600).removed == {}
    assert set(prune_runs(str(out), 1, job="another").removed) == set()
    with pytest.raises(ConfigError, match="keep 0"):
        prune_runs(str(out), 0)


CALLS = 15  # puts and deletes of a prune of three runs: a mark, the files, and the last three


@pytest.mark.parametrize("calls", range(1, CALLS))
def test_cut_off_anywhere_it_never_looks_unfinished_and_the_next_call_ends_it(
    out, calls, monkeypatch
):
    left = [calls]
    delete, put = LocalStore.delete, LocalStore.put_if_absent

    def count() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    def counted_delete(self: LocalStore, paths: Iterable[str]) -> None:
        count()
        delete(self, paths)

    def counted_put(self: LocalStore, path: str, data: bytes) -> bool:
        count()
        return put(self, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", counted_delete)
        patch.setattr(LocalStore, "put_if_absent", counted_put)
        with pytest.raises(KeyboardInterrupt):
            prune_runs(str(out), 1)
    states = {line.run_key: line.state for line in list_runs(str(out))}
    assert [key for key, state in states.items() if state == "unfinished"] == ["open"]
    for key in ("one", "one.r1", "two"):  # a plan without _SUCCESS would be resumed
        assert not (out / key / PLAN).exists() or (out / key / SUCCESS).exists()
    prune_runs(str(out), 1)
    assert sorted(path.name for path in out.iterdir()) == ["notes", "open", "other", "three"]


@pytest.mark.parametrize("marks", range(1, 5))
def test_cut_off_between_retries_the_next_call_removes_no_newer_run(tmp_path, monkeypatch, marks):
    for number in (1, 2):
        first_run(tmp_path, key=f"night{number}", created=f"2026-01-0{number}T00:00:00+00:00")
    child = retried(str(tmp_path / "night1"), errors=["ValueError"], failed={7: "ValueError"})
    retried(child)
    retried(str(tmp_path / "night1"))
    put, left = LocalStore.put_if_absent, [marks]

    def counted_put(self: LocalStore, path: str, data: bytes) -> bool:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return put(self, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "put_if_absent", counted_put)
        with pytest.raises(KeyboardInterrupt):
            prune_runs(str(tmp_path), 1)
    prune_runs(str(tmp_path), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["night2"]


def test_a_retry_whose_run_is_gone_stays_and_is_none_of_the_newest_runs(out):
    shutil.rmtree(out / "one")
    found = prune_runs(str(out), 1)
    assert set(found.removed) == {"two"} and "three" in found.kept
    assert found.kept["one.r1"].startswith("it retries failed rows of one, which does not exist")


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_linked_folder_is_no_run(out):
    (out / "latest").symlink_to("three")
    keys = {line.run_key for line in list_runs(str(out))}
    assert keys == {"one", "one.r1", "two", "three", "open", "other"}
    assert latest_complete(str(out), job="nightly").run_key == "three"
    found = prune_runs(str(out), 1)
    assert set(found.removed) == {"one", "one.r1", "two"} and "three" in found.kept
    assert (out / "latest" / SUCCESS).exists() and (out / "latest").is_symlink()


@pytest.mark.parametrize("name", ["three", "linked"])
def test_nothing_is_written_through_a_link_to_another_folder(out, tmp_path, name):
    """Also where the link is called by the key of the run that it leads to."""
    shutil.copytree(out, tmp_path / "else")
    if name == "three":
        shutil.rmtree(out / "three")
    (out / name).symlink_to(tmp_path / "else/three")
    before = tree(tmp_path / "else")
    prune_runs(str(out), 1)
    assert tree(tmp_path / "else") == before
    assert (out / "three" / SUCCESS).exists() or (out / "two" / SUCCESS).exists()
    assert "three" in prune_runs(str(tmp_path / "else"), 1).kept


def test_renamed_and_copied_runs_are_named_never_removed_and_count_for_nothing(out):
    shutil.copytree(out / "three", out / "copy")
    shutil.copytree(out / "one", out / "a-copy")
    (out / "two").rename(out / "renamed")
    (out / "a-copy" / PRUNED).write_bytes(b"{}")
    by_key = {line.run_key: line for line in list_runs(str(out))}
    for key, made in (("copy", "three"), ("a-copy", "one"), ("renamed", "two")):
        assert by_key[key].state == "not readable"
        assert f"is the directory of run {made!r}" in by_key[key].trouble
    found = prune_runs(str(out), 1)
    assert set(found.removed) == {"one", "one.r1"}
    assert "directory of run 'two'" in found.kept["renamed"]
    assert {"copy", "a-copy", "renamed", "three"} < {path.name for path in out.iterdir()}


def test_a_copied_unfinished_run_is_not_continued_in_place_of_its_original(out):
    shutil.copytree(out / "open", out / "zzz")
    plan = Ledger(open_store(str(out / "open"))).load_plan()
    job = BatchJob.from_dict({**plan.job, "output": {**plan.job["output"], "uri": str(out)}})
    resolved = Resolved.of(job, plan.model)
    found = replace(resolved, identity=Identity(plan.fingerprint, plan.parts))
    assert default_run_key(found) == "open"


BROKEN: dict[str, Callable[[Path], object]] = {
    "no plan that is readable": lambda run: (run / PLAN).write_text("{"),
    "a plan that is too large": lambda run: os.truncate(run / PLAN, 65 << 20),
    "another format": lambda run: (run / PLAN).write_text('{"format": 99}'),
    "a _SUCCESS of another plan": lambda run: (run / SUCCESS).write_text("{}"),
    "a plan that leads round": lambda run: round_in_circles(run / PLAN),
    "a _SUCCESS that leads round": lambda run: round_in_circles(run / SUCCESS),
}


def round_in_circles(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("key", ["two", "one.r1"])
def test_one_directory_that_is_not_readable_stops_nothing(out, key, what, capsys):
    BROKEN[what](out / key)
    (line,) = [line for line in list_runs(str(out)) if line.run_key == key]
    assert line.state == "not readable" and line.trouble
    (page,) = history_of(str(out), job="nightly")
    assert page.unreadable[key] == line.trouble
    found = prune_runs(str(out), 1)
    assert key in found.kept and (out / key).exists()
    assert ("one" in found.removed) is (key != "one.r1"), "a run stays with its retry"
    for command in ("runs", "history"):
        with pytest.raises(SystemExit) as ended:
            main([command, str(out)])
        assert not ended.value.code and key in capsys.readouterr().out


def test_a_directory_that_the_disk_refuses_stops_nothing(out, monkeypatch):
    real = os.stat

    def failing(path: Any, *args: Any, **more: Any) -> Any:
        if "/two/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, *args, **more)

    monkeypatch.setattr(os, "stat", failing)
    (line,) = [line for line in list_runs(str(out)) if line.run_key == "two"]
    assert line.state == "not readable" and "no permission" in line.trouble
    assert set(prune_runs(str(out), 1).removed) == {"one", "one.r1"}


def test_a_run_whose_files_cannot_be_listed_stays_with_its_retries(out):
    (out / "one/round").symlink_to("round")
    found = prune_runs(str(out), 1)
    assert set(found.removed) == {"two"}
    assert "cannot be listed" in found.kept["one"] and found.kept["one.r1"] == found.kept["one"]


def test_a_store_that_is_away_is_an_error_and_no_list_of_broken_runs(out, monkeypatch):
    def away(*_: Any) -> Any:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(Ledger, "load_plan", away)
    with pytest.raises(StoreUnavailable):
        list_runs(str(out))
    with pytest.raises(StoreUnavailable):
        prune_runs(str(out), 1)


def test_commands_on_a_link_work_on_the_run_that_it_leads_to(out, tmp_path):
    (out / "latest").symlink_to("two")
    (tmp_path / "far").mkdir()
    (tmp_path / "far/away").symlink_to(out / "two")
    (out / "two/data/part-00000.parquet").write_bytes(b"broken")
    for link in (out / "latest", tmp_path / "far/away"):
        found = repair_run(str(link))
        assert (found.run, found.run_key) == (str(out / "two"), "two.m1")
    assert (out / "two.m1" / PLAN).exists() and not (tmp_path / "far/two.m1").exists()
    (out / "last").symlink_to("open")
    assert finalize_whole(str(out / "last")).run == str(out / "open")
    assert verify_chain(*locate_run(str(out / "last"))).ok


@pytest.mark.parametrize("how", [shutil.copytree, shutil.move])
def test_a_copied_or_renamed_run_is_not_repaired_under_its_new_name(out, how):
    how(out / "two", out / "again")
    (out / "again/data/part-00000.parquet").write_bytes(b"broken")
    before = tree(out)
    with pytest.raises(CorruptRun, match=r"again holds run 'two', .*Rename the folder back"):
        repair_run(str(out / "again"))
    assert tree(out) == before


def test_reap_of_a_copied_run_takes_nothing_behind_a_link(out):
    folder = out / "open/_raybatch/pieces"
    shutil.move(folder, out / "pieces")
    folder.symlink_to(out / "pieces")
    before = tree(out)
    with pytest.raises(StoreError, match="pieces is a link"):
        reap(open_store(str(out / "open")), -60.0)
    assert tree(out) == before


def test_a_run_half_removed_is_named_so(out):
    (out / "two" / PRUNED).write_bytes(b"{}")
    (line,) = [line for line in list_runs(str(out)) if line.run_key == "two"]
    assert line.state == "half removed"
    assert set(prune_runs(str(out), 3).removed) == {"two"}


def test_runs_on_s3_are_listed_and_removed(several, s3: S3Server):
    place, options = "s3://listing/out", s3.options
    store, local = open_store(place, options), open_store(str(several))
    for info in local.list():
        if info.path.startswith(("one/", "two/")):
            store.put(info.path, local.read(info.path))
    assert [line.run_key for line in list_runs(place, options)] == ["two", "one"]
    assert set(prune_runs(place, 1, options=options).removed) == {"one"}
    assert list(store.folders()) == ["two"]
    for info in local.list("two"):
        store.put(f"copy{info.path.removeprefix('two')}", local.read(info.path))
    assert {line.run_key: line.state for line in list_runs(place, options)} == {
        "two": "completed",
        "copy": "not readable",
    }
    found = prune_runs(place, 1, options=options)
    assert not found.removed and "directory of run 'two'" in found.kept["copy"]


def test_runs_that_name_each_other_as_parents_are_left_as_they_are() -> None:
    """Records are foreign data, and whoever follows them must come to an end."""
    one, two = (
        RunLine(key, f"/o/{key}", COMPLETED, rows=9, good=8, quarantined=1, parent=parent)
        for key, parent in (("a", "b"), ("b", "a"))
    )
    assert with_retries([one, two]) == [one, two]
