"""`python -m helpers.publisher URI PLAN [STEP]`: publish three rows to a Delta table as a run does.

Reads the options as JSON from the first line of its input, says `ready`, and begins at the next
line. Kills itself at STEP, if that is given.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import pyarrow as pa

from helpers.targets import published_rows
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.publish.publish import open_sink

ROWS = pa.table({"id": [1, 2, 3], "answer": ["a", "b", "c"]})

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
