"""Limits the requests and tokens per minute, and the requests in flight. No I/O.

The limits must hold in any 60 seconds of the server's clock, but only the time of sending is known
here, not the time of arrival. So a request counts until 60 s after its answer, but no longer than
60 + `TRAVEL` seconds after it was sent.

Requests are also paced: at most as many are sent at once as the limit allows in a second.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from prefect_raybatch.words import counted

LIMIT_WINDOW = 60.0  # seconds
BURST = 1.0  # seconds' worth of a limit that may be sent at once
TRAVEL = 2.0  # seconds that a request may take to the server
CLOCK_ROUNDING = 1e-6  # seconds
OUTAGE_LOG_SECONDS = 10.0  # seconds without any answer after which an outage is reported
# Seconds for which a limit that delayed a request is reported; `usage` is read more often.
LIMIT_LOG_SECONDS = 15.0
FIRST_IN_FLIGHT = 8.0
SLOWER, FASTER = 0.5, 1.0  # in flight: factor after a 429, increase after a round of answers
Signal = Literal["answered", "limited", "failed"]


@dataclass(frozen=True)
class BatchCounts:
    """The open batches of a shard: their number, their requests, and how many requests are done."""

    batches: int = 0
    done: int = 0
    requests: int = 0


@dataclass(frozen=True)
class Usage:
    """The requests sent and tokens billed so far in a run, and texts about its progress.

    `waits` says why requests wait. `batches` says how many requests of the open batches are done.
    `outage` says for how long the server has not answered. Each text is "" if there is nothing to
    say.
    """

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    waits: str = ""
    batches: str = ""
    outage: str = ""


@dataclass
class _Sent:
    """A request that counts against the limits: when it was sent (`at`) and ended (`settled`)."""

    at: float
    tokens: int
    settled: float | None = None

    def expires(self) -> float:
        """Return the time after which the request no longer counts against the limits."""
        late = self.at + TRAVEL
        return LIMIT_WINDOW + (late if self.settled is None else min(self.settled, late))


@dataclass
class _Pace:
    """Paces requests or tokens evenly at a limit per minute.

    As many as the limit allows in `BURST` seconds may be sent at once.
    """

    free: float = 0.0  # when everything sent so far would have left at an even pace

    def wait(self, now: float, amount: float, per_minute: float) -> float:
        spare = max(0.0, BURST - amount * LIMIT_WINDOW / per_minute)
        wait = self.free - now - spare
        return wait if wait > CLOCK_ROUNDING else 0.0

    def take(self, now: float, amount: float, per_minute: float) -> None:
        self.free = max(self.free, now) + amount * LIMIT_WINDOW / per_minute


@dataclass
class Limiter:
    """The limits of one run, shared by all its workers. Thread-safe.

    `requests` and `tokens` are per minute, None for no limit. `most` is the maximum number of
    requests in flight; fewer are allowed after a 429 or a failure, and more after answers. A
    request that is not settled after twice `timeout` seconds no longer counts as in flight. If
    there is a limit per minute, nothing is sent for the first `others` seconds, because an earlier
    attempt may have used it up.
    """

    requests: float | None
    tokens: float | None
    most: int
    timeout: float
    clock: Callable[[], float] = time.monotonic
    others: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sent: deque[_Sent] = field(default_factory=deque)
    _flying: dict[int, _Sent] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=lambda: count(1))
    allowed: float = 0.0
    _request_pace: _Pace = field(default_factory=_Pace)
    _token_pace: _Pace = field(default_factory=_Pace)
    _paused: float = 0.0
    _why: str = ""
    _cut: float = 0.0  # when the requests in flight were last halved
    _usage: list[int] = field(default_factory=lambda: [0, 0, 0])
    _limited: tuple[float, str] = (-LIMIT_LOG_SECONDS, "")  # when a request last got a 429, and why
    _held: tuple[float, str] = (
        -LIMIT_LOG_SECONDS,
        "",
    )  # when a limit last held a request back, and which
    _failing: tuple[float, str] | None = None  # since when no request is answered, and why
    _batches: dict[int, BatchCounts] = field(default_factory=dict)  # by shard

    def __post_init__(self) -> None:
        self.allowed = min(FIRST_IN_FLIGHT, self.most)
        if self.others and (self.requests or self.tokens):
            self._paused = self.clock() + self.others
            self._why = "an earlier attempt may have used up the limit"

    def ask(self, tokens: int) -> tuple[float, int]:
        """Return (0, number) if a request of `tokens` may be sent now, else (seconds to wait, 0).

        In the first case, the request counts from now on; report its end with `settle`. The seconds
        are infinite if the request has more tokens than the limit per minute.
        """
        with self._lock:
            if self.tokens and tokens > self.tokens:
                return math.inf, 0
            now = self.clock()
            self._forget(now)
            wait = self._wait(now, tokens)
            if wait > 0:
                return wait, 0
            if self.requests:
                self._request_pace.take(now, 1, self.requests)
            if self.tokens:
                self._token_pace.take(now, tokens, self.tokens)
            number, sent = next(self._numbers), _Sent(now, tokens)
            self._sent.append(sent)
            self._flying[number] = sent
            self._usage[0] += 1
            return 0.0, number

    def settle(
        self,
        number: int,
        signal: Signal,
        used: tuple[int, int] | None = None,
        pause: float = 0.0,
        why: str = "",
    ) -> None:
        """Record the end of request `number`: answered, limited (429) or failed.

        `used` are the prompt and answer tokens that the server billed; without them, the reserved
        tokens stay counted. No request is sent for the next `pause` seconds; `why` is the reason.
        """
        with self._lock:
            now = self.clock()
            sent = self._flying.pop(number, None)
            if sent is not None:
                sent.settled = now
            self._limited = (now, (why or "429") if signal == "limited" else "")
            since = now if self._failing is None else self._failing[0]
            self._failing = (since, why) if signal == "failed" else None
            if used is not None:
                self._usage[1] += used[0]
                self._usage[2] += used[1]
                if sent is not None:
                    if self.tokens:
                        spared = sent.tokens - sum(used)
                        self._token_pace.free -= spared * LIMIT_WINDOW / self.tokens
                    sent.tokens = sum(used)
            if signal == "answered":
                self.allowed = min(self.most, self.allowed + FASTER / self.allowed)
            elif sent is None or sent.at > self._cut:  # else it left before the last cut
                self.allowed, self._cut = max(1.0, self.allowed * SLOWER), now
            if pause > 0 and now + pause > self._paused:
                self._paused, self._why = now + pause, why

    def lower(self, requests: float | None, tokens: float | None) -> None:
        """Lower the limits per minute to what the server reports; None: not reported."""
        with self._lock:
            if requests:
                self.requests = min(requests, self.requests or requests)
            if tokens:
                self.tokens = min(tokens, self.tokens or tokens)

    def bill(self, prompt_tokens: int, output_tokens: int) -> None:
        """Add the tokens billed for a batch to `usage`; they count against no limit per minute."""
        with self._lock:
            self._usage[1] += prompt_tokens
            self._usage[2] += output_tokens

    def note_batches(self, shard: int, batches: BatchCounts) -> None:
        """Record the progress of a shard's open batches, for `usage`."""
        with self._lock:
            self._batches.pop(shard, None)
            if batches.batches:
                self._batches[shard] = batches

    def usage(self) -> Usage:
        """Return the counts so far, and why requests wait now."""
        with self._lock:
            requests, prompt, output = self._usage
            batches = _batches_text(self._batches.values())
            return Usage(requests, prompt, output, self._waits(), batches, self._outage())

    def _waits(self) -> str:
        now = self.clock()
        left = self._paused - now
        if left >= 1:
            return f"waiting {left:.0f} s: {self._why}{self._limit_text()}"
        at, why = self._limited
        if why and (self._awaits(now) or now - max(at, self._paused) < LIMIT_LOG_SECONDS):
            return f"slowed: {why}{self._limit_text()}"
        at, which = self._held
        return f"slowed: {which}" if now - at < LIMIT_LOG_SECONDS else ""

    def _awaits(self, now: float) -> bool:
        """Return whether a request of a live worker is in flight."""
        return any(not self._is_lost(one, now) for one in self._flying.values())

    def _is_lost(self, sent: _Sent, now: float) -> bool:
        return now - sent.at > 2 * self.timeout

    def _limit_text(self) -> str:
        return f", limit {self.requests:g} requests per minute" if self.requests else ""

    def _outage(self) -> str:
        if self._failing is None:
            return ""
        since, why = self._failing
        silent = self.clock() - since
        if silent < OUTAGE_LOG_SECONDS:
            return ""
        return f"no answer from the server for {silent:.0f} s" + (f" ({why})" if why else "")

    def _wait(self, now: float, tokens: int) -> float:
        by_limit = [(self._paused - now, self._why + self._limit_text())]
        if self.requests:
            which = f"limit {self.requests:g} requests per minute"
            by_limit.append((self._request_pace.wait(now, 1, self.requests), which))
            over = len(self._sent) + 1 - max(1, self.requests)
            by_limit.append((self._until_room(now, over, False), which))
        if self.tokens:
            which = f"limit {self.tokens:g} tokens per minute"
            by_limit.append((self._token_pace.wait(now, tokens, self.tokens), which))
            over = sum(one.tokens for one in self._sent) + tokens - self.tokens
            by_limit.append((self._until_room(now, over, True), which))
        wait, which = max(by_limit)
        if wait > 0:
            self._held = now, which
        return max(wait, 0.05) if len(self._flying) >= int(self.allowed) else wait

    def _until_room(self, now: float, over: float, by_tokens: bool) -> float:
        """Return the seconds until at least `over` requests no longer count against the limit.

        With `by_tokens`, `over` is a number of tokens instead.
        """
        if over <= 0:
            return 0.0
        for sent in sorted(self._sent, key=_Sent.expires):
            over -= sent.tokens if by_tokens else 1
            if over <= 0:
                return max(sent.expires() - now, 0.001)
        return 1.0

    def _forget(self, now: float) -> None:
        """Drop requests that no longer count, and in-flight ones whose worker died."""
        if any(one.expires() <= now for one in self._sent):
            self._sent = deque(one for one in self._sent if one.expires() > now)
        lost = [n for n, one in self._flying.items() if self._is_lost(one, now)]
        for number in lost:
            del self._flying[number]


def _batches_text(open_batches: Iterable[BatchCounts]) -> str:
    each = list(open_batches)
    batches, done, asked = (
        sum(getattr(one, name) for one in each) for name in ("batches", "done", "requests")
    )
    if not batches:
        return ""
    text = counted(batches, "batch", "batches")
    return f"{text}, {done:,} of {counted(asked, 'request')} done"
