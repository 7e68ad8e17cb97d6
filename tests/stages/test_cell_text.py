"""What a prompt template puts in for the values of a column."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest

from prefect_raybatch.stages.block import Failure
from prefect_raybatch.stages.cell_text import cell_texts

NESTED = pa.struct(
    [
        ("price", pa.decimal128(10, 2)),
        ("on", pa.bool_()),
        ("at", pa.timestamp("us")),
        ("name", pa.string()),
        ("ratio", pa.float32()),
    ]
)


def texts(values, kind):
    return cell_texts(pa.chunked_array([pa.array(values, kind)]), "a")


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (pa.float32(), [19.99, 1e8, -0.0, None], ["19.99", "100000000.0", "-0.0", None]),
        (pa.float16(), [0.1], ["0.1"]),
        (pa.float64(), [0.1, 1e-07, float("inf")], ["0.1", "1e-07", "inf"]),
        (pa.float32(), [float("nan")], [None]),
        (pa.float64(), [float("nan")], [None]),
        (pa.decimal128(38, 18), [Decimal(0)], ["0.000000000000000000"]),
        (pa.decimal128(10, 2), [Decimal("3.10"), Decimal("-0.5")], ["3.10", "-0.50"]),
        (pa.decimal128(5, -2), [Decimal("1200")], ["1200"]),
        (pa.decimal256(60, 1), [Decimal("1" * 50 + ".5")], ["1" * 50 + ".5"]),
        (pa.uint64(), [2**64 - 1], [str(2**64 - 1)]),
        (pa.bool_(), [True], ["True"]),
        (pa.binary(), [b"caf\xc3\xa9", b""], ["café", ""]),
        (pa.binary(2), [b"ab"], ["ab"]),
        (pa.large_binary(), [b"x"], ["x"]),
        (pa.string_view(), ["x"], ["x"]),
        (pa.date32(), [date(2026, 1, 2)], ["2026-01-02"]),
        (pa.time64("ns"), [1, 0, 1_500_000_000], ["00:00:00.000000001", "00:00:00", "00:00:01.5"]),
        (pa.list_(pa.time64("ns")), [[1, None]], ['["00:00:00.000000001", null]']),
        (pa.time32("s"), [time(3, 4, 5)], ["03:04:05"]),
        (pa.duration("s"), [timedelta(days=1, seconds=2)], ["1 day, 0:00:02"]),
        (pa.timestamp("ns"), [1], ["1970-01-01 00:00:00.000000001"]),
        (pa.timestamp("us"), [datetime(2026, 1, 2)], ["2026-01-02 00:00:00"]),
        (
            pa.timestamp("s", "Europe/Berlin"),
            [datetime(2026, 7, 1, tzinfo=UTC)],
            ["2026-07-01 02:00:00+02:00"],
        ),
        (pa.list_(pa.float32()), [[19.99, float("nan"), None]], ["[19.99, null, null]"]),
        (pa.list_(pa.float64()), [[float("-inf")]], ['["-inf"]']),
        (pa.list_view(pa.int32()), [[1, 2]], ["[1, 2]"]),
        (pa.list_(pa.binary()), [[b"a"]], ['["a"]']),
        (pa.map_(pa.string(), pa.int64()), [[("k", 1)]], ['{"k": 1}']),
        (
            NESTED,
            [
                {
                    "price": Decimal("3.10"),
                    "on": True,
                    "at": datetime(2026, 1, 2),
                    "name": 'é"',
                    "ratio": 0.1,
                }
            ],
            [
                '{"price": 3.10, "on": true, "at": "2026-01-02 00:00:00", "name": "é\\"", '
                '"ratio": 0.1}'
            ],
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, pa.DataType) else "",
)
def test_the_text_of_a_value_is_the_value(kind, values, expected):
    assert texts(values, kind) == expected


def test_a_time_outside_of_the_years_of_python_is_shown_as_arrow_writes_it():
    assert texts([10**7, 0], pa.date32()) == ["29349-01-26", "1970-01-01"]


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (pa.timestamp("us", "Mars/Base"), 0, "unknown time zone 'Mars/Base'"),
        (pa.list_(pa.date32()), [10**7], "date value out of range"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_shown_fails_its_row_and_names_the_column(kind, value, words):
    (failure,) = texts([value], kind)
    assert isinstance(failure, Failure)
    assert failure.message.startswith(f"column a: {words}")


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.list_(pa.binary())])
def test_bytes_that_are_no_text_fail_their_row_alone_and_say_where(kind):
    good, bad = (b"good", b"a\xff") if not pa.types.is_list(kind) else ([b"good"], [b"a\xff"])

    first, second = texts([good, bad], kind)

    assert isinstance(first, str)
    assert isinstance(second, Failure)
    assert "column a holds bytes that are not UTF-8" in second.message
    assert "byte 0xff at offset 1" in second.message
    assert "prompt.function" in second.message
