"""How sure a model was of its answers."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as some

from prefect_raybatch.stages.answer_logprobs import logprobs_type
from prefect_raybatch.stages.cascade import highest_probabilities, mean_logprobs
from prefect_raybatch.stages.columns import PROBABILITIES_TYPE

SHARES = some.lists(some.lists(some.floats(0, 1), max_size=4), max_size=8)


@given(SHARES)
def test_the_probability_of_a_row_is_that_of_its_most_probable_label(rows):
    column = pa.array(
        [[(str(i), p) for i, p in enumerate(row)] for row in rows], PROBABILITIES_TYPE
    )
    assert highest_probabilities(column).tolist() == [max(row, default=0.0) for row in rows]


@given(SHARES)
def test_the_log_probability_of_a_row_is_the_mean_of_its_tokens(rows):
    told = [[{"token": "a", "id": 1, "logprob": -p} for p in row] for row in rows]
    found = mean_logprobs(pa.array(told, logprobs_type(0, 1))).tolist()
    expected = [-math.fsum(row) / len(row) if row else 0.0 for row in rows]
    assert found == pytest.approx(expected, abs=1e-6)
