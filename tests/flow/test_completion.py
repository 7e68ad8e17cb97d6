"""The events of a completed run: each is sent at least once, whenever the process is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.heard import caught_events, wait_for
from helpers.nights import Nights
from helpers.prefect_server import Prefect, events_of, settings_for
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_raybatch.errors import StoreError
from prefect_raybatch.flow import completion, run_history
from prefect_raybatch.flow.completion import CompletionEvents
from prefect_raybatch.job.edits import edited
from prefect_raybatch.job.output import Output
from prefect_raybatch.report.drift import LEAST_RUNS
from prefect_raybatch.report.run_history import HistoryLine, HistoryPage
from prefect_raybatch.runs.run import Run

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


@pytest.mark.whole
def test_each_event_of_a_completed_run_survives_kills_before_and_after_it_is_sent(
    prefect_process: Prefect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    def attempt(*kill: str) -> list[tuple[str, str]]:
        """The events that an attempt sent until it was killed."""
        command = [sys.executable, "-m", "helpers.completion_driver", str(written), "last", *kill]
        done = subprocess.run(
            command, env=prefect_process.env, capture_output=True, text=True, timeout=300
        )
        expected = -signal.SIGKILL if kill else 0
        assert done.returncode == expected, done.stdout + done.stderr
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("sent ")]
        return [(event, id_) for _, event, id_ in lines]

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
