"""Prometheus metrics over HTTP, and the dashboard that shows them."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from helpers.heard import Heard, counts
from helpers.small import small_run
from prometheus_client.parser import text_string_to_metric_families

from prefect_raybatch.driver import metrics
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import Heartbeat
from prefect_raybatch.driver.metrics import COUNTERS, GAUGES, METRIC_LABELS
from prefect_raybatch.driver.monitor import ASK_ENGINES, Monitor
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.limits import Limits

ROOT = Path(__file__).parents[2]
EXPORTED = {f"{name}_total" for name in COUNTERS} | set(GAUGES) | {metrics.COMPLETED_METRIC}


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    monkeypatch.setenv(metrics.METRICS_PORT, str(number))
    monkeypatch.setenv(metrics.METRICS_HOST, "127.0.0.1")
    return number


def scraped_text(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        return answer.read().decode()


def scrape(port: int) -> dict[str, tuple[float, dict[str, str]]]:
    text = scraped_text(port)
    return {
        sample.name: (sample.value, sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_driver_serves_every_metric_while_it_works(tmp_path, port):
    run = small_run(tmp_path)
    now = [0.0]
    engines = {"ALIVE": 2}
    made = Monitor("me", run.plan, run.store, Limits(), Heard(), lambda: engines, lambda: now[0])
    made(Progress(20, 4))
    with made:
        made.counts = counts(rows=20, shards=4, done=15, failed=2, skipped=1, committed=3)
        now[0] = ASK_ENGINES
        made.look()
        found = scrape(port)
    assert set(found) == EXPORTED
    assert all(labels == {"job_name": "nightly", "run_key": "key"} for _, labels in found.values())
    values = {name: value for name, (value, _) in found.items()}
    assert values["raybatch_rows_total"] == 15 and values["raybatch_planned_rows"] == 20
    assert values["raybatch_failed_rows_total"] == 2 and values["raybatch_skipped_rows_total"] == 1
    assert values["raybatch_shards_total"] == 3 and values["raybatch_engines_alive"] == 2
    assert values["raybatch_last_commit_timestamp_seconds"] == 100.0
    assert values["raybatch_stalled"] == 0
    assert values["raybatch_gpu_seconds_total"] == 0 and math.isnan(values["raybatch_cost"])
    assert values[metrics.COMPLETED_METRIC] == 0
    assert scrape(port)["raybatch_rows_total"][0] == 15, "the last values stay"
    metrics.completed("nightly", "key")
    assert scrape(port)[metrics.COMPLETED_METRIC][0] == 1


COMPLETE = """
import sys
from prefect_raybatch.driver import metrics
from prefect_raybatch.driver.heartbeat import Heartbeat
with metrics.serving("j", "k", lambda: Heartbeat(1.0, done=93, rows=100)):
    print("serving", flush=True)
    sys.stdin.readline()
with metrics.serving("j", "k2", lambda: Heartbeat(1.0, done=100, rows=100)):
    pass
