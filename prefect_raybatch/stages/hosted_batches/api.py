"""Calls a server's batch API within the run's rate limits; retries calls while that is safe."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from prefect_raybatch.bounded import Returned
from prefect_raybatch.errors import EndpointRefused
from prefect_raybatch.spec.endpoint import EndpointSpec
from prefect_raybatch.stages.endpoint.answers import NOT_AS_AGREED
from prefect_raybatch.stages.endpoint.client import EndpointEngine, backoff
from prefect_raybatch.stages.endpoint.headers import limits_of, pause_of
from prefect_raybatch.stages.endpoint.limiter import BatchCounts, Limiter
from prefect_raybatch.stages.hosted_batches.lines import batch_url, error_parts

if TYPE_CHECKING:
    import httpx

COMPLETION_WINDOW = "24h"  # the only completion window that all servers know
PAGE = 100  # batches per page of the server's list
MOST_PAGES = 20  # pages, newest batches first, that are searched for a file's batches
FILES_PAGE = 10_000
ENDED_STATUSES = ("completed", "failed", "expired", "cancelled")
NO_BATCH_API = (404, 405, 501)
NOT_FOUND_STATUSES = (404, 410)


class AnswerLost(Exception):
    """A call got no usable response, so it may or may not have had its effect."""


class CallRefused(Exception):
    """The server refuses a call, and a retry would not help. `status` is the HTTP status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Batch:
    """A batch as the server describes it.

    `done` counts its completed and failed requests; `errors` are (code, message, line number in the
    input file from 1, or None if unknown).
    """

    id: str
    status: str
    input_file_id: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    done: int = 0
    errors: tuple[tuple[str, str, int | None], ...] = ()

    @classmethod
    def of(cls, value: Any) -> Batch:
        """Parse a batch object of the API; raise ValueError if it is malformed."""
        if not isinstance(value, dict):
            raise ValueError("the answer is no batch object")
        for name in ("id", "status", "input_file_id"):
            if not isinstance(value.get(name), str):
                raise ValueError(f"the answer is no batch object with a text as {name}")
        counts = value.get("request_counts")
        counts = counts if isinstance(counts, dict) else {}
        listed = value.get("errors")
        listed = listed.get("data") if isinstance(listed, dict) else None
        errors = []
        for error in listed if isinstance(listed, list) else ():
            line = error.get("line") if isinstance(error, dict) else None
            errors.append((*error_parts(error), line if isinstance(line, int) else None))
        return cls(
            value["id"],
            value["status"],
            value["input_file_id"],
            output_file_id=_text(value.get("output_file_id")),
            error_file_id=_text(value.get("error_file_id")),
            done=sum(_count(counts.get(name)) for name in ("completed", "failed")),
            errors=tuple(errors),
        )

    @property
    def ended(self) -> bool:
        return self.status in ENDED_STATUSES


class BatchApi(Protocol):
    """The operations on a server that `ShardBatches` needs.

    Each may wait for minutes, and may raise `EndpointRefused` or `EndpointUnavailable`.
    """

    def upload(self, name: str, data: bytes) -> str:
        """Store an input file; return its id."""
        ...

    def create(self, file_id: str, key: str) -> Batch:
        """Create a batch of an input file; `key` is the idempotency key.

        Raises `AnswerLost` if it is unknown whether the batch was created, and `CallRefused` if the
        server refuses to create it.
        """
        ...

    def get(self, batch_id: str) -> Batch | None:
        """Return the batch with this id; None if the server does not have it."""
        ...

    def find(self, file_id: str) -> list[Batch]:
        """Return the batches made from a file, according to the server's list of batches.

        A new batch may be missing, because the list may lag.
        """
        ...

    def cancel(self, batch_id: str) -> None: ...

    def download(self, file_id: str) -> bytes | None:
        """Return a file's content; None if it is gone."""
        ...

    def has_file(self, file_id: str) -> bool: ...

    def delete(self, file_id: str) -> None: ...

    def pause(self, seconds: float) -> None: ...

    def note_batches(self, shard: int, batches: BatchCounts) -> None: ...

    def bill(self, prompt_tokens: int, output_tokens: int) -> None: ...


