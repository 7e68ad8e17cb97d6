"""The limits hold in any minute, whatever answers do: by a clock that the test sets."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_raybatch.stages.endpoint.limiter import (
    LIMIT_LOG_SECONDS,
    LIMIT_WINDOW,
    TRAVEL,
    Limiter,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def most_in(arrivals: list[tuple[float, int]], width: float) -> int:
    """Return the largest sum of amounts that arrive within `width` seconds."""
    arrivals = sorted(arrivals)
    most = total = first = 0
    for at, amount in arrivals:
        total += amount
        while arrivals[first][0] < at - width:
            total -= arrivals[first][1]
            first += 1
        most = max(most, total)
    return most


def sent_by(limiter: Limiter, clock: Clock, seed: int, seconds: float) -> list[tuple[float, int]]:
    """Return when requests arrive at the server, and the tokens that each had."""
    draw = random.Random(seed)
    arrivals: list[tuple[float, int]] = []
    flying: list[tuple[float, int, int, bool]] = []
    end = clock.now + seconds
    while clock.now < end:
        for one in sorted(one for one in flying if one[0] <= clock.now):
            flying.remove(one)
            signal = "answered" if one[3] else "failed"
            limiter.settle(one[1], signal, (one[2] // 2, one[2] - one[2] // 2))
        tokens = draw.randint(10, 90)
        wait, number = limiter.ask(tokens)
        if number:
            billed = draw.randint(1, tokens)
            arrival = clock.now + draw.uniform(0, TRAVEL)
            arrivals.append((arrival, billed))
            flying.append((arrival + draw.uniform(0, 5), number, billed, draw.random() < 0.95))
        else:
            clock.now += min(max(wait, 0.001), 0.25)
    return arrivals


@settings(max_examples=30, deadline=None)
@given(
    requests=st.one_of(st.none(), st.integers(1, 600)),
    tokens=st.one_of(st.none(), st.integers(100, 20_000)),
    most=st.integers(1, 64),
    seed=st.integers(0, 1 << 30),
)
def test_no_minute_of_the_server_is_over_a_limit(requests, tokens, most, seed):
    clock = Clock()
    limiter = Limiter(requests, tokens, most, 600.0, clock)
    if requests is None and tokens is None:
        requests = limiter.requests = 300
    arrivals = sent_by(limiter, clock, seed, 150.0)
    assert arrivals
    if requests is not None:
        assert most_in([(at, 1) for at, _ in arrivals], LIMIT_WINDOW) <= requests
    if tokens is not None:
        assert most_in(arrivals, LIMIT_WINDOW) <= tokens


def test_at_most_a_second_of_requests_leaves_at_once():
    clock = Clock()
    limiter = Limiter(600, None, 1000, 600.0, clock)
    limiter.allowed = 1000
    sent = 0
    while limiter.ask(1)[1]:
        sent += 1
    assert sent == 10


def test_fewer_are_in_flight_after_a_429_and_more_after_answers():
    limiter = Limiter(None, None, 64, 600.0, Clock())
    numbers = [limiter.ask(1)[1] for _ in range(8)]
    assert limiter.ask(1)[0] > 0
    for number in numbers:
        limiter.settle(number, "limited")
    halved = limiter.allowed
    assert halved == 4  # once for all that had left before
    for _ in range(40):
        limiter.settle(limiter.ask(1)[1], "answered")
    assert limiter.allowed > 8


def test_a_pause_is_told_with_its_reason_and_the_limit():
    clock = Clock()
    limiter = Limiter(60, None, 4, 600.0, clock)
    limiter.settle(limiter.ask(1)[1], "limited", None, 40.0, "429")
    assert limiter.ask(1)[0] == pytest.approx(40, abs=1)
    assert limiter.usage().waits == "waiting 40 s: 429, limit 60 requests per minute"
    clock.now += 41
    limiter.settle(limiter.ask(1)[1], "answered")
    assert limiter.usage().waits == ""


@pytest.mark.parametrize("pause", [0.2, 0.9, 5.0])
def test_answers_of_429_are_a_wait_until_another_comes_however_short_their_pauses(pause):
    clock = Clock()
    limiter = Limiter(None, None, 4, 600.0, clock)
    for attempt in range(200):
        number = limiter.ask(1)[1]
        clock.now += 30.0  # the server may take its time to say 429
        assert attempt == 0 or "429" in limiter.usage().waits
        limiter.settle(number, "limited", None, pause, "429")
        assert "429" in limiter.usage().waits
        clock.now += pause
        assert "429" in limiter.usage().waits
    limiter.settle(limiter.ask(1)[1], "answered")
    clock.now += LIMIT_LOG_SECONDS
    assert limiter.usage().waits == ""


def test_a_429_is_no_wait_any_more_once_nobody_asks_again():
    """As after the death of the worker that got it."""
    clock = Clock()
    limiter = Limiter(None, None, 4, 600.0, clock)
    answered, lost = limiter.ask(1)[1], limiter.ask(1)[1]
    limiter.settle(answered, "limited", None, 5.0, "429")
    clock.now += 2 * 600.0
    assert lost and "429" in limiter.usage().waits
    clock.now += 1.0  # by now the other one can have no answer either
    assert limiter.usage().waits == ""


@pytest.mark.parametrize(
    ("limits", "told"),
    [((60, None), "60 requests per minute"), ((None, 600), "600 tokens per minute")],
)
def test_a_request_that_our_own_limit_holds_back_is_a_wait_and_one_in_the_queue_is_none(
    limits, told
):
    clock = Clock()
    limiter = Limiter(*limits, 1, 600.0, clock)
    number = limiter.ask(10)[1]
    assert limiter.ask(10)[0] > 0 and limiter.usage().waits == f"slowed: limit {told}"
    limiter.settle(number, "answered", (5, 5))
    clock.now += LIMIT_LOG_SECONDS
    assert limiter.usage().waits == ""
    assert limiter.ask(10)[1]
    clock.now += 2  # the next one could leave, but for the one in flight
    assert limiter.ask(10)[0] > 0 and limiter.usage().waits == ""


def test_requests_of_a_worker_that_died_do_not_stay_in_flight():
    clock = Clock()
    limiter = Limiter(None, None, 1, 10.0, clock)
    assert limiter.ask(1)[1]
    assert limiter.ask(1)[0] > 0
    clock.now += 21
    assert limiter.ask(1)[1]


def test_limits_that_the_server_reports_count_where_they_are_lower():
    limiter = Limiter(60, None, 4, 600.0, Clock())
    limiter.lower(500, 9000)
    assert (limiter.requests, limiter.tokens) == (60, 9000)
    limiter.lower(30, None)
    assert limiter.requests == 30


@pytest.mark.parametrize(("limits", "waits"), [((60, None), 40), ((None, None), 0)])
def test_requests_of_earlier_attempts_count_against_a_limit(limits, waits):
    clock = Clock()
    limiter = Limiter(*limits, 4, 600.0, clock, others=40.0)
    assert limiter.ask(1)[0] == waits
    if waits:
        assert "an earlier attempt" in limiter.usage().waits
        clock.now += 40
        assert limiter.ask(1)[1]


@pytest.mark.parametrize("signal", ["answered", "limited"])
def test_an_outage_is_told_until_the_server_says_anything(signal):
    clock = Clock()
    limiter = Limiter(None, None, 4, 600.0, clock)
    limiter.settle(limiter.ask(1)[1], "failed", None, 0.0, "ConnectError")
    assert limiter.usage().outage == ""
    clock.now += 70
    limiter.settle(limiter.ask(1)[1], "failed", None, 0.0, "503")
    clock.now += 5
    assert limiter.usage().outage == "no answer from the server for 75 s (503)"
    limiter.settle(limiter.ask(1)[1], signal)
    clock.now += 70
    assert limiter.usage().outage == ""
