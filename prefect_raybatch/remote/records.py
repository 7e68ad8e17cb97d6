"""The Ray jobs of a run: numbered records in the run directory, written before each submission.

A number is a fencing token. Record N + 1 is written only by a flow that found that job N has ended
or is lost, or that does not trust the server named in record N. Job N looks for record N + 1 when
it starts and every few seconds, and ends itself if that record exists. So even a job that a lost
head has forgotten, or a submission that arrives an hour late, runs alongside its successor for a
few seconds at most.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.accepted import Accepted, accepted_in, accepted_note
from prefect_raybatch.ledger.layout import JOB_NAME, JOBS, job_end_path, job_path
from prefect_raybatch.ledger.record_files import put_record, put_record_if_absent, read_record
from prefect_raybatch.ledger.records import digest, dump, load
from prefect_raybatch.runs.run import Run
from prefect_raybatch.storage import Store


@dataclass(frozen=True)
class Record:
    """The record of Ray job `number` of a run, written before the job is submitted.

    `job` is the batch job without secrets; `flow_run` is the Prefect flow run that submits it. If a
    user accepted that the job differs from the plan, `accepted` has these differences, and `model`
    the pinned model to use.
    """

    number: int
    id: str
    server: str
    plan_hash: str
    job: dict[str, Any]
    flow_run: str | None
    on_crash: str
    host: str
    pid: int
    user: str
    written: str
    accepted: list[dict[str, Any]] = field(default_factory=list)
    model: dict[str, Any] | None = None

    @property
    def accepted_fields(self) -> tuple[Accepted, ...]:
        """Return the accepted differences; raise `CorruptRun` if they are malformed."""
        return accepted_in({"accepted": self.accepted}, job_path(self.number))

    @property
    def digest(self) -> str:
        """Return the `job_digest` of the recorded job."""
        return job_digest(self.plan_hash, self.job, self.accepted_fields, self.model)


@dataclass(frozen=True)
class Outcome:
    """The end of a job, as the job recorded it.

    `error` is the name of the error's class, None for success.
    """

    error: str | None = None
    message: str = ""
    engine_deaths: int = 0
    passes: int = 0


class JobRecords:
    """The records of Ray jobs in one run directory, for the plan with hash `plan_hash`."""

    def __init__(self, store: Store, run_key: str, plan_hash: str):
        self.store, self.run_key, self.plan_hash = store, run_key, plan_hash

    def newest_number(self) -> int:
        """Return the number of the newest job record; 0 if there is none."""
        listed = ((JOB_NAME.match(info.path), info.path) for info in self.store.list(JOBS))
        numbers = (
            int(match[1]) for match, path in listed if match and path == job_path(int(match[1]))
        )
        return max(numbers, default=0)

    def newest(self) -> Record | None:
        """Return the newest job record; None if there is none."""
        number = self.newest_number()
        return self.read(number) if number else None

    def read(self, number: int) -> Record:
        """Return job record `number`; raise `CorruptRun` if it is missing, or not of this plan."""
        path = job_path(number)
        try:
            value = load(read_record(self.store, path), path)
            record = Record(**value)
        except FileNotFoundError:
            raise CorruptRun(f"{path} does not exist, although the job was submitted") from None
        except TypeError as error:
            raise CorruptRun(f"{path} is not a job record: {error}") from None
        kinds = (type(record.number), type(record.id), type(record.job), type(record.server))
        ours = (record.number, record.id, record.plan_hash) == (
            *(number, self.id_of(number), self.plan_hash),
        )
        if kinds != (int, str, dict, str) or not ours:
            raise CorruptRun(f"{path} is not the record of job {number} of this plan")
        return record

    def add(
        self,
        number: int,
        job: Mapping[str, Any],
        server: str,
        flow_run: str | None,
        run: Run | None = None,
    ) -> bool:
        """Write record `number` by put-if-absent; return False if another record has that number.

        `job` is the batch job, `flow_run` the flow run that submits it. The accepted differences
        and the model come from `run`.
        """
        user = "unknown"
        with suppress(OSError, KeyError):  # containers may run under a user id without a name
            user = getpass.getuser()
        record = Record(
            number=number,
            id=self.id_of(number),
            server=server,
            plan_hash=self.plan_hash,
            job=dict(job),
            flow_run=flow_run,
            on_crash=str(job.get("cluster", {}).get("on_crash", "reattach")),
            host=socket.gethostname(),
            pid=os.getpid(),
            user=user,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            **_accepted(run),
        )
        value = {k: v for k, v in asdict(record).items() if v or k not in ("accepted", "model")}
        return put_record_if_absent(self.store, job_path(number), dump(value))

    def id_of(self, number: int) -> str:
        """Return the submission id of job `number`, unique to the run and always the same."""
        key = re.sub(r"[^A-Za-z0-9_-]", "-", self.run_key)
        return f"raybatch-{key}-{self.plan_hash[:12]}-{number}"

    def end(self, number: int, outcome: Outcome) -> None:
        """Record how job `number` ended."""
        put_record(self.store, job_end_path(number), dump(asdict(outcome)))

    def outcome(self, number: int) -> Outcome | None:
        """Return the outcome that job `number` recorded; None if it has recorded none.

        Raises `CorruptRun` for a malformed record.
        """
        path = job_end_path(number)
        try:
            return Outcome(**load(read_record(self.store, path), path))
        except FileNotFoundError:
            return None
        except TypeError as error:
            raise CorruptRun(f"{path} is not a job outcome: {error}") from None


def job_digest(
    plan_hash: str,
    job: Mapping[str, Any],
    accepted: Iterable[Accepted],
    model: Mapping[str, Any] | None,
) -> str:
    """Return the SHA-256 of all that decides what a Ray job does.

    This is the plan, the batch job, and the accepted differences between them. The digest covers
    the field, old and new value of each difference, but not who accepted it and when. It covers
    `model` only if there are accepted differences.
    """
    differences = sorted([one.field, one.old, one.new] for one in accepted)
    model = dict(model) if model and differences else None
    return digest(dump({"plan": plan_hash, "job": job, "accepted": differences, "model": model}))


def _accepted(run: Run | None) -> dict[str, Any]:
    if run is None or not run.accepted:
        return {}
    model = None if run.model is None else dict(run.model)
    return {**accepted_note(run.accepted), "model": model}
