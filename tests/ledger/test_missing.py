"""What is said of a place that holds no run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.small import small_run

from prefect_raybatch.api import retry
from prefect_raybatch.cli import commands as cli
from prefect_raybatch.cli.commands import exit_status
from prefect_raybatch.errors import CorruptRun, NoSuchRun, RayBatchError, StoreUnavailable
from prefect_raybatch.ledger.family import load_family
from prefect_raybatch.ledger.layout import PLAN
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.result.reap import reap
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.status import report_of, status
from prefect_raybatch.storage import LocalStore, open_store


def said(root: Path, path: str) -> str:
    with pytest.raises(NoSuchRun) as caught:
        status(str(root / path))
    return str(caught.value)


@pytest.mark.parametrize(
    "look",
    [
        status,
        report_of,
        lambda uri: verify(open_store(uri)),
        lambda uri: reap(open_store(uri)),
        lambda uri: load_family(open_store(uri).above(), "gone"),
        lambda uri: retry.retry_request(uri),
    ],
    ids=["status", "report", "verify", "reap", "chain", "retry"],
)
def test_a_run_that_is_not_there_is_called_so_by_everyone(tmp_path, look: Any):
    small_run(tmp_path / "monday", key="monday")
    with pytest.raises(NoSuchRun, match=r"gone is not a run directory: .*_raybatch/plan\.json"):
        look(str(tmp_path / "gone"))


def test_the_nearest_runs_are_named(tmp_path):
    for key in ("demo-20261120", "demo-20261121", "other"):
        small_run(tmp_path / key, key=key)
    (tmp_path / "demo-20261122").mkdir()  # no run
    text = said(tmp_path, "demo-2026112")
    assert "did you mean" in text and "demo-20261120" in text and "demo-20261121" in text
    assert "demo-20261122" not in text and "other" not in text
    assert "runs in the same folder: demo-20261120, demo-20261121, other" in said(tmp_path, "qqqq")


def test_a_folder_of_runs_is_known_for_one(tmp_path):
    small_run(tmp_path / "out/monday", key="monday")
    text = said(tmp_path, "out")
    assert "contains the runs monday" in text and "Name one" in text


def test_where_nothing_is_there_is_nothing_to_propose(tmp_path):
    text = said(tmp_path, "a/b")
    assert "beside" not in text and "mean" not in text
    with pytest.raises(NoSuchRun):
        status("/")


def test_a_run_that_has_lost_its_plan_is_damaged(tmp_path):
    run = small_run(tmp_path)
    run.commit(0)
    (tmp_path / "_raybatch/plan.json").unlink()
    with pytest.raises(CorruptRun, match=r"commits, but no _raybatch/plan\.json"):
        status(str(tmp_path))


def test_a_run_that_begins_at_that_moment_is_sound(tmp_path, monkeypatch):
    """The plan is looked for before it is written, the commits after."""
    run = small_run(tmp_path)
    run.commit(0)
    looks = [None, run.plan]
    monkeypatch.setattr(Ledger, "load_plan", lambda ledger: looks.pop(0))
    assert need_plan(run.ledger) == run.plan


def test_a_store_that_does_not_list_takes_nothing_from_the_message(tmp_path, monkeypatch):
    store = open_store(str(tmp_path / "gone"))

    def away(self: Any) -> Any:
        raise RayBatchError("away")

    monkeypatch.setattr(type(store), "folders", away)
    assert "not a run directory" in said(tmp_path, "gone")


def test_the_command_line_says_that_the_command_is_wrong(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["status", str(tmp_path / "gone")])
    assert stop.value.code == 2 == exit_status(NoSuchRun("x"))
    assert capsys.readouterr().err.startswith("NoSuchRun: ")


def test_a_folder_whose_neighbours_cannot_be_listed_gets_no_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folders(store: LocalStore) -> Iterator[str]:
        raise StoreUnavailable("the disk is away")

    monkeypatch.setattr(LocalStore, "folders", folders)
    (tmp_path / "gone").mkdir()
    assert said(tmp_path, "gone").endswith(f"it has no {PLAN}")
