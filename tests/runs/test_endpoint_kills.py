"""A run with a hosted model that is killed again and again: each row once, little paid twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.openai_server import OpenAIServer, openai_server

from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import open_store

ROWS, ROWS_A_SHARD, KILLS, IN_FLIGHT = 600, 100, 25, 8
ANSWER_SECONDS = 0.2  # of the model
# Answers of the last second, which the journal may not have, and requests in flight at a kill.
LOST = int(IN_FLIGHT / ANSWER_SECONDS) + IN_FLIGHT
LONGEST_LIFE = 3 * int(IN_FLIGHT / ANSWER_SECONDS)  # requests
WAIT = 120.0


def lived(
    server: OpenAIServer, command: list[str], requests: int, news: threading.Condition
) -> bool:
    """Run a driver until it has sent that many requests, and kill it; whether it ended itself."""
    until = len(server.bodies) + requests
    driver = subprocess.Popen(command, start_new_session=True)
    try:
        with news:
            while len(server.bodies) < until and driver.poll() is None:
                news.wait(0.2)
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
    code = driver.wait(WAIT)
    assert code in (0, -signal.SIGKILL)
    return code == 0


def job_of(server: OpenAIServer, folder: Path, rows: int, a_shard: int, **endpoint: Any) -> Path:
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
def test_two_workers_on_ray_keep_the_limit_in_every_minute(tmp_path: Path) -> None:
    rows, limit = 100, 80
    with openai_server() as server:
        path = job_of(server, tmp_path, rows, 10, requests_per_minute=limit)
        command = [sys.executable, "-m", "prefect_raybatch.cli", "run", str(path), "--run-key", "n"]
        subprocess.run([*command, "--no-prefect"], check=True, timeout=270)
    check_result(tmp_path / "out" / "n", rows)
    assert len(server.times) == rows
    for at in server.times:
        assert sum(at <= other < at + 60 for other in server.times) <= limit


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_kills_lose_no_row_and_pay_for_little_twice(tmp_path: Path) -> None:
    chance, news = random.Random(45), threading.Condition()

    def works(number: int, body: object) -> None:
        with news:
            news.notify_all()
        time.sleep(ANSWER_SECONDS)  # what it simulates

    with openai_server() as server:
        server.fault = works
        path = job_of(server, tmp_path, ROWS, ROWS_A_SHARD, max_in_flight=IN_FLIGHT)
        command = [sys.executable, "-m", "helpers.endpoint_driver", str(path), "night"]
        kills = 0
        while True:
            before, paid = len(server.answered), set(server.answered)
            life = chance.randint(1, LONGEST_LIFE) if kills < KILLS else 10 * ROWS
            if lived(server, command, life, news):
                break
            kills += 1
            again = sum(key in paid for key in server.answered[before:])
            assert again <= LOST, f"life {kills} paid for {again} answers again"
    check_result(tmp_path / "out" / "night", ROWS)
    twice = len(server.answered) - len(set(server.answered))
    assert len(set(server.answered)) == ROWS
    print(f"{kills} kills; {twice} of {ROWS} answers paid for twice")
