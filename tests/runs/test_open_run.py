"""The result in Python: by pyarrow, pandas, Polars and DuckDB, on a disk and on S3."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from helpers.retries import FAILED, end, first_run
from s3server import S3Server

from prefect_raybatch import open_run
from prefect_raybatch.errors import ConfigError, CorruptRun, IncompleteRun, NoSuchRun
from prefect_raybatch.report.html import fragment
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.open_run import OpenRun
from prefect_raybatch.storage import open_store

ANSWERED = [n for n in range(20) if n not in FAILED]
COLUMNS = ["id", "Company", "tags", "response", "_row"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    return open_run(first_run(tmp_path_factory.mktemp("out")).store.uri)


def test_the_answers_are_a_dataset(run):
    table = run.dataset().to_table()
    assert table.column_names == COLUMNS and table["_row"].to_pylist() == ANSWERED
    assert run.state == "completed" and run.report.good == len(ANSWERED)
    found = run.dataset().to_table(columns=["response"], filter=ds.field("id") == 5)
    assert found.to_pylist() == [{"response": "answer 5"}]


def test_the_failed_rows_are_one_as_well(run):
    table = run.quarantine().to_table()
    assert dict(zip(table["_row"].to_pylist(), table["error"].to_pylist(), strict=True)) == FAILED
    assert table["input"].to_pylist()[0]["Company"] == "Company 4"


def test_a_report_gives_the_rows_it_is_about(run):
    report = RunReport.from_bytes(run.report.to_bytes())
    assert report.dataset().to_table().equals(run.dataset().to_table())
    assert report.quarantine().count_rows() == report.failed


def test_each_library_reads_the_answers_and_the_quarantine(run):
    assert run.to_arrow()["_row"].to_pylist() == ANSWERED
    assert run.to_arrow(quarantine=True).equals(run.quarantine().to_table())
    assert dict(run.to_pandas(quarantine=True)[["_row", "error"]].values) == FAILED
    assert run.to_polars(quarantine=True).collect()["_row"].to_list() == list(FAILED)
    assert run.to_duckdb().filter("id = 5").fetchall()[0][3] == "answer 5"
    errors = run.to_duckdb(quarantine=True).project("_row, error").fetchall()
    assert dict(errors) == FAILED


def test_a_notebook_shows_the_report_and_no_mark_of_a_row(tmp_path):
    store = first_run(tmp_path / "out").store
    page = vars(OpenRun)["_repr_html_"](open_run(store.uri))  # as notebooks call it
    assert "16 answered" in page and "Most common failures" in page
    report = replace(
        open_run(store.uri).report, failures={"engine|<img src=x>|<script>alert(1)</script>": 4}
    )
    shown = fragment(report)
    assert "<script" not in shown and "<img" not in shown and "&lt;script&gt;" in shown


def test_pandas_polars_and_duckdb_read_it(run):
    import duckdb

    assert run.to_pandas()["response"].tolist() == [f"answer {n}" for n in ANSWERED]
    frame = run.to_polars().filter(id=5).collect()
    assert frame["response"].to_list() == ["answer 5"]
    answers = run.dataset()  # noqa: F841 - DuckDB finds it by its name
    with duckdb.connect() as base:
        rows = base.sql("select count(*), max(_row) from answers").fetchall()
        files = base.sql(f"select count(*), max(_row) from '{run.uri}/data/*.parquet'").fetchall()
    assert rows == files == [(len(ANSWERED), 19)]


def test_the_example_of_the_manual_works(run, tmp_path, monkeypatch, capfd):
    page = Path(__file__).parents[2] / "docs/how-to/query-the-result.md"
    (tmp_path / "out").mkdir()
    (tmp_path / "out/monday").symlink_to(run.uri)
    monkeypatch.chdir(tmp_path)
    example = "".join(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
    exec(example.replace("industry", "response"), {})  # the answers' column of this run
    said = capfd.readouterr().out
    assert "completed 16" in said and "answer 5" in said and "19" in said


def test_the_folder_of_a_run_opened_as_it_is_gives_the_answers_alone(run):
    assert ds.dataset(run.uri).to_table().equals(run.dataset().to_table())


def test_only_files_that_success_names_are_read(run, tmp_path):
    copy = tmp_path / "key"
    shutil.copytree(run.uri, copy)
    shutil.copy(copy / "data/part-00000.parquet", copy / "data/part-00001.parquet")
    assert open_run(str(copy)).dataset().count_rows() == len(ANSWERED)
    (copy / "data/part-00000.parquet").unlink()
    with pytest.raises(CorruptRun, match=r"part-00000\.parquet.* is missing"):
        open_run(str(copy)).dataset()


def test_an_unfinished_run_says_what_to_do(tmp_path):
    made = first_run(tmp_path, finish=False)
    found = open_run(made.store.uri)
    assert found.state == "unfinished" and found.report.state == "unfinished"
    with pytest.raises(IncompleteRun, match=r"4 of 4 shards .*raybatch run JOB --run-key key"):
        found.dataset()
    end(made.job, made.store.uri)
    assert found.state == "completed" and found.to_pandas()["_row"].tolist() == ANSWERED


def test_a_place_without_a_run_names_those_near(run):
    with pytest.raises(NoSuchRun, match="did you mean key"):
        open_run(run.uri + "x")


def test_a_run_in_which_no_row_was_answered_has_no_rows(tmp_path):
    made = open_run(first_run(tmp_path, dict.fromkeys(range(20), "ValueError")).store.uri)
    assert made.dataset().count_rows() == 0 and len(made.to_pandas()) == 0
    assert made.quarantine().count_rows() == 20


def test_a_run_without_compaction_says_where_its_rows_are(tmp_path):
    made = first_run(tmp_path, output={"compact": False})
    with pytest.raises(ConfigError, match=r"manifest-[0-9a-f]{16}\.parquet"):
        open_run(made.store.uri).dataset()


def test_a_run_on_s3_is_read_with_the_options_given(run, s3: S3Server, monkeypatch):
    place = open_store("s3://open-run/out/key", s3.options)
    for info in open_store(run.uri).list():
        place.put(info.path, open_store(run.uri).read(info.path))
    found = open_run(place.uri, s3.options)
    assert found.dataset().to_table().equals(run.dataset().to_table())
    assert found.quarantine().count_rows() == len(FAILED)
    assert s3.secret not in repr(found)
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    assert open_run(place.uri).to_polars().collect().height == len(ANSWERED)
