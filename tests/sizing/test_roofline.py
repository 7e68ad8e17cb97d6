"""What tokens cost: token by token, against the sums."""

from __future__ import annotations

import pytest
from helpers.models import LLAMA_8B
from hypothesis import given
from hypothesis import strategies as st

from prefect_raybatch.model.memory import describe
from prefect_raybatch.sizing.cards import CARDS
from prefect_raybatch.sizing.roofline import Work, work_of

WORK = Work(
    layers=7.0,
    head=5.0,
    attention=3.0,
    attention_window=2.0,
    window=6,
    weights=1000.0,
    kv=11.0,
    kv_window=13.0,
    peak_flops=1.0,
    peak_bytes=1.0,
)


def one_by_one(work: Work, prompt: int, cached: int, answers: tuple[int, ...]) -> float:
    """FLOPs, a token after the other: the last token of an answer is given to no layer."""
    flops = work.head * sum(answers)
    ends = [(cached, prompt), *((prompt, prompt + n - 1) for n in answers if n)]
    for first, last in ends:
        for at in range(first, last):
            flops += work.layers + work.attention * (at + 1)
            flops += work.attention_window * min(at + 1, work.window)
    return flops


@given(
    prompt=st.integers(1, 40),
    share=st.floats(0, 1),
    answers=st.lists(st.integers(0, 12), max_size=3).map(tuple),
)
def test_flops_are_those_of_each_token(prompt, share, answers):
    cached = int(share * (prompt - 1))
    found, _ = WORK.of_answer(prompt, cached, answers)
    assert found == pytest.approx(one_by_one(WORK, prompt, cached, answers))


def test_bytes_are_those_of_the_cache_written_and_read():
    # 10 tokens of which 4 were cached: 6 written, 4 read; then 2 steps see 11 and 12 tokens
    _, moved = WORK.of_answer(10, 4, (3,))
    assert moved == WORK.kv * (6 + 2 + 4 + 11 + 12) + WORK.kv_window * (6 + 2 + 4 + 6 + 6)


def test_a_model_of_8b_takes_about_two_flops_a_parameter():
    work = work_of(describe(LLAMA_8B, {}), CARDS["H100"])
    assert work.layers == pytest.approx(2 * 6.98e9, rel=0.001)
    assert work.head == 2 * 128256 * 4096
    assert work.attention == 4 * 32 * 32 * 128  # layers, heads, head size
    assert work.weights == pytest.approx(2 * (8.03e9 - 128256 * 4096), rel=0.001)
    assert work.kv == 128 * 1024
    # 1,000 tokens of prompt: 2 N and about 4 L H Q T / 2
    flops, _ = work.of_answer(1000, 0, (1,))
    assert flops == pytest.approx(1000 * work.layers + work.head + work.attention * 500_500)


def test_the_peak_is_that_of_the_share_and_of_the_precision():
    plain, fp8 = describe(LLAMA_8B, {}), describe(LLAMA_8B, {"quantization": "fp8"})
    h100, a100 = CARDS["H100"], CARDS["A100"]
    assert work_of(plain, h100, 4).peak_flops == 4 * h100.flops
    assert work_of(plain, h100, 1, 3).peak_bytes == pytest.approx(h100.bandwidth / 3)
    assert work_of(fp8, h100).peak_flops == 2 * h100.flops
    assert work_of(fp8, a100).peak_flops == a100.flops  # it multiplies them as 16 bits
    assert work_of(fp8, h100).weights < 0.6 * work_of(plain, h100).weights
