"""The events of a completed run: each is sent at least once, whenever the process is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.checked_nights import CheckedNights
from helpers.heard import caught_events, wait_for
from helpers.nights import Nights
from helpers.prefect_server import Prefect, events_of, settings_for
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_raybatch.api import plan_run
from prefect_raybatch.errors import StoreError
from prefect_raybatch.flow import completion, run_history
from prefect_raybatch.flow.completion import CompletionEvents
from prefect_raybatch.job.edits import edited
from prefect_raybatch.job.output import Output
from prefect_raybatch.quality.accuracy import read_accuracy
from prefect_raybatch.quality.agreement import read_agreement
from prefect_raybatch.quality.alarm import BASELINE_RUNS
from prefect_raybatch.report.drift import LEAST_RUNS
from prefect_raybatch.report.run_history import HistoryLine, HistoryPage
from prefect_raybatch.runs.run import Run
from prefect_raybatch.storage import open_store

RECORD = "_raybatch/events-sent.json"


def names_and_ids(sent: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(event["event"], str(event["id"])) for event in sent]


def events_in(folder: Path, plan: str = "h") -> CompletionEvents:
    """The events of a run as an attempt at it finds them."""
    return CompletionEvents(Run(str(folder), "k", plan, 100, 10, True), "job", None)


def test_each_event_is_sent_once_a_version_and_has_the_same_id_in_each_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = caught_events(monkeypatch)
    for _ in range(2):
        events_in(tmp_path).send("rows.low", about="few")
        events_in(tmp_path).send("run.completed", "one", rows=3)
    assert [name for name, _ in names_and_ids(sent)] == [
        "raybatch.rows.low",
        "raybatch.run.completed",
    ]
    events_in(tmp_path).send("run.completed", "one, two", rows=3)  # published once more
    assert len(sent) == 3 and len({event["id"] for event in sent}) == 3
    (tmp_path / RECORD).unlink()
    events_in(tmp_path).send("rows.low", about="few")
    assert sent[3]["id"] == sent[0]["id"]
    # A run that was removed and planned anew with its key has events of its own.
    events_in(tmp_path, "other").send("rows.low", about="few")
    assert sent[4]["id"] != sent[0]["id"]


def test_an_event_without_confirmation_is_queued_and_sent_again_by_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent = caught_events(monkeypatch)
    tries = list[str]()

    def away(**event: Any) -> None:
        tries.append(event["event"])
        raise ConnectionError("no API")

    with monkeypatch.context() as patch:
        patch.setattr(completion, "send_confirmed", away)
        events = events_in(tmp_path)
        events.send("rows.low")
        events.send("run.completed")
    assert tries == ["raybatch.rows.low"]  # the next one would wait as long
    assert caplog.messages == [
        "Prefect did not confirm the event raybatch.rows.low: ConnectionError: no API. The same "
        "command sends it again"
    ]
    queued = names_and_ids(sent)
    assert len(queued) == 2 and not (tmp_path / RECORD).exists()
    sent.clear()
    for _ in range(2):
        events_in(tmp_path).send("rows.low")
        events_in(tmp_path).send("run.completed")
    assert names_and_ids(sent) == queued


@pytest.mark.parametrize("damaged", [b'{"rows.low": ', b'{"rows.low": 1}', b"[]"])
def test_a_damaged_record_leads_to_a_second_event_and_is_replaced(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damaged: bytes,
) -> None:
    sent = caught_events(monkeypatch)
    (tmp_path / "_raybatch").mkdir()
    (tmp_path / RECORD).write_bytes(damaged)
    for _ in range(2):
        events_in(tmp_path).send("rows.low")
    assert len(sent) == 1 and "all are sent again" in caplog.text


def test_a_store_that_fails_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent = caught_events(monkeypatch)

    def full(*_: Any) -> None:
        raise StoreError("no room left")

    monkeypatch.setattr(completion, "put_sent", full)
    for _ in range(2):
        events = events_in(tmp_path)
        events.send("rows.low")
        events.send("rows.low")
    assert len(sent) == 2
    assert "cannot record that the event rows.low was sent: no room left" in caplog.text


def test_a_confirmed_event_is_on_the_server_and_an_unreachable_one_confirms_nothing(
    prefect_process: Prefect,
) -> None:
    event = {"event": "raybatch.test", "resource": {"prefect.resource.id": "raybatch.run.away"}}
    with settings_for(prefect_process):
        completion.send_confirmed(**event)
        (found,) = wait_for(lambda: events_of("raybatch.run.away"))
        assert found["event"] == "raybatch.test"
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(Exception),  # noqa: B017  # of websockets or httpx, as Prefect says it
    ):
        completion.send_confirmed(**event)


def test_a_slow_run_is_no_run_of_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent = caught_events(monkeypatch)
    usual = HistoryLine("before", "", "completed", rows=100, good=100, elapsed=600.0)
    slow = HistoryLine("k", str(tmp_path), "completed", rows=100, good=100, elapsed=6000.0)
    few = HistoryLine("k", str(tmp_path), "completed", rows=9, good=9, elapsed=600.0)
    output = Output(uri=str(tmp_path))
    for line, names in ((slow, []), (few, ["raybatch.rows.low"])):
        shown = (HistoryPage("job", (line, usual)), line)
        monkeypatch.setattr(run_history, "show_history", lambda *_, shown=shown: shown)
        run_history.send_history_events(events_in(tmp_path), "job", output)
        assert [event["event"] for event in sent] == names
    assert len(caplog.messages) == 2 and "Far fewer rows" in caplog.messages[1]
    run_history.send_history_events(events_in(tmp_path), "job", output, limited=True)
    assert len(sent) == 1


Attempts = Callable[..., list[tuple[str, str]]]


@pytest.fixture(scope="module")
def attempts(prefect_process: Prefect) -> Iterator[Attempts]:
    """Runs the flow of a job with the key `last`, killed as `helpers.completion_driver` says;
    returns the events that it sent."""
    command = [sys.executable, "-m", "helpers.completion_driver"]
    with subprocess.Popen(
        command,
        env=prefect_process.env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        lines, asked = driver.stdout, driver.stdin

        def attempt(job: Path, *kill: str) -> list[tuple[str, str]]:
            print(json.dumps([str(job), "last", *kill]), file=asked, flush=True)
            said = list[str]()
            for line in lines:
                said.append(line)
                if line.startswith("exit "):
                    break
            expected = -signal.SIGKILL if kill else 0
            assert said[-1:] == [f"exit {expected:d}\n"], "".join(said)
            words = [line.split() for line in said if line.startswith("sent ")]
            return [(event, id_) for _, event, id_ in words]

        yield attempt
        asked.close()


@pytest.mark.whole
def test_each_event_of_a_completed_run_survives_kills_before_and_after_it_is_sent(
    prefect_process: Prefect,
    attempts: Attempts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A night of few rows with other answers, whose flow is killed at each of its events."""
    nights = Nights(tmp_path)
    nights.write(*(f"t{i}" for i in range(500)))
    source = {"uri": str(tmp_path / "in.parquet"), "rows_per_shard": 100}
    choice = {"choice": ["yes", "no"]}
    job = nights.job(name="killed", source=source, sampling=choice, reuse=None)
    monkeypatch.setattr(nights, "answer", lambda prompt: "yes")
    for number in range(LEAST_RUNS):
        nights.night(f"k{number}", job)
    nights.write(*(f"t{i}" for i in range(220)))
    monkeypatch.setattr(nights, "answer", lambda prompt: "no")
    nights.night("last", job)  # its flow is killed right after _SUCCESS
    written = tmp_path / "job.yaml"
    written.write_text(yaml.safe_dump(edited(job, {}, "the job").to_dict()))
    attempt = partial(attempts, written)
    events = ["raybatch.rows.low", "raybatch.answers.drifted", "raybatch.run.completed"]
    for event, later in zip(events, [*events[1:], ""], strict=True):
        assert attempt("before", event) == []  # those before it are recorded
        lost = attempt("after", event)  # sent, and its record is not written
        assert [name for name, _ in lost] == [event]
        assert attempt(*(("before", later) if later else ())) == lost
    assert attempt() == []
    with settings_for(prefect_process):
        # Prefect stores events some seconds after it has received them, and those that come twice
        # once.
        wait_for(lambda: {e["event"] for e in events_of("raybatch.run.last")} >= set(events))
        found = [e["event"] for e in events_of("raybatch.run.last")]
    assert sorted(name for name in found if name in events) == sorted(events)