metrics.completed("j", "k2")
print("completed", flush=True)
"""


@pytest.mark.parametrize("scraped_before", [True, False])
def test_a_process_that_is_scraped_waits_for_a_scrape_of_its_end(scraped_before: bool, port: int):
    """Without one before, nobody scrapes, and the process ends at once."""
    command = [sys.executable, "-c", COMPLETE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "serving\n"
        if scraped_before:
            assert scrape(port)["raybatch_rows_total"][0] == 93
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "completed\n"
        if scraped_before:
            text = scraped_text(port)
            assert 'raybatch_completed{job_name="j",run_key="k2"} 1.0' in text
            assert 'raybatch_completed{job_name="j",run_key="k"} 0.0' in text
            assert text.count("# TYPE raybatch_rows_total") == 1
        assert process.wait(60) == 0


def test_an_endpoint_that_was_never_scraped_does_not_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(metrics, "LAST_SCRAPE_SECONDS")  # a wait would read it, and fail
    endpoint = metrics.Endpoint("127.0.0.1", 0)
    endpoint.begin("j", "k", lambda: Heartbeat(1.0))
    endpoint.complete("j", "k")
    endpoint.wait_for_last_scrape()


def test_each_metric_is_a_number_of_the_beat():
    beat = Heartbeat(
        at=1.0, rows=2, shards=3, done=4, failed=5, skipped=6, committed=7, rate=8.0,
        prompt_tokens_rate=9.0, output_tokens_rate=10.0, seconds_left=11.0, passes=12,
        engine_deaths=13, engines={"ALIVE": 14, "DEAD": 99}, last_commit=15.0, alarms=1,
        gpu_seconds=16.0, cost=99.0, cost_run=17.0, cost_end=99.0,
    )  # fmt: skip
    found = {name: value(beat) for name, (_, value) in {**COUNTERS, **GAUGES}.items()}
    assert found == {
        "raybatch_planned_rows": 2,
        "raybatch_planned_shards": 3,
        "raybatch_rows": 4,
        "raybatch_failed_rows": 5,
        "raybatch_skipped_rows": 6,
        "raybatch_shards": 7,
        "raybatch_rows_per_second": 8.0,
        "raybatch_prompt_tokens_per_second": 9.0,
        "raybatch_output_tokens_per_second": 10.0,
        "raybatch_seconds_left": 11.0,
        "raybatch_passes": 12,
        "raybatch_engine_deaths": 13,
        "raybatch_engines_alive": 14,
        "raybatch_last_commit_timestamp_seconds": 15.0,
        "raybatch_stalled": 1.0,
        "raybatch_gpu_seconds": 16.0,
        "raybatch_cost": 17.0,
    }


def test_what_is_not_known_yet_is_nan_and_a_stall_is_one(port):
    with metrics.serving("j", "k", lambda: Heartbeat(1.0, alarms=2)):
        found = scrape(port)
    assert math.isnan(found["raybatch_seconds_left"][0])
    assert math.isnan(found["raybatch_last_commit_timestamp_seconds"][0])
    assert found["raybatch_stalled"][0] == 1


def test_a_taken_port_is_a_warning(port, caplog):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with metrics.serving("j", "k", lambda: Heartbeat(1.0)):
            pass
    assert f"metrics cannot be served at 127.0.0.1:{port}" in caplog.text


@pytest.mark.parametrize(
    ("host", "served_at"),
    [(None, "127.0.0.1"), (" ", "127.0.0.1"), (" 10.0.0.7 ", "10.0.0.7")],
)
def test_only_this_host_is_served_unless_another_address_is_named(
    port, monkeypatch, caplog, host, served_at
):
    opened: list[tuple[str, int]] = []

    def start(number, address, registry):
        opened.append((address, number))
        raise OSError("not here")

    monkeypatch.setattr("prometheus_client.start_http_server", start)
    monkeypatch.delenv(metrics.METRICS_HOST)
    if host is not None:
        monkeypatch.setenv(metrics.METRICS_HOST, host)
    with metrics.serving("j", "k", lambda: Heartbeat(1.0)):
        assert opened == [(served_at, port)]
    assert f"metrics cannot be served at {served_at}:{port}: not here" in caplog.text


@pytest.mark.parametrize("value", ["", "0", " "])
def test_without_a_port_nothing_is_served(value, monkeypatch):
    monkeypatch.setenv(metrics.METRICS_PORT, value)
    assert metrics.port() is None


@pytest.mark.parametrize(("value", "number"), [(" 9500 ", 9500), ("1", 1), ("65535", 65535)])
def test_any_port_may_be_set(value, number, monkeypatch):
    monkeypatch.setenv(metrics.METRICS_PORT, value)
    assert metrics.port() == number


@pytest.mark.parametrize("value", ["http", "-1", "65536", "9500x"])
def test_a_wrong_port_is_said_before_the_work(value, monkeypatch):
    monkeypatch.setenv(metrics.METRICS_PORT, value)
    with pytest.raises(ConfigError, match=metrics.METRICS_PORT):
        metrics.port()


def test_the_dashboard_shows_exactly_what_is_exported():
    board = json.loads((ROOT / "deployments/grafana.json").read_text())
    panels = board["panels"]
    assert len({p["id"] for p in panels}) == len(panels) and board["title"] and board["uid"]
    queries = [t["expr"] for p in panels for t in p["targets"]]
    variables = board["templating"]["list"]
    asked = [v["definition"] for v in variables if v["type"] == "query"]
    names = re.findall(r"raybatch_\w+", " ".join(queries + asked))
    assert set(names) == EXPORTED
    for text in queries + asked:  # labels, and variables, that exist
        assert set(re.findall(r"(\w+)=~", text)) <= set(METRIC_LABELS)
        assert set(re.findall(r"\$(\w+)", text)) <= {v["name"] for v in variables}
    for place in (p["gridPos"] for p in panels):
        assert place["x"] + place["w"] <= 24


def test_the_reference_names_every_metric():
    page = (ROOT / "docs/reference/events-and-metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(raybatch_\w+)`", page)) == EXPORTED
