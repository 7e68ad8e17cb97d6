"""What prompts could share: estimates from a sample against counts over all rows."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from helpers.small import make_job

from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.plan.prefix_hints import TemplateCells, estimate_distinct, prefix_hints


def job_of(template: str, **groups: Any) -> Any:
    return make_job(prompt={"template": template}, **groups)


def reviews(rows: int, products: int, seed: int = 3) -> list[dict[str, Any]]:
    """A review of its own and a long description that many rows have in common."""
    draw = random.Random(seed)
    texts = [f"{product:5}" + "d" * 295 for product in range(products)]
    return [
        {"review": f"{i:9}" + "r" * 91, "product": draw.choice(texts), "stars": draw.randrange(5)}
        for i in range(rows)
    ]


@pytest.mark.parametrize("values", [50, 800, 5000])
@pytest.mark.parametrize("rows", [300, 2000, 40_000])
def test_distinct_values_of_more_rows_are_told_from_a_sample(values: int, rows: int) -> None:
    draw = random.Random(values)
    every = [draw.randrange(values) for _ in range(40_000)]
    told = estimate_distinct(Counter(every[:2000]), rows)
    assert told == pytest.approx(len(set(every[:rows])), rel=0.15)


def test_values_that_never_repeat_are_taken_for_distinct_ones() -> None:
    assert estimate_distinct(Counter(range(500)), 10**6) == 10**6
    assert estimate_distinct(Counter([1] * 500), 10**6) == 1


def shared_plainly(rows: list[dict[str, Any]], template: str) -> float:
    """Characters that a prompt has in common with the one before it, all prompts sorted."""
    texts = sorted(template.format(**row) for row in rows)
    common = 0
    for before, text in pairwise(texts):
        pairs = zip(before, text, strict=False)
        common += next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, (before, text)))
        )
    return common / sum(map(len, texts))


def test_the_share_of_each_order_is_that_of_its_prompts() -> None:
    rows = reviews(20_000, 700)
    template = "Review: {review}\nProduct: {product}\nStars: {stars}\nAnswer:"
    cells = TemplateCells.of(compile_job(job_of(template)).prompt, rows[:2000])
    assert cells is not None
    now, best, order = cells.shared(20_000)
    assert order == ("product", "stars", "review")
    assert now == pytest.approx(shared_plainly(rows, template), abs=0.04)
    turned = "\nProduct: {product}\nStars: {stars}Review: {review}\nAnswer:"
    assert best == pytest.approx(shared_plainly(rows, turned), abs=0.04)


def test_hints_say_what_would_share_more_and_by_how_much() -> None:
    rows = reviews(2000, 3000)
    (order,) = prefix_hints(compile_job(job_of("{review} of {product}")), 10**6, rows, 100.0)
    assert order.startswith("prompt.template: with its fields in the order {product}, {review} ")
    assert "of a prompt's 100 tokens in place of 0%" in order and "shard of 4,000 rows" in order
    assert ", with engine.order: run 7" in order


def test_rows_that_lie_apart_are_told_of_the_order_over_the_run() -> None:
    rows = reviews(2000, 3000)
    job = job_of("{product}: {review}")
    (hint,) = prefix_hints(compile_job(job), 10**6, rows, 100.0)
    assert hint.startswith("engine.order: run would share about 7")
    for engine in ({"order": "run"}, {"order": "input"}):
        quiet = job_of("{product}: {review}", engine=engine)
        assert not prefix_hints(compile_job(quiet), 10**6, rows, 100.0)
    assert not prefix_hints(compile_job(job_of("{review}")), 10**6, rows, 100.0)
    assert not prefix_hints(compile_job(job), 10**6, rows[:50], 100.0)  # too few to tell
    assert not prefix_hints(
        compile_job(job), 10**6, reviews(2000, 20), 100.0
    )  # a shard has many of each
