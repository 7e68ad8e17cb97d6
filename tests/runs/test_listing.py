"""The runs of an output folder: listed, the newest complete one found, old ones removed."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from helpers.retries import FAILED, first_run, retried
from s3server import S3Server

from prefect_raybatch import open_run
from prefect_raybatch.errors import ConfigError, NoSuchRun
from prefect_raybatch.ledger.layout import PLAN, PRUNED, SUCCESS
from prefect_raybatch.runs.listing import latest_complete, list_runs
from prefect_raybatch.runs.prune import prune
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
    planned = prune(str(out), 1, dry_run=True)
    assert set(planned.removed) == {"one", "one.r1", "two"} and planned.bytes > 1000
    assert set(planned.kept) == {"three", "open", "other"}
    assert (out / "one" / SUCCESS).exists()
    found = prune(str(out), 1)
    assert found.removed == planned.removed and found.kept == planned.kept
    assert sorted(path.name for path in out.iterdir()) == ["notes", "open", "other", "three"]
    assert prune(str(out), 1).removed == {}


def test_a_family_stays_while_a_retry_of_it_is_not_complete(out):
    (out / "one.r1" / SUCCESS).unlink()
    found = prune(str(out), 1)
    assert set(found.removed) == {"two"}
    assert found.kept["one"] == "one.r1 is unfinished"


def test_young_runs_and_other_jobs_stay(out):
    assert prune(str(out), 1, older_than=3600).removed == {}
    assert set(prune(str(out), 1, job="another").removed) == set()
    with pytest.raises(ConfigError, match="keep 0"):
        prune(str(out), 0)


@pytest.mark.parametrize("calls", range(1, 8))
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
            prune(str(out), 1)
    states = {line.run_key: line.state for line in list_runs(str(out))}
    assert [key for key, state in states.items() if state == "unfinished"] == ["open"]
    for key in ("one", "two"):  # a plan without _SUCCESS would be resumed
        assert not (out / key / PLAN).exists() or (out / key / SUCCESS).exists()
    prune(str(out), 1)
    assert sorted(path.name for path in out.iterdir()) == ["notes", "open", "other", "three"]


def test_a_run_half_removed_is_named_so(out):
    (out / "two" / PRUNED).write_bytes(b"{}")
    (line,) = [line for line in list_runs(str(out)) if line.run_key == "two"]
    assert line.state == "half removed"
    assert set(prune(str(out), 3).removed) == {"two"}


def test_runs_on_s3_are_listed_and_removed(several, s3: S3Server):
    place, options = "s3://listing/out", s3.options
    store, local = open_store(place, options), open_store(str(several))
    for info in local.list():
        if info.path.startswith(("one/", "two/")):
            store.put(info.path, local.read(info.path))
    assert [line.run_key for line in list_runs(place, options)] == ["two", "one"]
    assert set(prune(place, 1, options=options).removed) == {"one"}
    assert list(store.folders()) == ["two"]