class BatchEngine(EndpointEngine):
    """A client of a server's batch API (`BatchApi`), in place of the usual `EndpointEngine`."""

    def upload(self, name: str, data: bytes) -> str:
        # A file whose upload is repeated is stored twice, which costs nothing.
        given: dict[str, Any] = {"files": {"file": (name, data)}, "data": {"purpose": "batch"}}
        return str(self._call("POST", "/files", _id, **given))

    def create(self, file_id: str, key: str) -> Batch:
        body = {
            "input_file_id": file_id,
            "endpoint": batch_url(self.spec.path),
            "completion_window": COMPLETION_WINDOW,
        }
        given = {"json": body, "headers": {"Idempotency-Key": key}}
        found: Batch = self._do(self._called("POST", "/batches", _batch, repeat=False, **given))
        return found

    def get(self, batch_id: str) -> Batch | None:
        return self._call("GET", f"/batches/{_in_path(batch_id)}", _batch, accepted=(404,))

    def find(self, file_id: str) -> list[Batch]:
        found: list[Batch] = []
        after = ""
        for _ in range(MOST_PAGES):
            params = {"limit": str(PAGE), **({"after": after} if after else {})}
            page = self._call("GET", "/batches", _page, params=params)
            batches, more = page or ([], False)
            found += [batch for batch in batches if batch.input_file_id == file_id]
            if not batches or not more:
                break
            after = batches[-1].id
        return found

    def cancel(self, batch_id: str) -> None:
        # 400 and 409: the batch has ended meanwhile.
        self._call(
            "POST", f"/batches/{_in_path(batch_id)}/cancel", _anything, accepted=(400, 404, 409)
        )

    def download(self, file_id: str) -> bytes | None:
        return self._call(
            "GET", f"/files/{_in_path(file_id)}/content", _content, accepted=NOT_FOUND_STATUSES
        )

    def has_file(self, file_id: str) -> bool:
        return (
            self._call("GET", f"/files/{_in_path(file_id)}", _id, accepted=NOT_FOUND_STATUSES)
            is not None
        )

    def delete(self, file_id: str) -> None:
        self._call(
            "DELETE", f"/files/{_in_path(file_id)}", _anything, accepted=(400, *NOT_FOUND_STATUSES)
        )

    def files(self) -> list[tuple[str, str]]:
        """Return the (id, name) of each input file at the server."""
        params = {"purpose": "batch", "limit": str(FILES_PAGE)}
        return self._call("GET", "/files", _names, params=params) or []

    def pause(self, seconds: float) -> None:
        self._do(asyncio.sleep(seconds))

    def note_batches(self, shard: int, batches: BatchCounts) -> None:
        self.limiter.note_batches(shard, batches)

    def bill(self, prompt_tokens: int, output_tokens: int) -> None:
        self.limiter.bill(prompt_tokens, output_tokens)

    async def _probe(self) -> None:
        """Check the model as `EndpointEngine` does, and that the server has a batch API.

        Raises `EndpointRefused` if it has none.
        """
        await super()._probe()
        try:
            await self._called("GET", "/batches", _page, params={"limit": "1"})
        except CallRefused as error:
            if error.status not in NO_BATCH_API:
                raise _refused(error) from None
            raise EndpointRefused(
                f"engine.endpoint.batch: {self.spec.shown_url} has no batch API "
                f"({self.spec.shown_url}/batches answers {error.status}). Remove batch to send "
                "single requests"
            ) from None

    def _call(
        self,
        method: str,
        path: str,
        read: Callable[[httpx.Response], Returned],
        accepted: tuple[int, ...] = (),
        **given: Any,
    ) -> Returned | None:
        """Send an HTTP request with retries; return `read(response)`.

        `given` are arguments of httpx. None if the server refuses with a status in `accepted`;
        another refusal raises `EndpointRefused`.
        """
        try:
            found: Returned = self._do(self._called(method, path, read, **given))
        except CallRefused as error:
            if error.status not in accepted:
                raise _refused(error) from None
            return None
        return found

    async def _called(
        self,
        method: str,
        path: str,
        read: Callable[[httpx.Response], Returned],
        repeat: bool = True,
        **given: Any,
    ) -> Returned:
        """Send an HTTP request with retries; return `read(response)`.

        `given` are arguments of httpx. With `repeat`, the request is sent again after any transient
        failure. Without it, `AnswerLost` is raised if the request failed but may have had its
        effect. Raises `CallRefused` for other errors of the server, `EndpointRefused` if it will
        answer no other request either, and `EndpointUnavailable` after a long outage.
        """
        failures, first = 0, 0.0
        while True:
            try:
                return await self._once(method, path, read, **given)
            except _Limited:  # the server did nothing, and the limiter delays the next try
                continue
            except _Unsent as error:
                problem = str(error)
            except AnswerLost as error:
                if not repeat:
                    raise
                problem = str(error)
            failures, first = failures + 1, first or self._loop.time()
            self._check_outage(problem, first)
            await asyncio.sleep(backoff(failures))

    async def _once(
        self, method: str, path: str, read: Callable[[httpx.Response], Returned], **given: Any
    ) -> Returned:
        """Send an HTTP request once, as soon as the limits allow it; return `read(response)`.

        `given` are arguments of httpx. Raises `_Limited`, `_Unsent`, `AnswerLost` and `CallRefused`
        (see these classes), and `EndpointRefused` if the server will answer no other request
        either.
        """
        import httpx

        number = await self._leave(0)
        try:
            response = await self._client.request(method, f"{self.spec.url}{path}", **given)
        except BaseException as error:
            await self._tell(number, "failed")
            if not isinstance(error, httpx.HTTPError):
                raise
            unsent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            problem = f"{type(error).__name__}: {error}"
            raise _Unsent(problem) if unsent else AnswerLost(problem) from None
        pause = pause_of(response.headers, datetime.now(UTC))
        if any(limits := limits_of(response.headers)):
            await asyncio.to_thread(self.limiter.lower, *limits)
        if not response.is_success:
            problem, again = await self._refusal(number, response, pause)
            if not again:
                raise CallRefused(response.status_code, problem)
            raise _Limited if response.status_code == 429 else AnswerLost(problem)
        try:
            found = read(response)
        except NOT_AS_AGREED as error:
            await self._tell(number, "failed")
            raise AnswerLost(
                f"the answer is not as the batch API has it ({type(error).__name__}: {error})"
            ) from None
        await self._tell(number, "answered", None, pause or 0.0, "its limit is used up")
        self._answered_at = self._loop.time()
        return found


