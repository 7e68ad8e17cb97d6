"""Which code of this package works on a run: in its records, and a warning where it differs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers.nights import Nights
from helpers.small import Passes, small_run

from prefect_raybatch import installed
from prefect_raybatch.api import plan_run
from prefect_raybatch.driver.driver import Driver
from prefect_raybatch.installed import code_version
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.layout import PLANNED_BY
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.report.report import result_rows
from prefect_raybatch.runs.attempts import compare_code, note_planner, planner_code
from prefect_raybatch.storage import open_store


def test_the_same_code_says_the_same_wherever_it_lies_and_a_change_shows(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/one.py").write_text("x = 1\n")
    (tmp_path / "installed.py").write_text("")
    monkeypatch.setattr(installed, "__file__", str(tmp_path / "installed.py"))
    first = code_version.__wrapped__()
    (tmp_path / "a/one.py").write_text("x = 2\n")
    assert code_version.__wrapped__() != first
    (tmp_path / "a/one.py").write_text("x = 1\n")
    assert code_version.__wrapped__() == first and first.startswith("0.1.0+")


def test_a_run_says_in_its_records_and_report_whose_code_worked(tmp_path, caplog):
    nights = Nights(tmp_path)
    nights.write("a", "b")
    job = nights.job(reuse=None)
    run = plan_run(job, "k")
    report = nights.drive(job, run)
    store = open_store(run.uri)
    (attempt,) = Ledger(store).attempts()
    assert Ledger(store).read_attempt(attempt)["code"] == planner_code(store) == code_version()
    assert report.code == {code_version(): 2}
    assert ("Code version", code_version()) in result_rows(report)
    assert "other code" not in caplog.text and "was made by" not in caplog.text


def test_another_code_than_the_plan_s_is_a_warning(tmp_path, caplog):
    store = small_run(tmp_path).store
    compare_code(store)  # a run of an earlier version tells nothing
    assert planner_code(store) is None and not caplog.records
    store.put(PLANNED_BY, json.dumps({"code": "0.0.9+0"}).encode())
    note_planner(store)  # who comes second leaves it as it is
    compare_code(store)
    assert (
        f"made by prefect_raybatch 0.0.9+0, and this process runs {code_version()}" in caplog.text
    )
    store.put(PLANNED_BY, b"[")
    assert planner_code(store) is None


def test_workers_with_other_code_are_told_of_once(tmp_path, caplog):
    run = small_run(tmp_path)
    passes = Passes(run)

    def elsewhere(units, isolated):
        for receipt in passes(units, isolated):
            yield replace(receipt, where={**receipt.where, "code": "0.1.0+0ther", "node": "n7"})

    driver = Driver(run.plan, run.shards, run.ledger, Limits())
    driver.resume()
    progress = driver.run(elsewhere, passes.quarantine)
    (said,) = [r.getMessage() for r in caplog.records if "another version" in r.getMessage()]
    assert "0.1.0+0ther on n7" in said and code_version() in said
    assert dict(progress.tally.codes) == {"0.1.0+0ther": 20}


@pytest.mark.parametrize("code", [{}, {"a": 1, "b": 1200}])
def test_several_codes_are_told_with_their_rows(code):
    from helpers.reports import REPORT

    rows = dict(result_rows(replace(REPORT, code=code)))
    assert rows.get("Code version") == ("a (1 row), b (1,200 rows)" if code else None)
