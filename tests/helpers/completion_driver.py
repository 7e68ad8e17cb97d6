"""Run a job's flow in a process that ends with SIGKILL at the event that it is told.

    python -m helpers.completion_driver JOB KEY [before|after EVENT]

`before` the event is sent, or `after` Prefect has confirmed it and before the record says so. The
ids of all events that the process sends at the end of the run are printed.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from prefect_raybatch import BatchJob, batch_inference
from prefect_raybatch.flow import completion


def main(path: str, key: str, moment: str = "", event: str = "") -> None:
    send = completion.send_confirmed

    def killed_at_one(**fields: Any) -> None:
        if (moment, event) == ("before", fields["event"]):
            os.kill(os.getpid(), signal.SIGKILL)
        send(**fields)
        print("sent", fields["event"], fields["id"], flush=True)
        if (moment, event) == ("after", fields["event"]):
            os.kill(os.getpid(), signal.SIGKILL)

    completion.send_confirmed = killed_at_one
    batch_inference(BatchJob.from_yaml(path), key)


if __name__ == "__main__":
    main(*sys.argv[1:])