@pytest.mark.whole
def test_both_alarms_survive_kills_and_no_night_is_lost_or_counted_twice(
    attempts: Attempts, tmp_path: Path
) -> None:
    """A night whose accuracy and agreement fell; its flow is killed at each record and event."""
    nights = CheckedNights(tmp_path)
    job, keys = nights.measured(), [f"n{number}" for number in range(BASELINE_RUNS)]
    for key in keys:
        nights.night(key, job)
    nights.label = "boat"
    run = plan_run(job, "last")
    nights.infer(job, run)  # its flow is killed before the result is written
    written = tmp_path / "job.yaml"
    written.write_text(yaml.safe_dump(edited(job, {}, "the job").to_dict()))
    store, attempt = open_store(run.uri), partial(attempts, written)
    assert attempt("before", "agreement.json") == [] and read_agreement(store) is None
    assert attempt("after", "agreement.json") == []
    assert read_agreement(store) is not None and read_accuracy(store) is None
    assert attempt("after", "quality.json") == []
    records = (read_agreement(store), read_accuracy(store))
    for record in records:
        assert record is not None and record.series is not None and record.series.rings
        assert record.series.runs == (*keys, "last") and record.series.later == 1
    events = [f"raybatch.{name}.fell" for name in ("accuracy", "agreement")]
    accuracy_fell = attempt("after", events[0])
    both = attempt("after", events[1])
    assert both[:1] == accuracy_fell and [name for name, _ in both] == events
    sent = attempt()
    assert sent[0] == both[1] and events[0] not in [name for name, _ in sent]
    assert (read_agreement(store), read_accuracy(store)) == records
    later = nights.night("later", job)
    assert [series.runs for series in later.series.values()] == [(*keys, "last", "later")] * 2
