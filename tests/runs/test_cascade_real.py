"""A cascade with a real engine: the bundled model first, then a hosted one; killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from helpers.command_line import Raybatch
from helpers.environ import clean
from helpers.openai_server import completion, openai_server

from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import open_store

pytestmark = pytest.mark.whole
ROWS, MOST = 60, 15


def test_a_run_killed_at_the_larger_model_resumes_without_the_first_engine(
    local_ray: None, example: Raybatch, tmp_path: Path
) -> None:
    with openai_server() as server:
        reached, go = threading.Event(), threading.Event()

        def answer(number: int, body: dict[str, Any]) -> Any:
            if number >= 3:
                reached.set()
                go.wait(300)
            return 200, {}, completion(json.dumps({"label": "Finance"}))

        server.fault = answer
        escalate = json.dumps(
            {
                "to": {"endpoint": {"url": server.url, "model": "large", "max_in_flight": 4}},
                "when": {"probability_below": 1.0},
                "at_most": MOST / ROWS,
            }
        )
        command = [
            *("run", "companies.yaml", "--run-key", "n1", "--no-prefect"),
            *("--set", f"source.limit={ROWS}", "--set", "source.rows_per_shard=20"),
            # Each process of Ray imports for itself.
            *("--set", "cluster.prepare.concurrency=1"),
            *("--set", f"output.escalate={escalate}"),
        ]
        with subprocess.Popen(
            [sys.executable, "-m", "prefect_raybatch.cli", *command],
            env=clean(),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
        ) as driver:
            try:
                assert reached.wait(300), "the larger model is asked once the first one is done"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(driver.pid, signal.SIGKILL)
        go.set()
        before = len(list((tmp_path / "out/n1/_raybatch/asks/_raybatch/attempts").iterdir()))
        code, out, err = example(*command)
        assert code == 0, err[-3000:]
        asked = {body["messages"][-1]["content"] for body in server.bodies}
    folder = tmp_path / "out" / "n1"
    assert len(list((folder / "_raybatch/asks/_raybatch/attempts").iterdir())) == before == 1
    rows = ds.dataset(folder / "data").to_table().to_pylist()
    by_larger = [row for row in rows if row["answered_by"] == "large"]
    assert [row["_row"] for row in rows] == list(range(ROWS))
    assert len(by_larger) == MOST == len(asked)
    assert verify(open_store(str(folder))).faults == []
    assert f"{ROWS - MOST} by demo, {MOST} by large" in out
