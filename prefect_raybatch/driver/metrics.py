"""Prometheus metrics of a driver, at an HTTP endpoint that RAYBATCH_METRICS_PORT switches on.

The endpoint belongs to the process and serves all its runs, each with its own labels. It lives
until the process ends. After a complete run the process waits for one more scrape, so that the last
scrape shows the end of the run.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

from prefect_raybatch.driver.heartbeat import Heartbeat, alive
from prefect_raybatch.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger(__name__)

METRICS_PORT, METRICS_HOST = "RAYBATCH_METRICS_PORT", "RAYBATCH_METRICS_HOST"
METRIC_LABELS = ("job_name", "run_key")  # Prometheus itself calls the scrape job "job"
LAST_SCRAPE_SECONDS = 75.0  # wait for the scrape after a run's end; Prometheus's default is 60
NONE = float("nan")  # an unknown value, by Prometheus's convention

# name -> (help, value); those that only grow are counters, whose samples end in _total.
COUNTERS: dict[str, tuple[str, Callable[[Heartbeat], float]]] = {
    "raybatch_rows": ("Rows committed, over all attempts.", lambda b: b.done),
    "raybatch_failed_rows": ("Rows in quarantine, over all attempts.", lambda b: b.failed),
    "raybatch_skipped_rows": ("Rows that postprocess left out.", lambda b: b.skipped),
    "raybatch_shards": ("Shards committed, over all attempts.", lambda b: b.committed),
    "raybatch_engine_deaths": ("Engine deaths in this attempt.", lambda b: b.engine_deaths),
    "raybatch_passes": ("Passes started in this attempt.", lambda b: b.passes),
    "raybatch_gpu_seconds": (
        "GPU-seconds held by this attempt's engines.",
        lambda b: b.gpu_seconds,
    ),
}
GAUGES: dict[str, tuple[str, Callable[[Heartbeat], float]]] = {
    "raybatch_planned_rows": ("Rows of the plan.", lambda b: b.rows),
    "raybatch_planned_shards": ("Shards of the plan.", lambda b: b.shards),
    "raybatch_rows_per_second": (
        "Output rows per second over the latest commits.",
        lambda b: b.rate,
    ),
    "raybatch_prompt_tokens_per_second": (
        "Prompt tokens per second over the latest commits.",
        lambda b: b.prompt_tokens_rate,
    ),
    "raybatch_output_tokens_per_second": (
        "Generated tokens per second over the latest commits.",
        lambda b: b.output_tokens_rate,
    ),
    "raybatch_seconds_left": (
        "Estimated time to completion in seconds; NaN while unknown.",
        lambda b: NONE if b.seconds_left is None else b.seconds_left,
    ),
    "raybatch_last_commit_timestamp_seconds": (
        "Time of this attempt's last commit, in seconds since 1970; NaN before it.",
        lambda b: NONE if b.last_commit is None else b.last_commit,
    ),
    "raybatch_cost": (
        "Cost of all attempts in the currency of the job's prices; NaN without a price.",
        lambda b: NONE if b.cost_run is None else b.cost_run,
    ),
    "raybatch_engines_alive": (
        "Engine actors that Ray reports as alive.",
        lambda b: alive(b.engines),
    ),
    "raybatch_stalled": (
        "1 while the run is stalled: no commit within the stall limit.",
        lambda b: float(b.alarms > 0),
    ),
}


COMPLETED_METRIC = "raybatch_completed"


@dataclass
class Served:
    """A run whose metrics the endpoint serves; each scrape calls `state` for its heartbeat."""

    state: Callable[[], Heartbeat]
    is_completed: bool = False  # it has _SUCCESS
    is_end_scraped: bool = False


class Endpoint:
    """The HTTP server of a process, and its Prometheus collector."""

    def __init__(self, host: str, port: int):
        from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

        self._runs: dict[tuple[str, str], Served] = {}  # by the values of METRIC_LABELS
        self._scraped = threading.Condition()
        self._is_scraped = False
        registry = CollectorRegistry()
        registry.register(self)
        self._server, _ = start_http_server(port, host, registry)
        self._server.set_app(self._noting_answers(make_wsgi_app(registry)))
        atexit.register(self.wait_for_last_scrape)

    def begin(self, job: str, run_key: str, state: Callable[[], Heartbeat]) -> None:
        with self._scraped:
            self._runs[job, run_key] = Served(state)

    def freeze(self, job: str, run_key: str) -> None:
        """Keep serving the run's present values, because its monitor is closing."""
        with self._scraped:
            served = self._runs[job, run_key]
            beat = served.state()
            served.state = lambda: beat

    def complete(self, job: str, run_key: str) -> None:
        with self._scraped:
            if served := self._runs.get((job, run_key)):
                served.is_completed = True

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._scraped:
            seen = [(labels, run.state(), run.is_completed) for labels, run in self._runs.items()]
        for table, family in ((COUNTERS, CounterMetricFamily), (GAUGES, GaugeMetricFamily)):
            for name, (text, value) in table.items():
                metric = family(name, text, labels=METRIC_LABELS)
                for labels, beat, _ in seen:
                    metric.add_metric(labels, value(beat))
                yield metric
        completed = GaugeMetricFamily(
            COMPLETED_METRIC, "1 once the result is proved complete.", labels=METRIC_LABELS
        )
        for labels, _, is_completed in seen:
            completed.add_metric(labels, float(is_completed))
        yield completed

    def _noting_answers(self, app: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the WSGI application to mark each completed run that a response has shown.

        The runs are marked after the response was sent, because the process may end as soon as they
        are marked.
        """

        def wrapped(environ: Any, start_response: Any) -> Iterator[bytes]:
            with self._scraped:
                completed = [run for run in self._runs.values() if run.is_completed]
            yield from app(environ, start_response)
            with self._scraped:
                self._is_scraped = True
                for run in completed:
                    run.is_end_scraped = True
                self._scraped.notify_all()

        return wrapped

    def wait_for_last_scrape(self) -> None:
        """Wait until a scrape has shown each completed run, at most LAST_SCRAPE_SECONDS.

        Returns at once if the endpoint was never scraped.
        """

        def all_seen() -> bool:
            return all(run.is_end_scraped for run in self._runs.values() if run.is_completed)

        # Since Python 3.12 no thread starts while the interpreter ends, so the listening thread
        # handles requests itself.
        answers = partial(TCPServer.process_request, self._server)
        self._server.process_request = answers  # type: ignore[method-assign]
        with self._scraped:
            if self._is_scraped:
                self._scraped.wait_for(all_seen, LAST_SCRAPE_SECONDS)


_endpoints: dict[tuple[str, int], Endpoint] = {}


def port() -> int | None:
    """Return the port in RAYBATCH_METRICS_PORT; None if it is unset, empty or 0.

    Raises `ConfigError` if it is not a port.
    """
    text = os.environ.get(METRICS_PORT, "").strip()
    if not text.isdigit() and text:
        raise ConfigError(f"{METRICS_PORT}={text!r} must be a port. Write a number such as 9500")
    number = int(text or 0)
    if number > 65535:
        raise ConfigError(f"{METRICS_PORT}={text!r} must be a port, at most 65535")
    return number or None


@contextmanager
def serving(job: str, run_key: str, state: Callable[[], Heartbeat]) -> Iterator[None]:
    """Serve a run's metrics at http://HOST:PORT/metrics, if RAYBATCH_METRICS_PORT is set.

    Each scrape during the block calls `state`. The last values stay at the endpoint until the
    process ends. If the port cannot be opened, the block runs without metrics, after a warning.
    Raises `ConfigError` for an invalid port.
    """
    number = port()
    if number is None:
        yield
        return
    host = os.environ.get(METRICS_HOST, "").strip() or "127.0.0.1"
    try:
        endpoint = _endpoints.get((host, number)) or Endpoint(host, number)
    except OSError as error:
        log.warning("%s: metrics cannot be served at %s:%d: %s", METRICS_PORT, host, number, error)
        yield
        return
    _endpoints[host, number] = endpoint
    endpoint.begin(job, run_key, state)
    try:
        yield
    finally:
        endpoint.freeze(job, run_key)


def completed(job: str, run_key: str) -> None:
    """Show a run as completed at this process's endpoint, if it was served there."""
    for endpoint in _endpoints.values():
        endpoint.complete(job, run_key)
