"""A run with a hosted model that is killed again and again: each row once, little paid twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.batch_server import BatchServer
from helpers.command_line import called
from helpers.openai_server import OpenAIServer, openai_server

from prefect_raybatch.result.verify import verify
from prefect_raybatch.stages.endpoint.limiter import BURST
from prefect_raybatch.storage import open_store

KILLS = int(os.environ.get("RAYBATCH_TEST_KILLS", "16"))  # make chaos asks for more
IN_FLIGHT = 4
ANSWER_SECONDS = 0.05  # of the model
# Answers of the last second, which the journal may not have, and requests in flight at a kill.
LOST = int(IN_FLIGHT / ANSWER_SECONDS) + IN_FLIGHT
CHANCE = random.Random(45)
# Requests of each driver until it is killed. Most are killed before the journal is written first,
# each 16th after it has answered more than may be lost.
LIVES = [
    CHANCE.randint(0, 24) if number % 16 else CHANCE.randint(LOST + 10, 2 * LOST)
    for number in range(KILLS)
]
ROWS, ROWS_A_SHARD = sum(LIVES) + 10 * KILLS, 250  # more than the killed drivers can answer
START_SECONDS = 0.5  # of a driver, until its first request
WAIT = 120.0


@contextmanager
def drivers(path: Path, key: str) -> Iterator[subprocess.Popen[str]]:
    """A process that starts a driver for each line it is given; see helpers.endpoint_driver."""
    command = [sys.executable, "-m", "helpers.endpoint_driver", str(path), key]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as made:
        yield made


def lived(
    server: OpenAIServer,
    starter: subprocess.Popen[str],
    requests: int,
    news: threading.Condition,
    later: float = 0.0,
) -> bool:
    """Kill a driver `later` seconds after so many requests; return whether it ended itself."""
    assert starter.stdin is not None and starter.stdout is not None
    until = len(server.bodies) + requests
    starter.stdin.write("\n")
    starter.stdin.flush()
    driver = int(starter.stdout.readline())
    with suppress(ProcessLookupError):
        with news:
            while len(server.bodies) < until:
                os.kill(driver, 0)  # until it has ended itself
                news.wait(0.2)
        time.sleep(later)
        os.killpg(driver, signal.SIGKILL)
    code = int(starter.stdout.readline())
    assert code in (0, -signal.SIGKILL)
    return code == 0


def job_of(
    server: OpenAIServer | BatchServer, folder: Path, rows: int, a_shard: int, **endpoint: Any
) -> Path:
    """Write the input and the job file; return its path."""
    table = pa.table({"Company": [f"Company {n}" for n in range(rows)]})
    pq.write_table(table, folder / "in.parquet")
    job = {
        "name": "hosted",
        "source": {"uri": str(folder / "in.parquet"), "rows_per_shard": a_shard},
        "prompt": {"template": "{Company}"},
        "output": {"uri": str(folder / "out")},
        "engine": {
            "endpoint": {"url": server.url, "model": "large", **endpoint},
            "replicas": 2,
            "num_cpus": 0.25,
        },
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def check_result(folder: Path, rows: int) -> None:
    """Check that each row has its answer, once."""
    result = ds.dataset(folder / "data").to_table()
    companies, answers = (result[name].to_pylist() for name in ("Company", "response"))
    assert sorted(companies) == sorted(f"Company {n}" for n in range(rows))
    assert answers == [f"about {company}" for company in companies]
    assert verify(open_store(str(folder))).ok


@pytest.mark.whole
def test_two_workers_on_ray_share_one_limit(
    local_ray: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two limiters would let the requests through in half the time.

    tests/stages/test_endpoint_limiter.py shows that one limiter keeps its limit in every minute.
    """
    rows, limit = 48, 240
    with openai_server() as server:
        path = job_of(server, tmp_path, rows, 6, requests_per_minute=limit)
        code, _, err = called(capsys, "run", path, "--run-key", "n", "--no-prefect")
        assert code == 0, err[-3000:]
    check_result(tmp_path / "out" / "n", rows)
    assert len(server.times) == rows
    paced = (rows - 1) * 60 / limit - BURST  # seconds by one limiter
    assert server.times[-1] - server.times[0] > 0.75 * paced


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_kills_lose_no_row_and_pay_for_little_twice(tmp_path: Path) -> None:
    news = threading.Condition()

    def works(number: int, body: object) -> None:
        with news:
            news.notify_all()
        time.sleep(ANSWER_SECONDS if kills < KILLS else 0)  # what it simulates

    with openai_server() as server:
        server.fault = works
        path = job_of(server, tmp_path, ROWS, ROWS_A_SHARD, max_in_flight=IN_FLIGHT)
        kills = most = 0
        with drivers(path, "night") as starter:
            while True:
                before, paid = len(server.answered), set(server.answered)
                life, later = 10 * ROWS, 0.0
                if kills < KILLS:
                    life = LIVES[kills]
                    # Between two requests, or before the first one.
                    later = CHANCE.uniform(0, ANSWER_SECONDS if life else START_SECONDS)
                if lived(server, starter, life, news, later):
                    break
                kills += 1
                again = sum(key in paid for key in server.answered[before:])
                assert again <= LOST, f"life {kills} paid for {again} answers again"
                most = max(most, again)
    assert kills == KILLS
    check_result(tmp_path / "out" / "night", ROWS)
    twice = len(server.answered) - len(set(server.answered))
    assert len(set(server.answered)) == ROWS
    print(f"{kills} kills; {twice} answers paid for again, at most {most} at a time")
