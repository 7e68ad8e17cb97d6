"""Reads a server's response headers: how long to wait, and its limits per minute."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

SECONDS_OF = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MOST_PAUSE = 3600.0  # seconds that a server may make a run wait at once
_PARTS = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def pause_of(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the seconds that the server asks to wait, at most MOST_PAUSE; None if it does not say.

    An absolute time is compared with the response's Date header, because the server's clock may
    differ from the local one. Without that header it is compared with `now`, the local time.
    """
    now = _time(headers.get("date")) or now
    waits = [_number(headers.get("retry-after-ms"), 0.001), _retry_after(headers, now)]
    for kind in ("requests", "tokens"):
        for family in ("x-ratelimit-{}-" + kind, "anthropic-ratelimit-" + kind + "-{}"):
            if _number(headers.get(family.format("remaining"))) == 0:
                waits.append(_reset(headers.get(family.format("reset")), now))
    known = [wait for wait in waits if wait is not None and wait > 0]
    return min(max(known), MOST_PAUSE) if known else None


def limits_of(headers: Mapping[str, str]) -> tuple[float | None, float | None]:
    """Return (requests, tokens) per minute that the server reports as its limits.

    A value is None if the server does not report it. It is also None for -1, with which Azure
    reports that there is no limit.
    """
    found = []
    for kind in ("requests", "tokens"):
        told = headers.get(f"x-ratelimit-limit-{kind}")
        told = told or headers.get(f"anthropic-ratelimit-{kind}-limit")
        number = _number(told)
        found.append(number if number and number > 0 else None)
    return found[0], found[1]


def may_retry(headers: Mapping[str, str]) -> bool | None:
    """Return whether the server says that a retry may help; None if it does not say."""
    return {"true": True, "false": False}.get(headers.get("x-should-retry", "").lower())


def _retry_after(headers: Mapping[str, str], now: datetime) -> float | None:
    text = headers.get("retry-after")
    seconds = _number(text)
    until = _time(text) if seconds is None else None
    return seconds if until is None else (until - now).total_seconds()


def _time(text: str | None) -> datetime | None:
    """Parse the value of an HTTP date header, UTC by default; None if it is no date."""
    try:
        found = parsedate_to_datetime(text) if text else None
    except (ValueError, TypeError):
        return None
    return found if found is None or found.tzinfo else found.replace(tzinfo=UTC)


def _reset(text: str | None, now: datetime) -> float | None:
    """Parse a rate-limit reset header to seconds from now; None if it cannot be read.

    The header holds a duration such as 6m0s or 20ms, a number of seconds, or an ISO time.
    """
    if not text:
        return None
    if (seconds := _number(text)) is not None:
        return seconds
    parts = _PARTS.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * SECONDS_OF[unit] for number, unit in parts)
    try:
        until = datetime.fromisoformat(text)
    except ValueError:
        return None
    until = until if until.tzinfo else until.replace(tzinfo=UTC)
    return (until - now).total_seconds()


def _number(text: str | None, unit: float = 1.0) -> float | None:
    try:
        value = float(text) * unit if text else None
    except ValueError:
        return None
    return value if value is not None and math.isfinite(value) else None
