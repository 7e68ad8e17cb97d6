"""Numbers in sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

import prefect_raybatch
from prefect_raybatch.words import (
    are,
    counted,
    error_text,
    finite_in,
    some_are,
    storable,
    storable_in,
)

NOUNS = "engines|rows|shards|nodes|CPUs|deaths|replicas|processes"
# A number put straight before a noun in the plural is wrong where it is 1.
BARE = re.compile(r"\{(?!counted)[^{}]*\} (" + NOUNS + r")\b(?!/s)")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 rows"), (1, "1 row"), (1.0, "1 row"), (2, "2 rows"), (1234, "1,234 rows")],
)
def test_a_counted_noun(number, text):
    assert counted(number, "row") == text


def test_numbers_that_json_has_not_become_null():
    nan, endless = float("nan"), float("inf")
    assert finite_in({"a": [nan, (1, -endless)], 2: {"b": 0.5, "c": endless}, "d": "x"}) == {
        "a": [None, [1, None]],
        2: {"b": 0.5, "c": None},
        "d": "x",
    }


@pytest.mark.parametrize(
    ("number", "whole", "text"),
    [
        (0, 1, "0 of 1 shard is"),
        (1, 1, "1 of 1 shard is"),
        (0, 3, "0 of 3 shards are"),
        (1, 3, "1 of 3 shards is"),
        (2, 1234, "2 of 1,234 shards are"),
    ],
)
def test_a_part_of_a_whole(number, whole, text):
    assert some_are(number, whole, "shard") == text


def test_what_pydantic_says_in_a_line():
    class Asked(BaseModel):
        rows: int
        names: list[str]

    with pytest.raises(ValidationError) as caught:
        Asked.model_validate({"rows": "x", "names": [1]})
    said = error_text(caught.value)
    assert said.startswith("Asked: rows: Input should be a valid integer, unable to ")
    assert "; names.0: Input should be a valid string" in said
    assert "\n" not in said and "https://" not in said
    assert error_text(ValueError("no such model")) == "no such model"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("Zürich 🚀", "Zürich 🚀"),
        ("a\0b", "a\N{SYMBOL FOR NULL}b"),
        ("é\0", "é\N{SYMBOL FOR NULL}"),
        ("half \ud83d of it", "half ? of it"),
    ],
)
def test_text_that_a_database_holds(text, kept):
    assert storable(text) == kept
    kept.encode()


def test_texts_within_a_value_are_made_storable_and_nothing_else_is_changed():
    odd = {"a\0": [1.5, None, ("\0", {"b": "\ud800"})], "c": b"\0"}
    null = "\N{SYMBOL FOR NULL}"
    assert storable_in(odd) == {f"a{null}": [1.5, None, (null, {"b": "?"})], "c": b"\0"}


def test_fractions_and_odd_plurals():
    assert counted(0.5, "GPU") == "0.5 GPUs"
    assert (counted(1, "pass", "passes"), counted(3, "pass", "passes")) == ("1 pass", "3 passes")
    assert [are(n) for n in (0, 1, 2)] == ["are", "is", "are"]


@pytest.mark.parametrize(
    "name",
    [
        "cli/commands",
        "flow/page",
        "driver/driver",
        "flow/tasks",
        "doctor/services",
        "driver/monitor",
    ],
)
def test_what_people_see_often_counts_with_the_helper(name):
    source = (Path(prefect_raybatch.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    assert [match[0] for match in BARE.finditer(source)] == []
