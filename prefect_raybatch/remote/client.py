"""A client of Ray's job server with retries, so that a restarting head does not fail a job.

A thin wrapper of `ray.job_submission.JobSubmissionClient`. It differs from Ray's client in four
ways:

- Each request has a timeout.
- A redirect is an error. Ray's client would send its headers to the other host.
- The given address is used. In Ray's client, RAY_ADDRESS overrides it.
- A job that does not exist is told apart from other failures. Ray's client raises the same
  RuntimeError for both.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from prefect_raybatch.cluster.tokens import check_token_file, token_missing, token_wrong
from prefect_raybatch.errors import ConfigError, JobServerUnavailable
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.runs.backfill import interruptible_sleep
from prefect_raybatch.storage.library_errors import ca_file_problem, certificate_problem
from prefect_raybatch.storage.redirects import redirect_problem

log = logging.getLogger(__name__)

PATIENCE = 300.0  # seconds of retries before an error is raised
REQUEST = 30.0  # timeout of one request, in seconds
HEAD_OUTAGE_SECONDS = 15.0  # seconds of retries before a warning
LONGEST_RETRY_PAUSE = 15.0
LIVE = frozenset(("PENDING", "RUNNING"))
_UNKNOWN = re.compile(r"status code 404: Job .* does not exist", re.DOTALL)
_REFUSED = re.compile(r"status code 400\b")
_ENV = "RAY_API_SERVER_ADDRESS"
HEADERS_ENV = "RAY_JOB_HEADERS"
_env_lock = Lock()
Reply = TypeVar("Reply")


@dataclass(frozen=True)
class RayJob:
    """A job as the server describes it.

    `ended` is in seconds since the epoch, None while the job is alive.
    """

    id: str
    status: str
    message: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    ended: float | None = None

    @property
    def live(self) -> bool:
        return self.status in LIVE


class JobServer:
    """A client of Ray's job server at `url`.

    Methods retry for up to `patience` seconds, then raise `JobServerUnavailable`. They raise
    `ConfigError` if the server rejects the request or its token, or if its certificate is not
    valid. `access` has the headers and the token; `connect` and `sleep` are for tests.
    """

    def __init__(
        self,
        url: str,
        patience: float = PATIENCE,
        connect: Callable[[str], Any] | None = None,
        sleep: Callable[[float], None] = interruptible_sleep,
        access: ClusterAccess | None = None,
    ):
        self.url, self.patience = url, patience
        self.access = access or ClusterAccess(job_server=url)
        self._connect = connect or partial(connect_client, headers=self.access.headers)
        self._sleep = sleep
        self._made: Any = None

    def find(self, id: str) -> RayJob | None:
        """Return the job, or None if the server has no such job."""
        return self._patiently(lambda: self._find(id))

    def jobs(self) -> list[RayJob]:
        """Return all submitted jobs that the server has, including ended ones."""
        jobs = self._patiently(lambda: self._client().list_jobs())
        return [_job(details) for details in jobs if details.submission_id]

    def submit(
        self, id: str, command: str, metadata: Mapping[str, str], env: Mapping[str, str]
    ) -> None:
        """Submit a job that runs `command`, unless the server already has a job with this id.

        `metadata` is stored with the job, `env` are its environment variables. Ray accepts an id
        only once: of several submitters, one starts the job and the others find it.
        """

        def once() -> None:
            try:
                self._client().submit_job(
                    entrypoint=command,
                    submission_id=id,
                    metadata=dict(metadata),
                    runtime_env={"env_vars": dict(env)} if env else None,
                )
            except Exception as error:  # the job may exist: by another submitter, or a lost answer
                if self._find(id) is not None:
                    return
                if _REFUSED.search(str(error)):
                    raise ConfigError(f"{self.url} rejects the job: {_brief(error)}") from None
                raise

        self._patiently(once)

    def stop(self, id: str, wait: float = 0.0) -> bool:
        """Ask the job to stop, and wait up to `wait` seconds for its end.

        Returns True if the job has ended, or if the server does not know it.
        """
        deadline = time.monotonic() + wait

        def once() -> None:
            if self._find(id) is not None:
                self._client().stop_job(id)

        self._patiently(once, min(self.patience, wait) if wait else None)
        while True:
            left = deadline - time.monotonic()
            found = self._patiently(lambda: self._find(id), max(left, 1.0))
            if found is None or not found.live:
                return True
            if left <= 0:
                return False
            self._sleep(0.5)

    def logs(self, id: str) -> str | None:
        """Return the output of the job so far, without retries; None if it is not available."""
        try:
            return str(self._client().get_job_logs(id))
        except Exception as error:  # the job is still followed, by its status
            log.debug("no logs of %s: %s", id, _brief(error))
            return None

    def _token_error(self, message: str) -> str:
        """Return the text of the error for a missing or a wrong token; `message` is Ray's error."""
        wrong = message.startswith("Authentication failed")  # Ray's text for 403
        problem = token_wrong if wrong else token_missing
        return str(problem(f"cluster.job_server: {self.url}", self.access))

    def _find(self, id: str) -> RayJob | None:
        try:
            return _job(self._client().get_job_info(id))
        except RuntimeError as error:
            # A proxy without a backend answers 404 as well, so match Ray's text.
            if _UNKNOWN.search(str(error)):
                return None
            raise

    def _client(self) -> Any:
        if self._made is None:
            self._made = self._connect(self.url)
        return self._made

    def _patiently(self, ask: Callable[[], Reply], patience: float | None = None) -> Reply:
        began, pause, away = time.monotonic(), 0.5, False
        deadline = began + (self.patience if patience is None else patience)
        while True:
            try:
                reply = ask()
            except ConfigError:
                raise
            except Exception as error:
                if type(error).__name__ == "AuthenticationError":
                    raise ConfigError(self._token_error(str(error))) from None
                if problem := certificate_problem(error):
                    raise ConfigError(
                        f"cluster.job_server: the TLS certificate of {self.url} is not valid: "
                        f"{problem}. Set REQUESTS_CA_BUNDLE to the file of the certificate "
                        "authority that signed it, or renew it"
                    ) from None
                names = "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"
                around = [(name, os.environ.get(name)) for name in names]
                if self.url.startswith("https://") and (problem := ca_file_problem(*around)):
                    raise ConfigError(f"cluster.job_server: {self.url}: {problem}") from None
                now = time.monotonic()
                if now + pause > deadline:
                    raise JobServerUnavailable(
                        f"Ray's job server at {self.url} is unavailable: {_brief(error)}. A "
                        "running job continues; start the same run again to follow it"
                    ) from None
                if not away:
                    away = self._missed(now - began, deadline - now, error)
                self._sleep(pause)
                pause = min(2 * pause, LONGEST_RETRY_PAUSE)
            else:
                if away:
                    silent = time.monotonic() - began
                    log.warning(
                        "Ray's job server at %s answers again after %.0f s", self.url, silent
                    )
                return reply

    def _missed(self, silent: float, left: float, error: Exception) -> bool:
        """Log a request that failed; return whether it was logged as a warning.

        It is logged as a warning once the server has not answered for 15 s. `silent` is the time
        without an answer, `left` the time for which requests are still retried, both in seconds.
        """
        if silent < HEAD_OUTAGE_SECONDS:
            log.info(
                "Ray's job server at %s does not answer (%s); retrying", self.url, _brief(error)
            )
            return False
        log.warning(
            "Ray's job server at %s has not answered for %.0f s (%s); retrying for another %.0f s. "
            "Check that the head is up and that cluster.job_server is its address:\n"
            "  raybatch doctor JOB.yaml\n"
            "Committed shards are kept. If the head comes back at this address, the run continues",
            *(self.url, silent, _brief(error), left),
        )
        return True


