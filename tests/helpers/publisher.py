"""`python -m helpers.publisher URI PLAN [STEP]`: publish three rows to a Delta table as a run does.

Reads the options as JSON from the first line of its input, says `ready`, and begins at the next
line. Kills itself at STEP, if that is given.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pyarrow as pa

from helpers.targets import published_rows
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.publish.publish import open_sink

ROWS = pa.table({"id": [1, 2, 3], "answer": ["a", "b", "c"]})


def started(uri: str, plan: str, options: dict[str, Any], *kill: str) -> subprocess.Popen[str]:
    """Start this program; it waits for `run_at_once`."""
    command = [sys.executable, "-m", "helpers.publisher", uri, plan, *kill]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    assert process.stdin is not None
    process.stdin.write(f"{json.dumps(options)}\n")
    process.stdin.flush()
    return process


def run_at_once(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Let them begin together; return their exit statuses and the versions they print."""
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    printed = [process.communicate()[0].strip() for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, printed, strict=True)]


if __name__ == "__main__":
    uri, plan, *kill = sys.argv[1:]

    def observe(step: str) -> None:
        if [step] == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    options = json.loads(sys.stdin.readline())
    target = PublishTarget.model_validate({"format": "delta", "uri": uri})
    sink = open_sink(target, "key", options)
    print("ready", flush=True)
    sys.stdin.readline()
    print(sink.publish(published_rows(ROWS, plan * 64), observe))
