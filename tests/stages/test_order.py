"""Order of a block's rows for the engine, and which requests are the same."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_raybatch.stages.order import (
    GROUP,
    arrange,
    common_tokens,
    is_exact,
    token_keys,
)

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16}


def keys_of(prompts: list[list[int]]) -> list[bytes]:
    return token_keys(pa.array(prompts, pa.list_(pa.int32())))


def ordered(prompts: list[list[int]], params: list[dict[str, Any]] | None = None) -> list[int]:
    params = params or [GREEDY] * len(prompts)
    return arrange(keys_of(prompts), params, range(len(prompts)), True, False).rows


# --- keys ---------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=20))
def test_keys_compare_as_the_token_lists_do(prompts):
    keys = keys_of(prompts)
    assert sorted(range(len(keys)), key=keys.__getitem__) == sorted(
        range(len(keys)), key=prompts.__getitem__
    )


def test_keys_of_a_sliced_and_chunked_column():
    prompts = [[1], [2, 3], [], [4, 5, 6], [7]]
    whole = pa.array(prompts, pa.list_(pa.int32()))
    assert token_keys(whole.slice(1, 3)) == keys_of(prompts[1:4])
    assert token_keys(pa.chunked_array([whole, whole.slice(3)])) == keys_of(prompts + prompts[3:])


def test_common_tokens_count_whole_tokens():
    keys = keys_of([[1, 2, 3], [1, 2, 259], [1, 2, 259, 4], [9], []])
    assert common_tokens(keys).tolist() == [0, 2, 3, 0, 0]


# --- order --------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=30),
    st.lists(st.integers(0, 3), min_size=30, max_size=30),
    st.booleans(),
    st.booleans(),
)
def test_every_row_is_asked_or_copied_exactly_once(prompts, bounds, sort, merge):
    long = [[token for token in prompt for _ in range(GROUP)] for prompt in prompts]
    params = [{"temperature": 0, "max_tokens": bound} for bound in bounds[: len(long)]]
    asked = arrange(keys_of(long), params, range(len(long)), sort, merge)
    served = [i for row in asked.rows for i in asked.served(row)]
    assert sorted(served) == list(range(len(long)))
    for row, copies in asked.copies.items():
        for copy in copies:
            assert (long[copy], params[copy]) == (long[row], params[row])


def test_rows_with_a_prefix_stand_together_whatever_all_of_them_share():
    draw = random.Random(3)
    system = list(range(50))
    prefixes = [[1000 + p] * 64 for p in range(20)]
    of = [draw.randrange(20) for _ in range(400)]
    prompts = [[*system, *prefixes[p], draw.randrange(500), 7] for p in of]
    prompts.append([5, 5])  # one row without the system message changes nothing for the others
    found = [of[row] for row in ordered(prompts) if row < 400]
    changes = sum(a != b for a, b in pairwise(found))
    assert changes == len(set(of)) - 1


def test_the_longest_go_first_where_nothing_is_shared():
    draw = random.Random(4)
    prompts = [[draw.randrange(9999) for _ in range(draw.randrange(5, 99))] for _ in range(50)]
    lengths = [len(prompts[row]) for row in ordered(prompts)]
    assert lengths == sorted(lengths, reverse=True)
    bounds = [draw.randrange(1, 500) for _ in prompts]
    own = [{"max_tokens": bound} for bound in bounds]
    assert [bounds[row] for row in ordered(prompts, own)] == sorted(bounds, reverse=True)


def test_the_branch_with_the_longest_row_goes_first_and_so_within_it():
    a, b = [1] * GROUP, [2] * GROUP
    prompts = [[*a, 1], [*b, 1], [*b, 2, 2, 2], [*a, 2, 2], [*b, 3, 3]]
    assert ordered(prompts) == [2, 4, 1, 3, 0]


def test_equal_rows_keep_their_order_and_failed_rows_are_left_out():
    prompts = [[1, 2]] * 5
    assert ordered(prompts) == [0, 1, 2, 3, 4]
    assert arrange(keys_of(prompts), [GREEDY] * 5, [3, 1], False, False).rows == [3, 1]
    assert arrange(keys_of(prompts), [GREEDY] * 5, [], True, True).rows == []


def test_prompts_that_each_extend_the_last_are_no_recursion():
    prompts = [[1] * (GROUP * n) for n in range(1, 1500)]
    assert sorted(ordered(prompts)) == list(range(1499))


# --- equal requests -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "exact"),
    [
        (GREEDY, True),
        ({"temperature": 0, "seed": 3, "choice": ["a"]}, True),
        ({}, False),  # vLLM's own default is 1.0
        ({"temperature": 0.7}, False),
        ({"temperature": 0.7, "seed": 3}, False),
        ({"temperature": "cold"}, False),
        ({"temperature": 0, "n": 2}, False),
        ({"temperature": 0, "n": 1}, True),
        ({"temperature": 0, "extra_args": {"a": 1}}, False),
    ],
)
def test_only_greedy_requests_are_certain_to_have_equal_answers(params, exact):
    assert is_exact(params) is exact
    asked = arrange(keys_of([[1], [1]]), [params, dict(params)], [0, 1], True, True)
    assert asked.rows == ([0] if exact else [0, 1])
    assert asked.copies == ({0: [1]} if exact else {})


def test_requests_with_other_parameters_are_others():
    params = [GREEDY, GREEDY, {**GREEDY, "max_tokens": 5}, {**GREEDY, "max_tokens": 5}]
    asked = arrange(keys_of([[1]] * 4), params, range(4), False, True)
    assert asked.rows == [0, 2] and asked.copies == {0: [1], 2: [3]}
    assert asked.served(0) == [0, 1] and asked.served(2) == [2, 3]