def connect_client(url: str, headers: Mapping[str, str] | None = None) -> Any:
    """Return Ray's client for the server at `url`.

    `headers` are added to those in RAY_JOB_HEADERS, and override them.
    """
    from ray.job_submission import JobSubmissionClient

    check_token_file()

    class Client(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **kwargs: Any) -> Any:
            kwargs = {"timeout": REQUEST, "allow_redirects": False, **kwargs}
            answer = super()._do_request(method, endpoint, **kwargs)
            if 300 <= answer.status_code < 400:
                location = answer.headers.get("Location")
                raise ConfigError(f"cluster.job_server: {redirect_problem(url, location)}")
            return answer

    with _env_lock:  # RAY_ADDRESS overrides the argument, and this variable overrides RAY_ADDRESS
        before = os.environ.get(_ENV)
        os.environ[_ENV] = url
        try:
            return Client(url, headers={**(_headers() or {}), **(headers or {})} or None)
        finally:
            os.environ.pop(_ENV)
            if before is not None:
                os.environ[_ENV] = before


def _headers() -> dict[str, str] | None:
    """Return the HTTP headers in RAY_JOB_HEADERS, which Ray's CLI reads too; None if it is unset.

    Raises `ConfigError` if the variable is not a JSON object of strings.
    """
    text = os.environ.get(HEADERS_ENV)
    if not text:
        return None
    with suppress(ValueError):
        headers = json.loads(text)
        if isinstance(headers, dict) and all(isinstance(v, str) for v in headers.values()):
            return headers
    raise ConfigError(
        f'{HEADERS_ENV} must be a JSON object of strings, such as {{"Authorization": "Bearer ..."}}'
    )


def _job(details: Any) -> RayJob:
    return RayJob(
        str(details.submission_id),
        str(details.status),
        str(details.message or ""),
        dict(details.metadata or {}),
        details.end_time / 1000 if details.end_time else None,
    )


def _brief(error: BaseException) -> str:
    """Return, in one line, the message of an error or of the network error that caused it.

    A long message is cut to its last 300 characters.
    """
    first: BaseException | None = error
    while first is not None:
        if isinstance(first, (ConnectionError, TimeoutError, socket.gaierror)) and first.strerror:
            return first.strerror
        first = first.__cause__ or first.__context__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"... {text[-300:]}"
