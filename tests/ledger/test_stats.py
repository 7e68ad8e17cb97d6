"""Figures of shards: what is not known, what a newer version knows, and how they fold."""

from __future__ import annotations

import pickle
from dataclasses import fields
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from prefect_raybatch.ledger.records import dump
from prefect_raybatch.ledger.stats import (
    AND_VALUE,
    INPUT_FILLED,
    INPUT_VALUES,
    MEANS,
    MOST_NAMES,
    PEAKS,
    ShardStats,
    StatsFold,
    fold_stats,
    values_by_column,
)

NAMES = [one.name for one in fields(ShardStats) if one.name != "others"]
READER = TypeAdapter(ShardStats)
numbers = st.integers(0, 10**6) | st.floats(0, 1e6)
values = st.dictionaries(st.sampled_from([*NAMES, "later", "others"]), numbers, max_size=12)


@given(values)
def test_figures_are_read_as_they_were_written(known):
    stats = ShardStats.of(known)
    assert stats.to_dict() == known
    again = READER.validate_json(dump(known))
    assert again == stats and dump(again.to_dict()) == dump(known)
    assert pickle.loads(pickle.dumps(stats)) == stats


def test_what_is_not_known_is_none_and_what_a_newer_version_knows_is_kept():
    stats = ShardStats.of({"rows": 3, "later": 2})
    assert stats == ShardStats(rows=3, others={"later": 2}) and stats.started is None
    assert fold_stats([stats, stats]).to_dict() == {"rows": 6, "later": 4}


@pytest.mark.parametrize(
    "bad", ["true", "null", '"1"', "NaN", "Infinity", "1e999", "[1]", "-1e300"]
)
def test_a_figure_is_a_finite_number(bad):
    with pytest.raises(ValidationError):
        READER.validate_json(f'{{"rows":{bad}}}')


def test_each_figure_has_a_rule():
    assert len(MEANS) == 7 and len(PEAKS) == 3
    assert all(one.metadata["fold"] for one in fields(ShardStats) if one.name != "others")


def test_means_are_weighted_by_their_samples():
    parts = [
        ShardStats(rows=1, started=5.0, ended=9.0, samples=3, running=10.0, kv_cache_peak=0.6),
        ShardStats(rows=2, started=4.0, ended=6.0, samples=1, running=2.0, kv_cache_peak=0.9),
        ShardStats(rows=3),
    ]
    assert fold_stats(parts) == ShardStats(
        rows=6, started=4.0, ended=9.0, samples=4, running=8.0, kv_cache_peak=0.9
    )
    assert fold_stats([]) == ShardStats()
    assert fold_stats([ShardStats(running=4.0), ShardStats(running=2.0)]).running == 3.0
    assert fold_stats([ShardStats(running=4.0, samples=0)]).running == 0.0


@given(st.lists(values.map(ShardStats.of), max_size=6))
def test_one_after_the_other_is_as_all_at_once(parts):
    fold = StatsFold()
    for part in parts:
        fold.add(part)
    assert fold.result() == fold_stats(parts)
    whole = reduce(lambda a, b: fold_stats([a, b]), parts, ShardStats())
    found, wanted = whole.to_dict(), fold_stats(parts).to_dict()
    assert found.keys() == wanted.keys()
    for name in set(found) - set(MEANS):  # parts without samples weigh 1 each
        assert found[name] == pytest.approx(wanted[name])


def test_figures_for_people_are_those_of_the_engine():
    stats = ShardStats(rows=3, running=1.23456, gpu_memory_peak=7)
    assert stats.figures() == {"running": 1.2346, "gpu_memory_peak": 7}


def test_memory_is_bounded_where_each_shard_has_other_values():
    """As in an input that is sorted by customer; common values stay counted."""
    fold, shards = StatsFold(), 2 * MOST_NAMES // 50
    for shard in range(shards):
        values = {f"{INPUT_VALUES}Customer{AND_VALUE}{shard}-{at}": 1.0 for at in range(50)}
        country = {f"{INPUT_VALUES}Country{AND_VALUE}DE": 50.0, f"{INPUT_FILLED}Country": 50.0}
        customers = {f"{INPUT_FILLED}Customer": 50.0}
        fold.add(ShardStats(others={**values, **country, **customers}))
    figures = fold.result().others
    assert len(figures) <= MOST_NAMES
    assert values_by_column(figures) == {"Country": {"DE": shards * 50.0}}
