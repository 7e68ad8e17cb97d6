"""Prometheus metrics of a driver, at an HTTP endpoint where the environment asks for one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prefect_raybatch.driver.heartbeat import Beat, alive
from prefect_raybatch.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger(__name__)

METRICS_PORT, METRICS_HOST = "RAYBATCH_METRICS_PORT", "RAYBATCH_METRICS_HOST"
METRIC_LABELS = ("job_name", "run_key")  # Prometheus itself calls the scrape job "job"
NONE = float("nan")  # Prometheus' word for a value that is not known

# name -> (help, value); those that only grow are counters, whose samples end in _total.
COUNTERS: dict[str, tuple[str, Callable[[Beat], float]]] = {
    "raybatch_rows": ("Rows committed, over all attempts.", lambda b: b.done),
    "raybatch_failed_rows": ("Rows in quarantine, over all attempts.", lambda b: b.failed),
    "raybatch_skipped_rows": ("Rows that postprocess left out.", lambda b: b.skipped),
    "raybatch_shards": ("Shards committed, over all attempts.", lambda b: b.committed),
    "raybatch_engine_deaths": ("Engine deaths in this attempt.", lambda b: b.engine_deaths),
    "raybatch_passes": ("Passes of this attempt.", lambda b: b.passes),
    "raybatch_gpu_seconds": ("That this attempt's engines held GPUs.", lambda b: b.gpu_seconds),
}
GAUGES: dict[str, tuple[str, Callable[[Beat], float]]] = {
    "raybatch_planned_rows": ("Rows of the plan.", lambda b: b.rows),
    "raybatch_planned_shards": ("Shards of the plan.", lambda b: b.shards),
    "raybatch_rows_per_second": ("Over the latest commits.", lambda b: b.rate),
    "raybatch_prompt_tokens_per_second": ("Tokens in.", lambda b: b.prompt_tokens_rate),
    "raybatch_output_tokens_per_second": ("Tokens out.", lambda b: b.output_tokens_rate),
    "raybatch_seconds_left": (
        "At the present rate; NaN while unknown.",
        lambda b: NONE if b.seconds_left is None else b.seconds_left,
    ),
    "raybatch_last_commit_timestamp_seconds": (
        "Of this attempt, since 1970; NaN before the first.",
        lambda b: NONE if b.last_commit is None else b.last_commit,
    ),
    "raybatch_cost": (
        "Of all attempts, in the currency of the job's prices; NaN without a price.",
        lambda b: NONE if b.cost_run is None else b.cost_run,
    ),
    "raybatch_engines_alive": (
        "Engine actors that Ray holds for alive.",
        lambda b: alive(b.engines),
    ),
    "raybatch_stalled": ("1 while no commit comes for too long.", lambda b: float(b.alarms > 0)),
}


class Exporter:
    """A Prometheus collector that asks for the state when it is scraped."""

    def __init__(self, job: str, run_key: str, state: Callable[[], Beat]):
        self.values, self.state = [job, run_key], state

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        beat = self.state()
        for table, family in ((COUNTERS, CounterMetricFamily), (GAUGES, GaugeMetricFamily)):
            for name, (text, value) in table.items():
                metric = family(name, text, labels=METRIC_LABELS)
                metric.add_metric(self.values, value(beat))
                yield metric


def port() -> int | None:
    """The port of RAYBATCH_METRICS_PORT, None when it is unset, empty or 0."""
    text = os.environ.get(METRICS_PORT, "").strip()
    if not text.isdigit() and text:
        raise ConfigError(f"{METRICS_PORT}={text!r} is no port; write a number such as 9500")
    number = int(text or 0)
    if number > 65535:
        raise ConfigError(f"{METRICS_PORT}={text!r} is no port; the highest is 65535")
    return number or None


@contextmanager
def serving(job: str, run_key: str, state: Callable[[], Beat]) -> Iterator[None]:
    """Serves http://HOST:PORT/metrics for the block if a port is set. A port that is taken, by
    another run for example, is a warning: metrics are not worth a run."""
    number = port()
    if number is None:
        yield
        return
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(Exporter(job, run_key, state))
    host = os.environ.get(METRICS_HOST, "0.0.0.0")
    try:
        server, thread = start_http_server(number, host, registry)
    except OSError as error:
        log.warning("%s: no metrics at %s:%d: %s", METRICS_PORT, host, number, error)
        yield
        return
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
