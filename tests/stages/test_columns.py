"""The table of hidden columns agrees with the code that writes and reads them."""

import ast
import pickle
from functools import cache
from pathlib import Path

import pyarrow as pa
import pytest

import prefect_raybatch
from prefect_raybatch.stages import columns
from prefect_raybatch.stages.columns import ERROR, TOKENS, HiddenColumn

PACKAGE = Path(prefect_raybatch.__file__).parent
TABLE = {name: made for name, made in vars(columns).items() if isinstance(made, HiddenColumn)}


@cache  # each file is parsed once
def users() -> dict[str, set[str]]:
    """Return the modules that use each column, by the names that they import."""
    used: dict[str, set[str]] = {name: set() for name in TABLE}
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "stages.columns import" in source:
            module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Name) and node.id in used:
                    used[node.id].add(module.removeprefix("stages."))
    return used


@pytest.mark.parametrize("name", TABLE)
def test_the_table_names_who_writes_and_reads_a_column(name):
    column, used = TABLE[name], users()[name]
    assert column.writers and column.readers
    assert set(column.readers) <= used <= {*column.writers, *column.readers}
    for module in column.writers:
        parts = module.split(".")
        places = [PACKAGE.joinpath(*room, *parts).with_suffix(".py") for room in ([], ["stages"])]
        assert any(place.is_file() for place in places)


def test_names_are_hidden_and_unique():
    assert len(set(TABLE.values())) == len(TABLE) > 25
    assert all(column.startswith("__rb_") for column in TABLE.values())


def test_a_column_is_added_with_its_type_and_read_where_it_is_missing():
    table = pa.table({"a": [1, 2]})
    assert TOKENS.values(table) == [None, None]
    table = TOKENS.add_to(table, [[], [5]])
    assert table.schema.field(TOKENS).type == pa.list_(pa.int32())
    assert TOKENS.values(table) == [[], [5]]
    assert ERROR.add_to(table, [None, None]).schema.field(ERROR).type == ERROR.type


def test_a_pickled_column_is_its_name():
    assert type(pickle.loads(pickle.dumps(TOKENS))) is str
    assert pickle.loads(pickle.dumps({TOKENS: 1})) == {"__rb_tokens": 1}
