"""Runs over a batch API that are killed again and again, or stopped: real processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from helpers.batch_server import BatchServer, BatchService, batch_server
from helpers.command_line import called
from runs.test_endpoint_kills import check_result, job_of

pytestmark = pytest.mark.whole
ROWS, ROWS_A_SHARD, KILLS = 300, 30, 20
LONGEST_LIFE = 40  # calls of the server
WAIT = 120.0


def lived(server: BatchServer, command: list[str], calls: int, news: threading.Condition) -> bool:
    """Run a driver until it has made that many calls, and kill it; whether it ended itself."""
    until = len(server.calls) + calls
    driver = subprocess.Popen(command, start_new_session=True)
    try:
        with news:
            while len(server.calls) < until and driver.poll() is None:
                news.wait(0.2)
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
    code = driver.wait(WAIT)
    assert code in (0, -signal.SIGKILL)
    return code == 0


def batches_of_a_file(service: BatchService) -> Iterable[int]:
    """Return how many batches were made from each input file."""
    return Counter(batch["input_file_id"] for batch in service.batches.values()).values()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_kills_lose_no_row_and_pay_only_for_a_batch_whose_creation_was_in_flight(
    tmp_path: Path,
) -> None:
    chance, news = random.Random(45), threading.Condition()

    def called(method: str, path: str) -> str:
        with news:
            news.notify_all()
        return "after" if chance.random() < 0.02 else ""

    service = BatchService(
        takes=1.0, lag=0.5, fate=lambda n: "expired" if n % 4 == 1 else "completed"
    )
    with batch_server(service) as server:
        server.drop = called
        path = job_of(server, tmp_path, ROWS, ROWS_A_SHARD, batch=True)
        command = [sys.executable, "-m", "helpers.batch_driver", str(path), "night"]
        kills = 0
        while True:
            life = chance.randint(1, LONGEST_LIFE) if kills < KILLS else 10**6
            if lived(server, command, life, news):
                break
            kills += 1
        service.settle()
    check_result(tmp_path / "out" / "night", ROWS)
    twice = service.paid.total() - ROWS
    created_again = sum(number - 1 for number in batches_of_a_file(service))
    assert len(service.paid) == ROWS and twice <= created_again * ROWS_A_SHARD
    # Answers that a crash left are not ours by name: the server removes them.
    assert not [one for one in service.files.values() if one["purpose"] == "batch"]
    print(f"{kills} kills; {created_again} batches created again, {twice} rows paid for twice")


def test_a_run_on_ray_waits_for_all_batches_and_sigterm_cancels_them(
    local_ray: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = BatchService(takes=3600.0)
    with batch_server(service) as server:
        path = job_of(server, tmp_path, 40, 10, batch=True)
        words = ["run", str(path), "--run-key", "n", "--no-prefect"]
        command = [sys.executable, "-m", "prefect_raybatch.cli", *words]
        run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert run.stderr is not None
        said = []
        for line in run.stderr:
            said.append(line)
            if "waiting: 4 batches, 0 of 40 requests done" in " ".join(line.split()):
                break
        else:
            pytest.fail("".join(said))
        run.terminate()
        rest = run.stderr.read()
        assert run.wait(WAIT) == 128 + signal.SIGTERM, rest
        assert {batch["status"] for batch in service.batches.values()} == {"cancelled"}, rest
        assert "cancelling 4 batches" in rest
        service.takes = 0.0
        code, _, err = called(capsys, *words)
        assert code == 0, err[-3000:]
    check_result(tmp_path / "out" / "n", 40)
    assert service.paid.total() == 40
