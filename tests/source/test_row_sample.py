"""`source.sample`: the same rows of the same input, whatever its format, spread over all of it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import job_dict, make_job
from helpers.specs import reads
from helpers.table_sources import copied

from prefect_raybatch.api import dry_run, plan_run
from prefect_raybatch.compile.resolved import fingerprint
from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.source import peek, row_sample
from prefect_raybatch.source.row_sample import RowSample
from prefect_raybatch.storage import open_store

ROWS = 1000


def csv(folder: Path) -> str:
    path = folder / "a.csv"
    # The last value widens the type of the column, so that the copy starts again.
    values = [*range(ROWS - 1), "999.5"]
    path.write_text("id,half\n" + "".join(f"{i},{v}\n" for i, v in enumerate(values)))
    return str(path)


def parquet(folder: Path) -> str:
    (folder / "p").mkdir()
    for part in range(4):
        ids = pa.table({"id": range(part * 250, part * 250 + 250)})
        pq.write_table(ids, folder / f"p/{part}.parquet", row_group_size=50)
    return str(folder / "p")


def sqlite(folder: Path) -> str:
    with sqlite3.connect(folder / "a.db") as database:
        database.execute("CREATE TABLE t (id INTEGER)")
        database.executemany("INSERT INTO t VALUES (?)", [(i,) for i in range(ROWS)])
    return f"sqlite:///{folder / 'a.db'}"


def test_the_same_rows_are_chosen_of_each_format(tmp_path: Path) -> None:
    expected = RowSample(50, 0).numbers(ROWS).tolist()
    assert len(expected) == 50 and expected == sorted(set(expected))
    for uri, more in (
        (csv(tmp_path), {}),
        (parquet(tmp_path), {}),
        (sqlite(tmp_path), {"query": "SELECT id FROM t ORDER BY id"}),
    ):
        made, rows = copied(tmp_path, uri, sample=50, **more)
        assert rows["id"].to_pylist() == expected and made.rows == 50
        assert peek(reads(uri=uri, sample=50, **more)).rows == 50


def test_the_sample_is_drawn_from_the_rows_that_match_the_filter(tmp_path: Path) -> None:
    uri = csv(tmp_path)
    _, rows = copied(tmp_path, uri, sample=20, filter="id >= 500", columns=["id"])
    assert rows["id"].to_pylist() == (RowSample(20, 0).numbers(500) + 500).tolist()
    assert rows.column_names == ["id"]
    _, rows = copied(tmp_path, uri, sample=5000, filter="id >= 990")
    assert rows["id"].to_pylist() == [*range(990, 1000)]
    with pytest.raises(SourceError, match="no row"):
        copied(tmp_path, uri, sample=5, filter="id > 5000")


def test_a_sample_is_spread_and_nested_and_another_seed_chooses_other_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = RowSample(1000, 0).numbers(100_000)
    assert np.histogram(numbers, 10, (0, 100_000))[0].min() > 60
    assert set(RowSample(100, 0).numbers(100_000)) < set(numbers)
    assert len(set(numbers) & set(RowSample(1000, 1).numbers(100_000))) < 60
    monkeypatch.setattr(row_sample, "HASHED_TOGETHER", 999)
    assert (RowSample(1000, 0).numbers(100_000) == numbers).all()
    assert RowSample(5, 0).numbers(0).tolist() == []


def test_a_run_of_a_sample_is_planned_again_with_the_same_rows(tmp_path: Path) -> None:
    source = {"uri": csv(tmp_path), "sample": 30}
    job = make_job(source=source, prompt={"template": "{id}"}, output={"uri": str(tmp_path / "o")})
    assert dry_run(job).rows == 30
    run = plan_run(job, "a")
    ledger = Ledger(open_store(f"{tmp_path}/o/a"))
    assert ledger.load_plan().rows == 30
    assert plan_run(job, "a") == run


def test_a_sample_counts_in_the_fingerprint_and_only_if_it_is_set(tmp_path: Path) -> None:
    value = job_dict(source={"uri": "a.csv"})
    plain = fingerprint(BatchJob.from_dict(value))
    made = [
        fingerprint(BatchJob.from_dict({**value, "source": {"uri": "a.csv", **more}}))
        for more in ({"sample": 3}, {"sample": 4}, {"sample": 3, "sample_seed": 1})
    ]
    assert "source.sample" not in plain.parts
    assert len({plain.fingerprint, *(one.fingerprint for one in made)}) == 4


def test_a_sample_beside_a_limit_and_a_seed_alone_are_refused() -> None:
    for fields, words in (
        ({"sample": 3, "limit": 4}, "sample and limit exclude each other"),
        ({"sample_seed": 3}, "set sample, or remove sample_seed"),
        ({"sample": 0}, "greater than 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            BatchJob.from_dict(job_dict(source={"uri": "a.csv", **fields}))
