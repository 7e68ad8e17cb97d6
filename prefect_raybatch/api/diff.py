"""Compares a job with a finished run: answers a sample of its rows again, and shows the changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect_raybatch.api import Sender, dry_run, finalize_run, plan_run
from prefect_raybatch.api.submission import infer_in_place
from prefect_raybatch.compare.changes import Diff, changes_of, diff_of
from prefect_raybatch.compare.predicted_time import PredictedTime, predicted_time
from prefect_raybatch.compare.sample import DrawnRows, check_kept, compared_columns, draw
from prefect_raybatch.compile.job import compile_plan, public_job
from prefect_raybatch.compile.resolved import Resolved, resolve
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.edits import edited
from prefect_raybatch.job.tasks import pools
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.job.trusted_places import check_run_place
from prefect_raybatch.ledger.family import Member, without_link
from prefect_raybatch.ledger.increments import read_answers
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import duration
from prefect_raybatch.runs.dry_run import DryRun
from prefect_raybatch.runs.finalize_run import load_report
from prefect_raybatch.runs.publish_run import finished_member
from prefect_raybatch.runs.run import Run
from prefect_raybatch.storage import join, open_store
from prefect_raybatch.words import counted

DIFF_FOLDER = "_diff"  # under output.uri; no run key begins with an underscore
DIFF_RUN = "new"
ROWS_FILE = "rows.parquet"
SAMPLE_JOB = "the job of a comparison"  # named in messages


@dataclass(frozen=True)
class Prepared:
    """A prepared comparison of a job with a finished run; no row was sent to a model yet.

    `sample_job` is the job that answers the `sample` of rows again; it works in the folder `place`.
    `changes` are the fields in which it differs from the compared job. `member` is the finished run
    and `before` its report. `full_run` is what a run of the compared job over all rows of its own
    input would do, and `time` how long that would take.
    """

    sample_job: Resolved
    changes: Mapping[str, Any]
    place: str
    sample: DrawnRows
    member: Member
    before: RunReport
    full_run: DryRun
    time: PredictedTime

    def lines(self) -> list[str]:
        """Return lines of text: the rows to compare, and time and cost of a run over all rows."""
        asked, total = len(self.sample.numbers), self.sample.total
        before = self.before
        made = [
            f"asks {asked:,} of {counted(total, 'row')} of {before.run}",
            f"a run of {self.full_run.job} would have {counted(self.full_run.rows, 'row')}; "
            f"{before.run_key} took {duration(before.seconds)} for {counted(before.rows, 'row')}",
        ]
        made.append(f"time of that run: {self.time.line()}")
        if self.full_run.cost is not None:
            made.append(f"cost of that run: {self.full_run.cost.line()}")
        return made + [f"problem: {text}" for text in self.full_run.problems]

    def to_dict(self) -> dict[str, Any]:
        """Return the prepared comparison as JSON-compatible values."""
        cost = self.full_run.cost
        return {
            "run": self.before.run,
            "job": self.full_run.job,
            "rows": len(self.sample.numbers),
            "total": self.sample.total,
            "whole": {
                "rows": self.full_run.rows,
                "cost": None if cost is None else cost.cost,
                "seconds": self.time.seconds,
                "time": self.time.line(),
                "run_seconds": self.before.seconds,
                "run_rows": self.before.rows,
            },
            "problems": list(self.full_run.problems),
        }


def prepare_diff(resolved: Resolved, run_dir: str, rows: int) -> Prepared:
    """Choose `rows` rows of a run to compare, and predict what a run of the job would take.

    `resolved` is the job to compare, `run_dir` the finished run. Writes nothing and starts nothing.
    Raises `ConfigError` if `rows` is under 1, if the job does not generate text, or if the run's
    result lacks an input column that the job needs. Raises `IncompleteRun` for an unfinished run.
    Can also raise the errors of planning.
    """
    job = resolved.job
    if rows < 1:
        raise ConfigError(f"--sample {rows}: at least one row is compared")
    if pools(job.engine.task):
        raise ConfigError(
            f"engine.task: {job.engine.task} has no answers that are equal or not. Compare jobs "
            "that generate text"
        )
    check_trust(job)
    check_run_place(run_dir)
    options = job.output.options or None
    member = finished_member(open_store(without_link(run_dir), options))
    whole = dry_run(resolved)
    before = load_report(member.ledger.store)
    sample = draw(before, member.plan, options, rows)
    images = dict.fromkeys(job.prompt.images.columns, "prompt.images.columns")
    check_kept(sample, {**images, **job.prompt.columns}, before.run)
    parts = (member.plan.hash, resolved.identity.fingerprint, str(rows))
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    place = join(job.output.uri, f"{DIFF_FOLDER}/{key}")
    rows_asked = whole.rows if whole.reuse is None else whole.reuse.counts.asked
    time = predicted_time(public_job(job), whole.model, rows_asked, member.plan, before)
    changes = _sample_changes(resolved, place, member)
    options = {"source.options": dict(job.output.options)}
    asked = resolve(edited(job, {**changes, **options}, SAMPLE_JOB))
    return Prepared(asked, changes, place, sample, member, before, whole, time)


def _sample_changes(resolved: Resolved, place: str, member: Member) -> dict[str, Any]:
    """Return the changes, {field: value}, that make a job answer the sample in folder `place`.

    The runs of the changed job are written to that folder, too. Store options are not changed here.
    `member` is the run that was sampled. If its raw answers still exist, the changed job reuses
    them.
    """
    job, store = resolved.job, member.ledger.store
    answers = read_answers(store)
    keeps = answers is not None and not answers.expired
    return {
        "source": {
            "uri": join(place, ROWS_FILE),
            "credentials_block": job.output.credentials_block,
            "media_root": job.source.media_root,
        },
        "output.uri": join(place, "runs"),
        "output.columns": [],
        "output.extras": [],
        "output.publish": [],
        "output.keep_answers": None,
        "output.compact": True,
        "limits.min_rows": None,
        "limits.deadline": None,
        "limits.max_failed_rows": None,
        "limits.max_failed_fraction": 1.0,  # failed rows are shown, too
        "quality": {},
        "reuse": store.uri if keeps else None,
    }


def begin_diff(prepared: Prepared) -> Run:
    """Write the sampled rows; plan the run that answers them, or adopt the existing one."""
    job = prepared.sample_job.job
    store = open_store(prepared.place, job.output.options or None)
    store.put_if_absent(ROWS_FILE, prepared.sample.to_parquet())
    return plan_run(prepared.sample_job, DIFF_RUN)


def infer_diff(prepared: Prepared, run: Run, sender: Sender) -> None:
    """Answer the sampled rows here, or as a Ray job if the job names a job server or Kubernetes.

    `sender` has the compared job without the credentials of its blocks, and observes the run.
    """
    options = {"source.options": dict(sender.job.output.options)}
    sent = edited(sender.job, {**prepared.changes, **options}, SAMPLE_JOB)
    infer_in_place(sent, prepared.sample_job.job, run, sender.observe, sender.owner)


def finish_diff(prepared: Prepared, run: Run) -> Diff:
    """Finalize the run over the sample; return how its answers differ from the compared run's.

    Raises `IncompleteRun` if a shard of the sample's run is not committed.
    """
    job, sample = prepared.sample_job.job, prepared.sample
    options = job.output.options or None
    report = finalize_run(job, run)
    old = compile_plan(prepared.member.plan).finish
    new = compile_plan(finished_member(open_store(run.uri, options)).plan).finish
    table = report.to_arrow(options)
    columns = compared_columns(table.column_names, new, ())
    answered = table[new.row_number].to_pylist()
    found = dict(zip(answered, table.select(columns).to_pylist(), strict=True))
    failed = set(report.quarantine(options).to_table(columns=[new.row_number])[0].to_pylist())
    numbers = range(len(sample.numbers))
    answers = [None if number in failed else found.get(number, {}) for number in numbers]
    named = [name for name in job.prompt.columns if name in sample.inputs.column_names]
    inputs = _texts(sample.inputs.select(named or sample.inputs.column_names).to_pylist())
    renamed = {new.column: old.column}
    notes = []
    if job.sampling.temperature > 0:
        notes.append(
            "sampling.temperature is not 0, so some answers differ by chance: compare the "
            "unchanged job too, to see how many"
        )
    return diff_of(
        run=prepared.before.run,
        job=job.name,
        total=sample.total,
        changes=changes_of(sample.numbers, inputs, sample.answers, answers, renamed),
        old=sample.answers,
        new=answers,
        reused=int(report.reuse.get("reused", 0)),
        notes=tuple(notes),
    )


def _texts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return each row's input as text: the value if it has one column, else `name: value` pairs."""
    return [
        ", ".join(f"{name}: {value}" for name, value in row.items())
        if len(row) > 1
        else str(next(iter(row.values()), ""))
        for row in rows
    ]
