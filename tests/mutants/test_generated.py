"""Which mutants count, how they are known again, and the list of equivalent ones."""

from __future__ import annotations

import ast

import pytest

from mutants.campaign import EQUIVALENT, ROOT, equivalent, interval
from mutants.generated import FUNCTIONS, Change


def change(before: str, after: str) -> Change:
    functions = [f"def f():\n    {text}" for text in (before, after)]
    return Change(*(ast.parse(function).body[0] for function in functions))


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ("raise Refused('bad')", "raise Refused('XXbadXX')", "wording"),
        ("raise Refused(f'{a} is bad', a)", "raise Refused(None, a)", "wording"),
        ("raise Refused(f'{a} is bad', a)", "raise Refused(a)", "wording"),
        ("raise Refused(f'{a} is bad', a)", "raise Refused(f'{a} is bad', )", None),
        ("raise Refused(f'{a} is bad', a)", "raise Refused(f'{a} is bad', None)", None),
        ("raise Refused(f'{a[:12]} is bad')", "raise Refused(f'{a[:13]} is bad')", "wording"),
        ("raise Refused(f'{a} is bad')", "raise Refused(f'{b} is bad')", None),
        ("return CommitError('bad')", "return CommitError('BAD')", "wording"),
        ("log.info('%s', a + 1)", "log.info('%s', a + 2)", "log"),
        ("b = 'two words'", "b = 'TWO WORDS'", "wording"),
        ("b = 'word'", "b = 'WORD'", None),
        ("b = cast('A', c)", "b = cast(None, c)", "type"),
        ("b = open(c, encoding='utf-8')", "b = open(c, encoding='UTF-8')", "encoding"),
        ("b = open(c, encoding='utf-8')", "b = open(c, )", "encoding"),
        ("b = zip(c, d, strict=True)", "b = zip(c, d, strict=False)", "assertion"),
        ("b = zip(c, d, strict=True)", "b = zip(c, strict=True)", None),
        ("if a < 1:\n        raise B('x')", "if a <= 1:\n        raise B('x')", None),
    ],
)
def test_a_mutant_of_what_people_read_is_left_out(before, after, rule):
    assert change(before, after).rule == rule


@pytest.mark.parametrize(
    ("before", "more"),
    [
        ("a = b + 1", "; c = d"),
        ("while a + 1:", "\n        b = c"),
        ("with a + 1 as b:", "\n        c()"),
    ],
)
def test_a_mutant_is_known_by_its_statement_alone(before, more):
    after = before.replace("+", "-")
    assert change(before + more, after + more).texts == (before, after)


@pytest.mark.parametrize(
    ("killed", "tried", "low", "high"),
    [(90, 100, 0.826, 0.945), (10, 10, 0.722, 1.0), (0, 0, 0, 1)],
)
def test_the_interval_is_wilsons(killed, tried, low, high):
    assert interval(killed, tried) == pytest.approx((low, high), abs=0.001)


def test_the_equivalent_mutants_are_of_functions_that_exist():
    for file, function, before, _ in equivalent():
        *_, name = function.split(".")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        found = [n for n in ast.walk(tree) if isinstance(n, FUNCTIONS) and n.name == name]
        texts = [ast.unparse(node) for node in found]
        head = before.splitlines()[0]
        assert any(head in text for text in texts), f"{function} has no {head!r}: {EQUIVALENT}"
