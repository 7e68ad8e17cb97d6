"""A job on another's result: its own columns give way, both row numbers are there."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers.nights import Nights
from helpers.small import make_job

from prefect_raybatch.api import dry_run
from prefect_raybatch.api.retry import Retry, plan_retry
from prefect_raybatch.compile.job import finish_spec
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import open_store


def named(job: BatchJob, *columns: str) -> tuple[str, str]:
    """The names of the row number and of the answer, for an input with these columns."""
    made = finish_spec(job, columns)
    return made.row_number, made.column


def test_names_by_default_give_way_and_chosen_ones_do_not() -> None:
    job = make_job()
    assert named(job, "Company") == ("_row", "response")
    both = named(job, "Company", "_row", "response", "response_2")
    assert both == ("_row_2", "response_3")
    left_out = make_job(output={"uri": "out", "columns": ["Company"]})
    assert named(left_out, "Company", "_row", "response") == ("_row", "response")
    chosen = make_job(output={"uri": "out", "column": "said", "row_number": "n"})
    assert named(chosen, "Company", "said", "n") == ("n", "said")
    made = make_job(output={"uri": "out", "postprocess": "helpers.functions:shout"})
    assert named(made, "Company", "response") == ("_row", "response")


@pytest.mark.parametrize("reuse", [None, "latest"])
def test_the_second_job_on_the_result_of_the_first(tmp_path: Path, reuse: str | None) -> None:
    nights = Nights(tmp_path)
    nights.write("a", "b", "c", "d", "e")
    whole = {"uri": str(tmp_path / "out")}
    nights.night("first", nights.job(reuse=None, output=whole))
    nights.refuses = lambda prompt: "to c" in prompt
    second = nights.job(
        name="second",
        source={"uri": str(tmp_path / "out/first/data"), "rows_per_shard": 2},
        prompt={"template": "Say {response}"},
        output={"uri": str(tmp_path / "again")},
        reuse=reuse,
    )
    assert {"response_2", "_row_2"} <= {name for name, _ in dry_run(second).result}
    nights.night("second", second)
    (path,) = (tmp_path / "again/second/data").glob("*.parquet")
    found = pq.read_table(path).to_pylist()
    assert [(row["_row"], row["_row_2"], row["response_2"]) for row in found] == [
        (n, n, f"answer to answer to {text}") for n, text in enumerate("abcde") if text != "c"
    ]
    assert found[0]["response"] == "answer to a"
    assert verify(open_store(str(tmp_path / "again/second"))).ok
    # Again it is the same run, and a retry of its failed rows has the same columns.
    assert nights.night("second", second).good == 4
    nights.refuses = lambda prompt: False
    retry = plan_retry(str(tmp_path / "again/second"))
    assert isinstance(retry, Retry)
    nights.drive(retry.job, retry.run)
    (path,) = (tmp_path / "again/second.r1/data").glob("*.parquet")
    (row,) = pq.read_table(path).to_pylist()
    assert (row["_row"], row["_row_2"], row["response_2"]) == (2, 2, "answer to answer to c")


def test_a_chosen_name_that_the_input_has_is_refused(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    nights.write("a")
    job = nights.job(output={"uri": str(tmp_path / "out"), "column": "text"})
    with pytest.raises(ConfigError, match="'text' is also an input column"):
        nights.night("n1", job)
