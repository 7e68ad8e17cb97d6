"""Sends requests to a hosted model: one thread with an event loop, many requests in flight.

Each request ends with an answer, an error of its row, a retry after a wait, or an error that ends
the attempt (`EndpointRefused`, `EndpointUnavailable`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from prefect_raybatch.errors import ConfigError, EndpointRefused, EndpointUnavailable
from prefect_raybatch.spec.endpoint import EndpointPath, EndpointSpec
from prefect_raybatch.stages.endpoint.answers import (
    NOT_AS_AGREED,
    HostedAnswer,
    answer_of,
    row_error,
)
from prefect_raybatch.stages.endpoint.headers import limits_of, may_retry, pause_of
from prefect_raybatch.stages.endpoint.limiter import BatchCounts, Signal, Usage
from prefect_raybatch.storage.library_errors import ca_file_problem

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)
MOST_ANSWER_BYTES = 64 << 20  # size limit of a response
QUOTED_TEXT = 300  # characters of a server's message that are quoted
ROW_TRIES = 6  # failures of a request, with answers to others between them
ROW_TRIES_ALONE = 12  # tries while the server answers only GET /models
LIMITED_TRIES = 20  # answers of 429 to a request, with answers to others between them
MODEL_LIST_TRIES = 3
SERVER_CONNECT = 10.0  # seconds to connect to a server
MODEL_LIST_SECONDS = 60.0  # seconds for its list of models
CLOSED_LOOK = 1.0  # seconds between looks whether the engine was closed during a call
SERVER_OUTAGE = 600.0  # seconds without any answer after which the attempt ends
FIRST_BACKOFF, MOST_BACKOFF = 0.5, 30.0  # seconds between tries
ENDS_RUN = {401: "check engine.endpoint.key", 402: "check the account's credit"}
OF_PROBE = {
    403: "the key may not use this server; check engine.endpoint.key",
    404: "check engine.endpoint.url",
}
QUOTA = "insufficient_quota"
# What OpenAI and Groq say to a request of more tokens than the account has in a minute.
LIMIT_AND_REQUESTED = re.compile(r"\bLimit:? ([\d,]+)\b.{0,40}?\bRequested:? ([\d,]+)", re.DOTALL)


class SharedLimiter(Protocol):
    """The limiter of the run, in this process or another one; see `limiter.Limiter`."""

    def ask(self, tokens: int) -> tuple[float, int]: ...

    def settle(
        self,
        number: int,
        signal: Signal,
        used: tuple[int, int] | None = None,
        pause: float = 0.0,
        why: str = "",
    ) -> None: ...

    def lower(self, requests: float | None, tokens: float | None) -> None: ...

    def usage(self) -> Usage: ...

    def bill(self, prompt_tokens: int, output_tokens: int) -> None: ...

    def note_batches(self, shard: int, batches: BatchCounts) -> None: ...


@dataclass(frozen=True)
class HostedRequest:
    """One request: its JSON body, the tokens to reserve, and its idempotency key.

    `answered` is called with the answer as soon as it arrives, unless it is an error that the
    server did not bill.
    """

    body: Mapping[str, Any]
    tokens: int
    key: str
    answered: Callable[[HostedAnswer], None]


class EndpointEngine:
    """A client of a hosted model that takes the place of a vLLM engine; one per actor. Thread-safe.

    The constructor raises `EndpointRefused` if the server refuses or does not have the model, and
    `EndpointUnavailable` if it cannot be reached.
    """

    def __init__(self, spec: EndpointSpec, key: str, limiter: SharedLimiter):
        self.spec, self.limiter = spec, limiter
        self._client = _client_of(spec, key)
        self._turn = asyncio.Lock()
        self._closing = False
        self._counts = {"rows": 0, "refused": 0, "waiting": 0}
        self._first_answer = 0.0  # seconds since 1970
        self._answered_at = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="raybatch-endpoint", daemon=True
        )
        self._thread.start()
        try:
            self._do(self._open())
        except BaseException:
            self.close()
            raise

    def ask(self, requests: Sequence[HostedRequest]) -> list[HostedAnswer]:
        """Send the requests, wait for all of them, and return the answers in the same order.

        An error that concerns one row is in its answer. Raises `EndpointRefused` if the server will
        answer no request, `EndpointUnavailable` after a long outage.
        """
        answers: list[HostedAnswer] = self._do(self._all(requests))
        return answers

    def stats(self) -> dict[str, Any]:
        """Return counts of requests, under the names that `SteppedEngine.stats` uses."""
        return {**self._counts, "died": None, "stepped_at": self._first_answer}

    def load(self) -> dict[str, float]:
        """Return the number of requests under way as `running`, for a `load.Sampler`."""
        return {"running": self._counts["waiting"]}

    def close(self) -> None:
        """Close all connections, and end the thread. A second call has no effect."""
        self._closing = True
        if not self._thread.is_alive():
            return
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await self._client.aclose()
        await self._loop.shutdown_default_executor()

    def _do(self, work: Any) -> Any:
        """Return what the coroutine `work` returns; raise `CancelledError` if the engine is closed.

        Another block may close the engine before or during a call.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise CancelledError from None
        while True:
            try:
                return future.result(CLOSED_LOOK)
            except TimeoutError:
                if future.done():  # since the wait ended; or its own error
                    return future.result()
                if self._loop.is_closed():
                    raise CancelledError from None
            except RuntimeError:
                if self._closing:  # the engine's threads have ended already
                    raise CancelledError from None
                raise

    async def _open(self) -> None:
        self._answered_at = self._loop.time()
        await self._probe()

    async def _probe(self) -> None:
        """Ask the server for its list of models; check that the server has this model.

        Raises `EndpointUnavailable` if the server cannot be reached, `EndpointRefused` if it
        refuses or lists only other models.
        """
        import httpx

        for attempt in range(1, MODEL_LIST_TRIES + 1):
            try:
                response = await self._list_models()
                break
            except httpx.InvalidURL as error:
                raise EndpointRefused(f"engine.endpoint.url: {error}. Correct it") from None
            except httpx.HTTPError as error:
                if attempt == MODEL_LIST_TRIES:
                    raise EndpointUnavailable(
                        f"engine.endpoint.url: {self.spec.shown_url} cannot be reached "
                        f"({type(error).__name__}: {error})"
                    ) from None
                await asyncio.sleep(backoff(attempt))
        status = response.status_code
        remedy = {**ENDS_RUN, **OF_PROBE}.get(status)
        if 300 <= status < 400:
            remedy = "the server redirects, which is not followed; write the address that it names"
        if remedy is not None:
            raise EndpointRefused(
                f"engine.endpoint: {self.spec.shown_url}/models answers {status}: {remedy}. The "
                f"server says: {_said(response)}"
            )
        names = _model_names(response)
        if names and self.spec.model not in names:
            shown = ", ".join(sorted(names)[:10])
            raise EndpointRefused(
                f"engine.endpoint.model: the server has no model {self.spec.model!r}; use one of "
                f"{shown}"
            )

    async def _all(self, requests: Sequence[HostedRequest]) -> list[HostedAnswer]:
        tasks = [asyncio.create_task(self._one(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, request: HostedRequest) -> HostedAnswer:
        self._counts["waiting"] += 1
        try:
            answer = await self._answer(request)
        finally:
            self._counts["waiting"] -= 1
        self._counts["rows"] += 1
        self._first_answer = self._first_answer or time.time()
        if answer.error is not None:
            self._counts["refused"] += 1
        if answer.error is None or answer.prompt_tokens:
            request.answered(answer)
        return answer

    async def _answer(self, request: HostedRequest) -> HostedAnswer:
        import httpx

        limit = self.spec.tokens_per_minute
        if limit is not None and request.tokens > limit:
            return _too_long(request.tokens, f"engine.endpoint.tokens_per_minute ({limit:,})")
        failures, first_failure, timeouts = 0, 0.0, 0
        blamed, last_failure = 0, -math.inf
        tries, limited, last_limited = 0, 0, math.inf
        while True:
            number = await self._leave(request.tokens)
            if not number:
                return _too_long(request.tokens, "the server's limit of tokens per minute")
            tries += 1
            try:
                response = await self._post(request)
            except (httpx.HTTPError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
                timeouts += isinstance(error, (TimeoutError, httpx.ReadTimeout))
                await self._tell(number, "failed", None, 0.0, type(error).__name__)
            except BaseException:
                await self._tell(number, "failed")
                raise
            else:
                found = await self._read(number, response)
                if isinstance(found, HostedAnswer):
                    return found
                problem = found
                if response.status_code == 429:  # the limiter waits; this is no try of the row
                    if _never_fits(response.text):
                        return row_error("RequestRefused", f"{problem}. Shorten the row")
                    limited += self._answered_at > last_limited  # others were answered meanwhile
                    last_limited = self._loop.time()
                    if limited >= LIMITED_TRIES:
                        return row_error("RequestRefused", f"{problem} ({tries} tries). Retry it")
                    continue
            first_failure = first_failure or self._loop.time()
            failures += 1
            blamed += self._answered_at > last_failure  # others were answered meanwhile
            last_failure = self._loop.time()
            if await self._is_of_row(failures, blamed, first_failure, timeouts):
                return row_error("ServerError", f"{problem} ({failures} tries). Retry the row")
            self._check_outage(problem, first_failure)
            await asyncio.sleep(backoff(failures))

    async def _post(self, request: HostedRequest) -> httpx.Response:
        """Send a request; raise TimeoutError if it is not answered whole within the timeout.

        httpx limits only each wait for a part of the answer.
        """
        try:
            async with asyncio.timeout(self.spec.timeout):
                return await self._client.post(
                    f"{self.spec.url}/{self.spec.path}",
                    json=request.body,
                    headers={"Idempotency-Key": request.key},
                )
        except TimeoutError:
            raise TimeoutError(f"no whole answer within {self.spec.timeout:g} s") from None

    async def _is_of_row(
        self, failures: int, blamed: int, first_failure: float, timeouts: int
    ) -> bool:
        """Return whether a request fails because of its row.

        True if ROW_TRIES of its `failures` came after answers to others (`blamed`). Otherwise the
        server must at least list its models. Then true in three cases:
        - the request has failed ROW_TRIES_ALONE times;
        - it has failed ROW_TRIES times, others were answered between two of its failures, and none
          for SERVER_OUTAGE seconds since;
        - the first failure was over SERVER_OUTAGE seconds ago (`first_failure`, loop time), two or
          more failures were `timeouts`, and no other request is under way.
        """
        import httpx

        if blamed >= ROW_TRIES:
            return True
        is_alone = self._counts["waiting"] == 1
        is_long = is_alone and timeouts > 1 and self._loop.time() - first_failure > SERVER_OUTAGE
        is_last = blamed > 1 and failures >= ROW_TRIES
        is_last = is_last and self._silence(first_failure) > SERVER_OUTAGE
        if failures < ROW_TRIES_ALONE and not is_long and not is_last:
            return False
        try:
            return (await self._list_models()).is_success
        except httpx.HTTPError:
            return False

    async def _list_models(self) -> httpx.Response:
        most = min(MODEL_LIST_SECONDS, self.spec.timeout)
        return await self._client.get(f"{self.spec.url}/models", timeout=most)

    async def _leave(self, tokens: int) -> int:
        """Wait until the limits allow a request of `tokens`; return its number for `settle`.

        0 if they never allow it.
        """
        async with self._turn:
            while True:
                asked = asyncio.ensure_future(asyncio.to_thread(self.limiter.ask, tokens))
                try:
                    wait, number = await asyncio.shield(asked)
                except asyncio.CancelledError:  # else the request would stay in flight
                    asked.add_done_callback(self._give_back)
                    raise
                if number:
                    return number
                if wait == math.inf:
                    return 0
                await asyncio.sleep(min(wait, 1.0))

    def _give_back(self, asked: asyncio.Future[tuple[float, int]]) -> None:
        if not asked.cancelled() and asked.exception() is None and asked.result()[1]:
            self.limiter.settle(asked.result()[1], "failed")

    async def _tell(self, number: int, signal: Signal, *more: Any) -> None:
        await asyncio.to_thread(self.limiter.settle, number, signal, *more)

    async def _read(self, number: int, response: httpx.Response) -> HostedAnswer | str:
        """Report the response to the limiter; return the answer, or why to send the request again.

        `number` is the request's number at the limiter. The answer may be an error of the row.
        Raises `EndpointRefused` if the server will answer no other request either.
        """
        status, now = response.status_code, datetime.now(UTC)
        pause = pause_of(response.headers, now)
        if any(limits := limits_of(response.headers)):
            await asyncio.to_thread(self.limiter.lower, *limits)
        if status == 200:
            answer = _parsed(response, self.spec.path)
            if isinstance(answer, HostedAnswer):
                self._answered_at = self._loop.time()
                used = (answer.prompt_tokens, answer.output_tokens)
                await self._tell(number, "answered", used, pause or 0.0, "its limit is used up")
                return answer
            await self._tell(number, "failed")
            return answer
        said, again = await self._refusal(number, response, pause)
        if again:
            return said
        return row_error("RequestRefused", f"{said}. Correct the row, or the job's prompt")

    async def _refusal(
        self, number: int, response: httpx.Response, pause: float | None
    ) -> tuple[str, bool]:
        """Report an error response to the limiter; return (message, whether to try again).

        `number` is the request's number at the limiter, `pause` the seconds that the server asks to
        wait. Raises `EndpointRefused` if the server will answer no other request either.
        """
        status = response.status_code
        said = f"the server answers {status}: {_said(response)}"
        if (remedy := remedy_of(status, response.text)) is not None:
            await self._tell(number, "failed")
            raise EndpointRefused(f"engine.endpoint: {said}. Remedy: {remedy}")
        if status == 429:
            await self._tell(number, "limited", None, pause or 1.0, "429")
            return said, True
        again = may_retry(response.headers)
        if (is_passing(status) or again) and again is not False:
            await self._tell(number, "failed", None, pause or 0.0, str(status))
            return said, True
        await self._tell(number, "answered")
        self._answered_at = self._loop.time()
        return said, False

    def _silence(self, since: float) -> float:
        """Return the seconds since the last answer, or since `since` (loop time) if later."""
        return self._loop.time() - max(self._answered_at, since)

    def _check_outage(self, problem: str, since: float = 0.0) -> None:
        """Raise `EndpointUnavailable` after `SERVER_OUTAGE` seconds without an answer.

        The seconds count from the last answer, or from `since` (loop time) if that is later.
        """
        silent = self._silence(since)
        if silent > SERVER_OUTAGE:
            raise EndpointUnavailable(
                f"engine.endpoint: {self.spec.shown_url} has answered nothing for "
                f"{silent / 60:.0f} minutes ({problem})"
            )


def _client_of(spec: EndpointSpec, key: str) -> httpx.AsyncClient:
    """Return the HTTP client; raise `ConfigError` if its file of CA certificates is unusable."""
    import httpx

    if problem := ca_file_problem(("SSL_CERT_FILE", os.environ.get("SSL_CERT_FILE"))):
        raise ConfigError(f"engine.endpoint: {problem}")
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(spec.timeout, connect=min(SERVER_CONNECT, spec.timeout)),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        follow_redirects=False,
    )


def _too_long(tokens: int, limit: str) -> HostedAnswer:
    return row_error(
        "PromptTooLong",
        f"the prompt and sampling.max_tokens of each answer have about {tokens:,} tokens, more "
        f"than {limit}. Shorten the row, or lower sampling.max_tokens or sampling.n",
    )


def _never_fits(text: str) -> bool:
    """Return whether a 429 response says that the request has more tokens than the limit.

    Such a request cannot succeed later, even if it is sent alone. `text` is the response's text.
    """
    found = LIMIT_AND_REQUESTED.search(text)
    return found is not None and _number(found[2]) > _number(found[1])


def _number(text: str) -> int:
    return int(text.replace(",", "") or 0)


def _parsed(response: httpx.Response, path: EndpointPath) -> HostedAnswer | str:
    """Return the answer in a response, or a text that says what is wrong with it."""
    if len(response.content) > MOST_ANSWER_BYTES:
        return f"the answer has over {MOST_ANSWER_BYTES >> 20} MiB"
    try:
        return answer_of(response.json(), path)
    except NOT_AS_AGREED:
        return f"the answer is no JSON of /{path}: {_said(response)}"


def remedy_of(status: int, text: str) -> str | None:
    """Return the advice for a response that ends the run; None for any other response."""
    if status == 429 and QUOTA in text:
        return "the account's quota is used up; raise it"
    return ENDS_RUN.get(status)


def is_passing(status: int) -> bool:
    """Return whether a request that failed with this HTTP status may succeed if sent again."""
    return status in (408, 409, 425) or status >= 500


def _said(response: httpx.Response) -> str:
    """Return the error message in a response, short and on one line."""
    try:
        error = response.json()["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except NOT_AS_AGREED:
        text = response.text
    return " ".join(text.split())[:QUOTED_TEXT] or "no text"


def _model_names(response: httpx.Response) -> set[str]:
    """Return the names of the server's models; empty if it does not list them."""
    try:
        return {str(one["id"]) for one in json.loads(response.content)["data"]}
    except NOT_AS_AGREED:
        return set()


def backoff(attempt: int) -> float:
    """Return seconds to wait before the next try, after `attempt` failures, with jitter."""
    wait = min(MOST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(attempt, 10))
    return wait * random.uniform(0.5, 1.0)
