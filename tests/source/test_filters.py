"""source.filter: what it says, on which rows it is true, and what is said of a wrong one."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal
from itertools import product

import pyarrow as pa
import pytest
from helpers.specs import reads

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.source.filters import Filter

ROWS = pa.table(
    {
        "id": pa.array([0, 1, 2, 3, None], pa.int64()),
        "Customer Id": ["a", "b's", "", None, "A_1%"],
        "price": pa.array([1.5, float("nan"), None, -2.0, 1e300]),
        "cost": pa.array([Decimal("1.10"), None, Decimal("2.20"), Decimal("0"), Decimal("-1")]),
        "ok": [True, False, None, True, False],
        "day": [date(2026, 1, d) for d in (1, 2, 3)] + [None, date(2027, 1, 1)],
        "at": pa.array(
            [datetime(2026, 1, 1, h, tzinfo=UTC) for h in (0, 1, 2)] + [None, None],
            pa.timestamp("us", "UTC"),
        ),
        "seen": pa.array([datetime(2026, 1, 1, h) for h in (0, 1, 2, 3, 4)], pa.timestamp("ms")),
        "hour": [time(1), time(2), None, time(4), time(5)],
        "large": pa.array(["x", "y", "z", None, "x"], pa.large_string()),
        "kind": pa.array(["x", "y", "z", None, "x"]).dictionary_encode(),
    }
)


def kept(text: str, table: pa.Table = ROWS) -> list[int]:
    numbered = table.append_column("#", pa.array(range(table.num_rows)))
    return Filter(text).keep(numbered)["#"].to_pylist()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("id > 1", [2, 3]),
        ("id>=1 and id <= 2.5", [1, 2]),
        ("id = 1 OR id == 3", [1, 3]),
        ("id <> 1", [0, 2, 3]),
        ("NOT id = 1", [0, 2, 3]),
        ("NOT (id = 1 OR id > 2)", [0, 2]),
        ("id IN (1, 3, 77)", [1, 3]),
        ("id NOT IN (1, 3)", [0, 2]),  # a null is neither in nor not in
        ("id IS NULL", [4]),
        ("NOT id IS NULL and id is not null", [0, 1, 2, 3]),
        ("id BETWEEN 1 AND 2 OR id = 0", [0, 1, 2]),
        ("id not between 1 and 2", [0, 3]),
        ("id = 1 OR id = 2 AND ok", [1]),
        ("\"Customer Id\" = 'b''s'", [1]),
        ("\"Customer Id\" LIKE '%1\\%'", [4]),
        ("\"Customer Id\" NOT LIKE '_'", [1, 2, 4]),
        ("price > -5", [0, 3, 4]),
        ("NOT price > 1", [3]),  # as price <= 1: NaN is nowhere
        ("price = 1e300", [4]),
        ("cost >= 1.1", [0, 2]),
        ("cost = 0", [3]),
        ("ok", [0, 3]),
        ("NOT ok", [1, 4]),
        ("ok = FALSE", [1, 4]),
        ("day >= '2026-01-02' AND day < DATE '2027-01-01'", [1, 2]),
        ("at > '2026-01-01 00:30:00'", [1, 2]),  # without a zone it is in UTC
        ("at = TIMESTAMP '2026-01-01T02:00:00+01:00'", [1]),
        ("at >= '2026-01-01'", [0, 1, 2]),
        ("seen >= '2026-01-01 03:00'", [3, 4]),
        ("hour > '01:30:00'", [1, 3, 4]),
        ("large = 'x' OR large LIKE 'z%'", [0, 2, 4]),
        ("kind = 'x'", [0, 4]),
    ],
)
def test_rows_are_kept_where_it_is_true(text, rows):
    assert kept(text) == rows
    assert reads(uri="x", filter=text).filter == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("id >", "character 5: expected a number"),
        ("id > 1 id", "character 8: expected AND, OR or the end, found 'id'"),
        ("id > 1; DROP TABLE x", "character 7: '; DROP TABLE x'"),
        ("id = NULL", "write IS NULL"),
        ("(id = 1", "expected ), found the end"),
        ("Customer Id = 1", "found 'Id'"),
        ("1 = id", "quote names"),
        ("id + 1 > 2", "character 4: '+ 1 > 2'"),
        ("id = 12x", "character 6: '12x'"),
        ("lower(id) = 'x'", "found '('"),
        ("id = 'x", "character 6"),
        ("id NOT 5", "IN, LIKE or BETWEEN"),
        ("(" * 60 + "id" + ")" * 60, "nested parentheses"),
        ("x" * 30_000, "characters"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place_when_the_job_is_read(text, words):
    with pytest.raises(ValueError, match="filter") as caught:
        reads(uri="x", filter=text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("idd = 1", "no column 'idd'; did you mean 'id'?"),
        ("id = '1'", "column 'id' is int64, which cannot be compared with a text ('1')"),
        ("large = 1", "column 'large' is large_string, which cannot be compared with a number"),
        ("ok > 'yes'", "bool"),
        ("ok = 1", "bool"),
        ("id = TRUE", "TRUE or FALSE"),
        ("id LIKE '1%'", "int64"),
        ("day = 'yesterday'", "'yesterday' is not a valid date32"),
        ("seen = '2026-01-01T00:00:00Z'", "is not a valid timestamp[ms]"),
    ],
)
def test_what_does_not_go_together_is_refused_by_the_column(text, words):
    with pytest.raises(ConfigError) as caught:
        Filter(text).expression(ROWS.schema)
    assert words in str(caught.value)


ODD = 2**53 + 1  # no float64 holds it


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (
            pa.int64(),
            [ODD, ODD - 1, 5, -5, None],
            {
                f"a = {ODD}.0": [0],
                "a >= 4.5": [0, 1, 2],
                "a < 2.5": [3],
                "a != 2.5": [0, 1, 2, 3],
                "a in (5.0, 5.5)": [2],
                "a not in (5.0, 5.5, 1e999999999)": [0, 1, 3],
                "a < 9223372036854775808": [0, 1, 2, 3],
                "a > 1e300": [],
            },
        ),
        (pa.int8(), [5, -5], {"a < 300": [0, 1], "a = 300": [], "a > -129.5": [0, 1]}),
        (
            pa.uint64(),
            [2**64 - 1, 2**63, 5],
            {f"a = {2**64 - 1}": [0], "a = 5": [2], "a > -1": [0, 1, 2], "a >= 1e19": [0]},
        ),
        (pa.uint32(), [2**32 - 1, 5], {"a < 5.5": [1], "a >= 4294967295.0": [0]}),
        (
            pa.float64(),
            [2.0**53, 0.1],
            {f"a = {ODD - 1}": [0], f"a < {ODD}": [1], "a < 1e400": [0, 1]},
        ),
        (
            pa.float32(),
            [0.1, 2.0**24, 19.99],
            {"a = 0.1": [0], "a = 19.99": [2], "a >= 0.1": [0, 1, 2]},
        ),
        (pa.float16(), [0.1, 2.0], {"a = 0.1": [0], "a > 1": [1], "a = 100000": []}),
        (
            pa.decimal128(38, 10),
            [Decimal("3.10"), Decimal("2.5")],
            {
                "a = 3.1": [0],
                "a > 1e-60": [0, 1],
                "a > 2.50000000000000000001": [0],
                "a < 1e60": [0, 1],
            },
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, pa.DataType) else "",
)
def test_numbers_are_compared_exactly(kind, values, expected):
    table = pa.table({"a": pa.array(values, kind)})
    assert {text: kept(text, table) for text in expected} == expected


def test_deep_and_wide_filters_are_read_at_once():
    assert kept("(" * 40 + "id = 1" + ")" * 40) == [1]
    assert kept(" OR ".join(f"id = {i}" for i in range(1000))) == [0, 1, 2, 3]


def test_not_is_the_opposite_wherever_a_condition_is_true_or_false():
    """Each row is kept by one of a condition and its opposite, unless a null decides."""
    ones = ["id > 1", "ok", "large = 'x'", "NOT day < '2026-01-03'", "id IS NULL"]
    for a, b, join in product(ones, ones, ("AND", "OR")):
        text = f"({a} {join} NOT ({b}))"
        yes, no = set(kept(text)), set(kept(f"NOT {text}"))
        assert not yes & no
        whole = ROWS.drop_null()
        assert len(kept(text, whole)) + len(kept(f"NOT {text}", whole)) == whole.num_rows
