"""GPU-seconds per 1,000 tokens without head and tail, the gain of a trial, and what is expected."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.learning import arranged
from hypothesis import given
from hypothesis import strategies as st

from prefect_raybatch.learning.predict import expected_ratio
from prefect_raybatch.learning.score import (
    LEAST_SHARDS,
    PartShards,
    SteadyShards,
    paired_gain,
    steady_shards,
)
from prefect_raybatch.model.memory import describe
from prefect_raybatch.sizing.cards import CARDS
from prefect_raybatch.sizing.cost import Tokens, rows_per_second

CONFIG = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    **{"torch_dtype": "bfloat16", "model_type": "llama", "max_position_embeddings": 8192},
}


def part(numbers: list[int], seconds: float = 10.0, at_once: int = 2, head: float = 0.0):
    """Shards of 1,000 tokens that follow each other; the first of them take `head` longer."""
    slots = [1e9 + head + i * seconds / at_once for i in range(at_once)]
    started, ended = [], []
    for at in range(len(numbers)):
        slot = slots.index(min(slots))
        started.append(slots[slot] - (head if at < at_once else 0.0))
        slots[slot] += seconds
        ended.append(slots[slot])
    arrays = (np.array(values, float) for values in (numbers, started, ended))
    return PartShards(*arrays, np.full(len(numbers), 1000.0))


def test_two_shards_at_once_share_the_time_of_the_gpus():
    score = steady_shards(part(list(range(40)))).score(gpus=1)
    assert score == pytest.approx(5.0)
    assert steady_shards(part(list(range(40)))).score(gpus=4) == pytest.approx(20.0)


def test_head_and_tail_do_not_count():
    assert steady_shards(part(list(range(40)), head=500.0)).score(1) == pytest.approx(5.0)
    long = part(list(range(40)))
    long.ended[-1] += 500.0  # while it works alone
    assert steady_shards(long).score(1) == pytest.approx(5.0, rel=0.01)


def test_too_few_shards_or_none_with_times_have_no_score():
    assert steady_shards(part(list(range(LEAST_SHARDS)))).score(1) is None
    empty = PartShards(*(np.zeros(0) for _ in range(4)))
    assert steady_shards(empty).score(1) is None
    untimed = PartShards(np.arange(40), np.zeros(40), np.zeros(40), np.ones(40))
    assert steady_shards(untimed).score(1) is None


@given(
    st.lists(
        st.tuples(st.floats(1, 1e4), st.floats(0, 1e3), st.floats(0, 1e6)), min_size=0, max_size=60
    )
)
def test_the_shards_of_a_part_share_its_time(shards):
    started = np.array([at for at, _, _ in shards])
    ended = started + np.array([length for _, length, _ in shards])
    tokens = np.array([number for *_, number in shards])
    found = steady_shards(PartShards(np.arange(len(shards)), started, ended, tokens))
    assert (found.seconds >= -1e-9).all() and (found.tokens >= 0).all()
    whole = max(0.0, started.max() - ended.min()) if len(shards) else 0.0
    assert found.seconds.sum() <= whole + 1e-6


def of_costs(costs: dict[int, float]) -> SteadyShards:
    numbers = np.array(list(costs))
    return SteadyShards(numbers, np.array(list(costs.values())), np.ones(len(costs)), numbers)


def test_the_gain_is_that_over_the_neighbours():
    """Shards at the end of the input are twice the work, for both."""
    both = {n: 1.0 + (n >= 50) for n in range(100)}
    trial = of_costs({n: cost / 1.25 for n, cost in both.items() if n % 5 == 2})
    others = of_costs({n: cost for n, cost in both.items() if n % 5 != 2})
    found = paired_gain(trial, others)
    assert found.pairs == 20 and found.gain == pytest.approx(0.25)
    assert found.bound == pytest.approx(0.25)


def test_the_bound_is_of_batch_means():
    """Ten pairs: six batches, the first four of two; by hand."""
    logs = np.array([0.1, 0.3, 0.0, 0.2, 0.1, 0.1, 0.4, 0.2, 0.0, 0.2])
    trial = of_costs({5 * i + 2: float(np.exp(-d)) for i, d in enumerate(logs)})
    others = of_costs({n: 1.0 for n in range(50) if n % 5 != 2})
    means = np.array([0.2, 0.1, 0.1, 0.3, 0.0, 0.2])
    found = paired_gain(trial, others)
    assert found.gain == pytest.approx(np.exp(means.mean()) - 1)
    low = means.mean() - 2.015 * means.std(ddof=1) / np.sqrt(6)
    assert found.bound == pytest.approx(np.exp(low) - 1)


def test_few_pairs_show_nothing():
    few = of_costs({n: 1.0 for n in range(LEAST_SHARDS - 1)})
    many = of_costs({n: 1.0 for n in range(40)})
    assert paired_gain(few, many).gain is None and paired_gain(many, few).bound is None


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_the_bound_holds_where_shards_in_flight_together_are_alike(correlation):
    """No gain: the bound is above 0 in about 5 % of trials, 10 % where neighbours are alike."""
    random, above, trials = np.random.default_rng(1), 0, 600
    others = of_costs({n: 1.0 for n in range(300)})
    for _ in range(trials):
        noise = np.zeros(60)
        for at in range(60):
            before = noise[at - 1] if at else 0.0
            own = random.normal(0, 0.03 * np.sqrt(1 - correlation**2))
            noise[at] = correlation * before + own
        trial = of_costs({5 * n + 2: float(np.exp(noise[n])) for n in range(60)})
        above += paired_gain(trial, others).bound > 0
    assert above / trials < (0.07 if correlation == 0 else 0.13)


# --- what is expected ---------------------------------------------------------------------------

MODEL, CARD = describe(CONFIG, {}), CARDS["H100"]
ROW = Tokens(64, 100, 24, "")


def ratio(measured: str, busy: float, other: str) -> float:
    return expected_ratio(MODEL, CARD, ROW, arranged(measured), busy, arranged(other))


def test_more_engines_gain_nothing_for_a_busy_gpu():
    assert ratio("2x512", 1.0, "4x512") < 1.01
    assert ratio("1x512", 1.0, "2x512") < 1.0  # sharing costs something


@pytest.mark.parametrize("busy", [0.2, 0.5, 0.8])
def test_more_engines_gain_at_most_what_the_gpu_waited(busy):
    two, four = ratio("1x512", busy, "2x512"), ratio("1x512", busy, "4x512")
    assert 1 < two < four < 1 / busy


def test_it_is_one_for_the_same_arrangement():
    for busy in (0.1, 0.5, 0.9, 1.0):
        assert ratio("2x512", busy, "2x512") == pytest.approx(1.0, abs=1e-6)


def test_there_and_back_is_one():
    there = ratio("1x512", 0.4, "2x512")
    busy = 0.4 * there / 0.931  # the GPU's speed where engines share it
    assert there * ratio("2x512", busy, "1x512") == pytest.approx(1.0, rel=0.02)


def test_a_measurement_like_the_cost_models_is_expected_as_it_says():
    """Of rates and busy shares that the cost model is right about."""
    from prefect_raybatch.sizing.cost import engine_seconds

    for engines, seqs in ((1, 256), (2, 512)):
        rate = rows_per_second(MODEL, CARD, ROW, engines, seqs)
        busy = rate * engine_seconds(MODEL, CARD, ROW, engines, seqs)[1]
        other = rows_per_second(MODEL, CARD, ROW, 4, 256) / rate
        if busy < 0.99:
            assert ratio(f"{engines}x{seqs}", busy, "4x256") == pytest.approx(other, rel=0.02)
