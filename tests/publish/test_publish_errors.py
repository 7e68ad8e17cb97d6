"""How errors of a target's library are shown: as ours, in one line, without credentials."""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest
from helpers.targets import TARGETS, published_rows

from prefect_raybatch.errors import ConfigError, PublishFailed, RayBatchError
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.publish.base import ERROR_SHOWN, Sink
from prefect_raybatch.publish.publish import open_sink

HIDDEN = {"secret": "hunter2", "client_kwargs": {"verify": ["abcd", "abc", 1]}, "region": "north-1"}


def sink_of(root: Path, format: str = "jsonl", planned: bool = False) -> Sink:
    target = PublishTarget.model_validate(TARGETS[format][0](root))
    return open_sink(target, "key", HIDDEN if format == "jsonl" else {}, planned)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("", ""),
        ("\n  \nfirst line\nsecond line", "first line"),
        ("hunter2 and hunter2", "*** and ***"),
        ("abcdef in north-1", "***ef in north-1"),
        ("abc is short", "abc is short"),
        ("x" * ERROR_SHOWN + "y", "x" * ERROR_SHOWN),
        ("at s3://user:word@host/a", "at s3://**********@host/a"),
    ],
)
def test_an_error_is_shown_in_one_line_without_credentials(
    error: str, text: str, tmp_path: Path
) -> None:
    assert sink_of(tmp_path).scrub(ValueError(error)) == text


@pytest.mark.parametrize(
    ("format", "error", "planned", "text"),
    [
        (
            *("jsonl", ValueError("a\nb"), True),
            "ValueError: a. Fix the cause and run the same command again",
        ),
        (
            *("jsonl", OSError("a"), False),
            "OSError: a. The result in data/ is complete. Fix the cause, then run raybatch publish "
            "RUN_DIR --job JOB",
        ),
        (
            *("delta", ValueError("a"), True),
            "the table rejects the rows: a. No row was processed yet",
        ),
        (
            *("lance", OSError("LanceError(Schema): a"), False),
            "the dataset rejects the rows: LanceError(Schema): a. The result in data/ is complete. "
            "Fix this, then run raybatch publish RUN_DIR --job JOB",
        ),
        (
            *("iceberg", TypeError("a"), True),
            "the table rejects the rows: a. No row was processed yet",
        ),
        (
            *("sql", OverflowError("a"), True),
            "the database rejects the table: a. No row was processed yet",
        ),
        (
            *("sql", OverflowError("a"), False),
            "the database rejects the rows: a. The result in data/ is complete. "
            "Fix this, then run raybatch publish RUN_DIR --job JOB",
        ),
    ],
)
def test_an_error_says_what_is_there_and_what_to_do(
    format: str, error: Exception, planned: bool, text: str, tmp_path: Path
) -> None:
    sink, kind = sink_of(tmp_path, format, planned), ConfigError if "reject" in text else None
    with pytest.raises(RayBatchError) as caught, sink.with_plain_errors():
        raise error
    assert type(caught.value) is (kind or PublishFailed) and caught.value.__cause__ is error
    assert str(caught.value) == f"output.publish: {format}: {text}"


def test_an_error_of_reading_the_rows_is_raised_as_it_is(tmp_path: Path) -> None:
    rows, fault = published_rows(pa.table({"id": [1]})), ConfigError("the row")
    rows.faults.append(fault)
    with pytest.raises(ConfigError) as caught, sink_of(tmp_path).with_plain_errors(rows):
        raise OSError("around it")
    assert caught.value is fault and not rows.faults


def test_a_data_set_names_the_run_and_the_key_of_its_merges(tmp_path: Path) -> None:
    uri, rows = str(tmp_path / "lance"), pa.table({"id": [1], "a": ["x"]})
    fields = {"format": "lance", "uri": uri, "mode": "merge", "key": ["id"]}
    sink, steps = open_sink(PublishTarget.model_validate(fields), "key", {}), list[str]()
    assert sink.publish(published_rows(rows), steps.append) == "1"
    assert steps == ["opened", "looked", "committed"]
    key = {b"lance-schema:unenforced-primary-key": b"true"}
    marks = {b"raybatch.plan": b"p" * 64, b"raybatch.run_key": b"key"}
    wanted = pa.schema([pa.field("id", pa.int64(), False, key), ("a", pa.string())], marks)
    assert lance.dataset(uri).schema.equals(wanted, check_metadata=True)
    steps.clear()
    assert sink.publish(published_rows(rows, "q" * 64), steps.append) == "2"
    assert steps == ["opened", "looked", "committed"]
    steps.clear()
    assert sink.publish(published_rows(rows), steps.append) == "2" and steps == ["opened"]
