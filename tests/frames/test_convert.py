"""Data of several kinds to a table, and answers back."""

from __future__ import annotations

import pandas
import polars
import pyarrow as pa
import pytest

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.frames.convert import read_data

ANSWERS = pa.table({"answer": ["x", None], "score": pa.array([None, 2], pa.int64())})


def test_pandas_keeps_its_index_and_columns_of_any_object() -> None:
    given = pandas.DataFrame({"a": ["1", "2"], "b": [object(), object()]}, index=["r", "q"])
    table, add, names = read_data(given, ["a"])
    assert table.to_pydict() == {"a": ["1", "2"]} and names == ["a", "b"]
    found = add(ANSWERS)
    assert list(found.index) == ["r", "q"] and list(found.columns) == ["a", "b", "answer", "score"]
    assert found["answer"].isna().tolist() == [False, True] and found["b"].equals(given["b"])
    assert str(found["score"].dtype) == "Int64" and found["score"].tolist() == [pandas.NA, 2]
    assert list(given.columns) == ["a", "b"]  # it is not changed


def test_polars() -> None:
    given = polars.DataFrame({"a": ["1", "2"], "b": [1.5, 2.5]})
    table, add, names = read_data(given, ["a"])
    assert table["a"].to_pylist() == ["1", "2"] and names == ["a", "b"]
    found = add(ANSWERS)
    assert isinstance(found, polars.DataFrame) and found.columns == ["a", "b", "answer", "score"]
    assert found["score"].to_list() == [None, 2]


def test_arrow() -> None:
    table, add, _ = read_data(pa.table({"a": ["1", "2"], "b": [1, 2]}), ["b"])
    assert table.column_names == ["b"]
    assert add(ANSWERS).column_names == ["a", "b", "answer", "score"]


def test_lists_of_dicts_and_of_texts() -> None:
    table, add, names = read_data([{"a": "1"}, {"a": "2", "b": None}], ["a"])
    assert table.to_pydict() == {"a": ["1", "2"]} and names == ["a", "b"]
    assert add(ANSWERS)[1] == {"a": "2", "b": None, "answer": None, "score": 2}
    table, add, names = read_data(["p", "q"], ["text"])
    assert table.to_pydict() == {"text": ["p", "q"]} and names == ["text"]
    assert add(ANSWERS)[0] == {"text": "p", "answer": "x", "score": None}


@pytest.mark.parametrize(
    ("data", "fields", "message"),
    [
        (pandas.DataFrame({"a": [1]}), ["c"], r"no column 'c'. Its columns: a$"),
        (pandas.DataFrame([[1, 2]], columns=["a", "a"]), ["a"], r"several columns 'a'. Rename"),
        (pandas.DataFrame({"a": ["x", 1]}), ["a"], r"column 'a' mixes types .* Convert"),
        ([{"a": 1}, "b"], ["a"], r"row 1 has the type str, row 0 dict. Give a list"),
        ([{"a": object()}], ["a"], r"column 'a' mixes types or holds values"),
        ([1, 2, 3], ["text"], r"row 0 has the type int. Give a list"),
        (["p", None, 3.5], ["text"], r"row 2 has the type float, row 0 str. Give a list"),
        ([None, {"a": 1}], ["a"], r"row 1 has the type dict, row 0 NoneType. Give a list"),
        ([{"a": 2**70}], ["a"], r"column 'a' .* cannot be stored: .*too large.* Convert"),
        ([{"a": [{"b": 2**70}]}], ["a"], r"column 'a' .* cannot be stored: .*too large"),
        (pandas.DataFrame({"a": [2**70]}), ["a"], r"column 'a' .* cannot be stored: .*too large"),
        (polars.DataFrame({"a": [2**70]}), ["a"], r"column 'a' .* cannot be stored"),
        (polars.DataFrame({"a": [object()]}), ["a"], r"column 'a' .* stored: Python objects"),
        (["\ud800"], ["text"], r"column 'text' .* cannot be stored: .*surrogates"),
        (["p"], ["a"], r"no column 'a'. Its columns: text$"),
        ({"a": [1]}, ["a"], r"the data is a builtins.dict. Give a pandas"),
        (polars.DataFrame({"a": [1]}).lazy(), ["a"], r"the data is a polars.LazyFrame. Give"),
        (pandas.Series(["a"], name="b"), ["text"], r"no column 'text'. Its columns: b$"),
    ],
)
def test_data_that_cannot_be_used(data: object, fields: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_data(data, fields)


def test_a_series_an_empty_text_and_names_that_are_numbers() -> None:
    table, add, _ = read_data(pandas.Series(["p", "q"], index=[7, 8]), ["text"])
    assert table.to_pydict() == {"text": ["p", "q"]} and list(add(ANSWERS).index) == [7, 8]
    table, add, _ = read_data(["p", None], ["text"])
    assert table["text"].to_pylist() == ["p", None] and add(ANSWERS)[1]["text"] is None
    table, add, _ = read_data(pandas.DataFrame([["p"], ["q"]]), ["0"])
    assert table.to_pydict() == {"0": ["p", "q"]} and list(add(ANSWERS).columns) == [
        0,
        "answer",
        "score",
    ]


def test_the_same_texts_are_the_same_table() -> None:
    texts = ["p", "q", "p"]
    kinds = [
        pandas.DataFrame({"a": texts}),
        pandas.DataFrame({"a": pandas.Categorical(texts)}),
        polars.DataFrame({"a": texts}),
        pa.table({"a": pa.array(texts, pa.large_string())}),
        [{"a": text} for text in texts],
    ]
    first, *others = [read_data(kind, ["a"])[0] for kind in kinds]
    assert all(other.schema == first.schema and other == first for other in others)
