"""Processes that run a job's flow and end with SIGKILL at the event or record that they are told.

    python -m helpers.completion_driver

Starts such a process for each line of its input, a JSON list: JOB KEY [before|after EVENT|FILE].
They are forks of this one, which has imported all that a flow imports: five seconds of a core.
Prints what they print, and then `exit` with the exit code.

`before` the event is sent, or `after` Prefect has confirmed it and before the record says so;
`before` or `after` the file, a record of accuracy or agreement, is written. The ids of all events
that a process sends at the end of the run are printed.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any

from prefect_raybatch import BatchJob, batch_inference
from prefect_raybatch.flow import completion
from prefect_raybatch.ledger import json_record
from prefect_raybatch.storage import Store


def drive(path: str, key: str, moment: str = "", event: str = "") -> None:
    send, put = completion.send_confirmed, json_record.put_record

    def killed_at_record(store: Store, record: str, data: bytes) -> None:
        is_it = record.rpartition("/")[2] == event
        if is_it and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        put(store, record, data)
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)

    def killed_at_one(**fields: Any) -> None:
        if (moment, event) == ("before", fields["event"]):
            os.kill(os.getpid(), signal.SIGKILL)
        send(**fields)
        print("sent", fields["event"], fields["id"], flush=True)
        if (moment, event) == ("after", fields["event"]):
            os.kill(os.getpid(), signal.SIGKILL)

    completion.send_confirmed = killed_at_one
    json_record.put_record = killed_at_record  # what writes records of accuracy and agreement
    batch_inference(BatchJob.from_yaml(path), key)


def child(words: list[str]) -> None:
    code = 0
    try:
        drive(*words)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def main() -> None:
    importlib.import_module("prefect_raybatch.report.drawing")
    assert threading.active_count() == 1, "a fork has no other threads"
    for line in sys.stdin:
        if (process := os.fork()) == 0:
            child(json.loads(line))
        _, status = os.waitpid(process, 0)
        print("exit", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
