"""Asks stand for the rows that wait for them."""

from __future__ import annotations

import numpy as np

from prefect_raybatch.ledger.increments import RequestWeights
from prefect_raybatch.ledger.positions import Positions


def test_the_rows_that_wait_are_those_of_the_asks_of_that_shard():
    """Weights are in the order of all asks, and positions begin anew in each shard."""
    weights = np.array([1, 2, 3, 10, 20, 30, 100], np.int64)
    waiting = RequestWeights(166, np.array([0, 3, 6, 7]), weights)
    assert waiting.count(0, Positions.of(np.array([0, 2]))) == 4
    assert waiting.count(1, Positions.of(np.array([0, 2]))) == 40
    assert waiting.count(2, Positions.of(np.array([0]))) == 100
    assert waiting.count(1, Positions.of(np.array([], np.int64))) == 0