def check_hosted_model(spec: EndpointSpec) -> None:
    """Check that the server has the model, and the batch API if the job uses it.

    Raises `EndpointRefused` if the server lacks one of them or refuses access,
    `EndpointUnavailable` if it cannot be reached, and `ConfigError` if the environment variable
    with the API key is not set.
    """
    engine = BatchEngine if spec.batch else EndpointEngine
    engine(spec, spec.api_key(), Limiter(None, None, 1, spec.timeout)).close()


class _Limited(Exception):
    """The server answered 429: it did nothing, and the limiter delays the next try."""


class _Unsent(Exception):
    """A call did not reach the server."""


def _refused(error: CallRefused) -> EndpointRefused:
    return EndpointRefused(f"engine.endpoint.batch: {error}")


def _in_path(name: str) -> str:
    """Quote an id of a batch or file as one segment of a URL path."""
    return quote(name, safe="")


def _id(response: httpx.Response) -> str:
    return str(response.json()["id"])


def _batch(response: httpx.Response) -> Batch:
    return Batch.of(response.json())


def _page(response: httpx.Response) -> tuple[list[Batch], bool]:
    value = response.json()
    return [Batch.of(one) for one in value["data"]], bool(value.get("has_more"))


def _names(response: httpx.Response) -> list[tuple[str, str]]:
    return [(str(one["id"]), str(one.get("filename"))) for one in response.json()["data"]]


def _content(response: httpx.Response) -> bytes:
    return response.content


def _anything(response: httpx.Response) -> None:
    return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0
