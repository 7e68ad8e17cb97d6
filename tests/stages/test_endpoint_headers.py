"""What servers say about waiting and limits, in the forms of several providers."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_raybatch.stages.endpoint.headers import MOST_PAUSE, limits_of, may_retry, pause_of

NOW = datetime(2026, 11, 27, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "20"}, 20),
        ({"retry-after": "Fri, 27 Nov 2026 12:00:30 GMT"}, 30),
        ({"retry-after": "Fri, 27 Nov 2026 11:00:00 GMT"}, None),  # it is over
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "1e9"}, MOST_PAUSE),
        ({"retry-after-ms": "1500", "retry-after": "1"}, 1.5),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 360),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "20ms"}, 0.02),
        ({"x-ratelimit-remaining-requests": "3", "x-ratelimit-reset-requests": "6m0s"}, None),
        ({"x-ratelimit-remaining-requests": "-1", "x-ratelimit-reset-requests": "1s"}, None),
        (
            {
                "anthropic-ratelimit-tokens-remaining": "0",
                "anthropic-ratelimit-tokens-reset": "2026-11-27T12:00:07Z",
            },
            7,
        ),
    ],
)
def test_how_long_a_server_asks_to_wait(headers, seconds):
    assert pause_of(headers, NOW) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    ("headers", "limits"),
    [
        ({}, (None, None)),
        (
            {"x-ratelimit-limit-requests": "500", "x-ratelimit-limit-tokens": "30000"},
            (500, 30000),
        ),
        ({"x-ratelimit-limit-requests": "-1"}, (None, None)),  # Azure's for no limit
        ({"anthropic-ratelimit-requests-limit": "50"}, (50, None)),
        ({"x-ratelimit-limit-tokens": "many"}, (None, None)),
    ],
)
def test_limits_that_a_server_reports(headers, limits):
    assert limits_of(headers) == limits


def test_whether_a_retry_may_help():
    said = [may_retry({"x-should-retry": text}) for text in ("true", "False", "maybe")]
    assert [*said, may_retry({})] == [True, False, None, None]


PARTS, KINDS = ("remaining", "reset", "limit"), ("requests", "tokens")
NAMES = (
    *("retry-after", "retry-after-ms", "x-should-retry"),
    *(f"x-ratelimit-{part}-{kind}" for part in PARTS for kind in KINDS),
    *(f"anthropic-ratelimit-{kind}-{part}" for part in PARTS for kind in KINDS),
)


@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=30)))
def test_no_header_breaks_a_run(headers):
    pause = pause_of(headers, NOW)
    assert pause is None or 0 < pause <= MOST_PAUSE
    assert all(limit is None or limit > 0 for limit in limits_of(headers))
    may_retry(headers)
