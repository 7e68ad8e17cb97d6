"""Retries the failed rows of a finished run in a child run.

A finished run never changes: its failed rows are copied from its quarantine into the child as a
snapshot, with their row numbers, and no two children of a run take the same row. From there on, a
child is a run like any other.
"""

from __future__ import annotations

import shlex
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.compile.public_job import public_job
from prefect_raybatch.compile.resolved import Resolved, resolve
from prefect_raybatch.errors import ConfigError, CorruptRun, PlanMismatch
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.cluster import LOCAL
from prefect_raybatch.job.edits import edited
from prefect_raybatch.job.job_file import with_fields
from prefect_raybatch.job.limits import FAILED_LIMITS
from prefect_raybatch.job.run_words import with_dated_targets
from prefect_raybatch.job.secrets import hide_path
from prefect_raybatch.job.trusted_places import check_store_options
from prefect_raybatch.ledger.family import Family, Member, load_family, place
from prefect_raybatch.ledger.increments import OF_ASKS, increment_of
from prefect_raybatch.ledger.layout import QUARANTINE_FOLDER
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.plan_tables import decode_schema
from prefect_raybatch.ledger.published import all_published
from prefect_raybatch.ledger.record_files import put_record_if_absent, read_record
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.row_numbers import among, numbers_table
from prefect_raybatch.plan import plan as planning
from prefect_raybatch.plan import prompt_lengths as tokens
from prefect_raybatch.publish.planned import check_targets_of
from prefect_raybatch.result.rows import quarantine_of
from prefect_raybatch.runs.new_plan import RunInput, new_plan
from prefect_raybatch.runs.plan_run import check_schema_names
from prefect_raybatch.runs.run import Run, run_of
from prefect_raybatch.storage import open_store

Keys = Callable[[BatchJob], BatchJob]  # puts keys from credentials blocks into store options
# What a job says of where keys and rows are sent: a run directory, which others may write to, does
# not decide it.
FROM_OPERATOR = ("output.publish", "cluster.address", "cluster.job_server", "cluster.kubernetes")
FIXED_BY_PARENT = "the rows come from the run's quarantine, and the retry is written beside the run"


@dataclass(frozen=True)
class Retry:
    """A planned child run: infer and finalize take its `job` and `run`."""

    job: BatchJob
    run: Run
    parent: str


@dataclass(frozen=True)
class Nothing:
    """No row is left to retry; `message` says why that is fine."""

    run: str
    message: str


@dataclass(frozen=True)
class RetryRequest:
    """A retry that can begin: `job` is the child's, `going` the unfinished run that it continues,
    and `selection` ({parent, errors}) its rows. `limited`: a limit on failed rows is among the
    given fields. `known` is the job with credentials, resolved."""

    family: Family
    parent: Member
    job: BatchJob
    known: Resolved
    selection: Mapping[str, Any]
    going: Member | None
    limited: bool


def plan_retry(
    run_dir: str,
    errors: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    job: BatchJob | None = None,
    keys: Keys = lambda job: job,
) -> Retry | Nothing:
    """Plan the child run that retries failed rows of `run_dir`, or resume it.

    `errors` are error classes; by default all failed rows that no other child has taken. The job is
    the run's own or `job`, with the fields in `overrides` ({"sampling.max_tokens": 99}) replaced.
    Without `job`, the fields of `FROM_OPERATOR` come only from `overrides`. All rows of the child
    may fail again, unless `overrides` limits failed rows: they already count against the limit of
    their own run. Raises like `retry_request`, and `PlanMismatch` if another retry of these rows
    began at the same moment.
    """
    asked = retry_request(run_dir, errors, overrides, job, keys)
    return asked if isinstance(asked, Nothing) else begin(asked)


def begin(asked: RetryRequest) -> Retry | Nothing:
    """Create the child run of a request, or resume it; see `plan_retry`."""
    if asked.going is not None:
        ledger, plan = asked.going.ledger, asked.going.plan
    else:
        made = _new_child(asked)
        if isinstance(made, Nothing):
            return made
        ledger, plan = made
    _same_types(asked, ledger)
    run = run_of(ledger.store, plan, ledger, probed=asked.going is None)
    job = asked.job
    if not asked.limited:
        unlimited = {f"limits.{name}": None for name in FAILED_LIMITS}
        job = edited(job, {**unlimited, "limits.max_failed_rows": plan.rows}, "the retry's job")
    return Retry(job, run, asked.parent.key)


def retry_request(
    run_dir: str,
    errors: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    job: BatchJob | None = None,
    keys: Keys = lambda job: job,
) -> RetryRequest | Nothing:
    """Return what a retry would be, from the records alone: writes nothing and reads no row.

    Raises `ConfigError` for an unfinished run, an invalid job, a class in `errors` that no failed
    row has, and rows that another retry has taken and not answered; `CorruptRun` if runs related to
    this one are unreadable.
    """
    overrides = dict(overrides or {})
    root, key = place(run_dir, _options(run_dir, overrides, job, keys))
    family = load_family(root, key)
    if family.strays:
        raise CorruptRun("\n".join(family.strays))
    parent = family.members[key]
    where = parent.ledger.store.uri
    increment = increment_of(parent.plan)
    if increment is not None and increment.ledger == OF_ASKS:
        raise ConfigError(
            f"{where} holds what a run asked, not its rows; retry the failed rows of the run itself"
        )
    if parent.summary is None:
        raise ConfigError(
            f"{where} is not finished: finish it first, with the command it was begun with; "
            "failed rows are only final then"
        )
    selection = {"parent": key, "errors": sorted(set(errors)) if errors else None}
    if not parent.failed:
        return Nothing(where, f"no row of {key} failed; there is nothing to retry")
    if errors:
        _check_classes(parent, errors)
    child = _job(parent, root.uri, overrides, job)
    known = resolve(keys(child), selection)
    going = None
    for member in family.children(key):
        if member.plan.fingerprint == known.identity.fingerprint and (
            member.summary is None or _missing_targets(member)
        ):
            going = member  # the newest
    if going is None and family.is_taken(parent):
        return _all_taken(family, parent, family.children(key))
    if job is None:
        _check_operators(parent, overrides)
    check_schema_names(known.job.output)
    schema = decode_schema(parent.plan.input_schema)
    spec = compile_job(known.job, schema.names)
    planning.check_against_schema(spec, schema)
    check_targets_of(spec, schema, family.next_key, later=True)
    limited = {"limits", *(f"limits.{name}" for name in FAILED_LIMITS)} & set(overrides)
    return RetryRequest(family, parent, child, known, selection, going, bool(limited))


def planned_targets(
    run_dir: str, overrides: Mapping[str, Any], keys: Keys = lambda job: job
) -> list[dict[str, Any]]:
    """Return output.publish as in the plan of a run, for a user who has reviewed it."""
    store = open_store(run_dir, _options(run_dir, overrides, None, keys))
    return list(need_plan(Ledger(store)).job.get("output", {}).get("publish", ()))


def operator_fields(plan: Plan) -> dict[str, str]:
    """Return the targets and the cluster that the plan of a run names, by field. A retry takes them
    from its caller, because a run directory does not decide where rows and keys are sent."""
    from prefect_raybatch.runs.publish_run import targets_text

    job = BatchJob.from_dict(plan.job, f"the job of {plan.run_key}")
    cluster = job.cluster
    named = {
        "output.publish": targets_text(job, plan.run_key).replace("\n", "; ").strip(),
        "cluster.address": cluster.address if cluster.address not in (LOCAL, "auto") else None,
        "cluster.job_server": cluster.job_server,
        "cluster.kubernetes": cluster.kubernetes.asked and "a cluster of the run's own",
    }
    return {field: str(named[field]) for field in FROM_OPERATOR if named[field]}


def options_of_retry(plan: Plan) -> list[str]:
    """Return the options that `raybatch retry-failed` needs for a run, if its job file is not at
    hand: `--job JOB`, for the user to fill in, or none."""
    return ["--job", "JOB"] if operator_fields(plan) else []


def _check_operators(parent: Member, overrides: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for targets and clusters that only the plan of the run names."""
    lines = [
        f"  {field}: {hide_path(value)}"
        for field, value in operator_fields(parent.plan).items()
        if not {field, field.partition(".")[0]} & set(overrides)
    ]
    if lines:
        raise ConfigError(
            f"{parent.ledger.store.uri}: name the job with --job JOB. A run directory does not "
            "decide where rows and keys are sent, and this one names:\n"
            + "\n".join(lines)
            + "\nTo take these, look at each and give it with --set FIELD=VALUE; the targets also "
            "with --targets-from-plan"
        )


def _check_classes(parent: Member, errors: Sequence[str]) -> None:
    """Raise `ConfigError` that names the existing classes if no failed row has one of `errors`.

    The commits tell; the report names only the most common failures.
    """
    classes: Counter[str] = Counter()
    ledger, plan = parent.ledger, parent.plan
    for commit in ledger.commits(plan, ledger.listing(plan)):
        for failure, rows in commit.failures.items():
            classes[failure.error] += rows
    unknown = sorted(set(errors) - set(classes))
    if unknown:
        known = ", ".join(f"{kind} ({rows:,})" for kind, rows in classes.most_common())
        raise ConfigError(
            f"no row of {parent.key} failed with {', '.join(unknown)}; the classes there are: "
            f"{known}"
        )


def _options(
    run_dir: str, overrides: Mapping[str, Any], job: BatchJob | None, keys: Keys
) -> dict[str, Any] | None:
    """Return the store options to reach the run with: those that the caller gives for `output`. Its
    own job is not read yet, and holds no credentials."""
    value = job.to_dict().get("output", {}) if job is not None else {}
    given = {name: v for name, v in overrides.items() if name.partition(".")[0] == "output"}
    output = with_fields({"output": value}, given)["output"]
    if not isinstance(output, dict):
        raise ConfigError(f"output: {output!r} is no group of fields")
    reach = {name: output[name] for name in ("options", "credentials_block") if name in output}
    stub = {"name": "retry", "source": {"uri": "-"}, "prompt": {"template": "-"}}
    whole = BatchJob.from_dict({**stub, "output": {**reach, "uri": run_dir}}, "the job's output")
    options = keys(whole).output.options
    check_store_options("output.options", options)
    return options or None


def _job(parent: Member, root: str, overrides: Mapping[str, Any], job: BatchJob | None) -> BatchJob:
    """Return the child's job. Store options come only from the caller: a plan holds none, and one
    planted there must not decide where this machine's credentials are sent."""
    for name in overrides:
        if name in ("source", "output", "output.uri") or (
            name.startswith("source.") and name != "source.rows_per_shard"
        ):
            raise ConfigError(f"{name} cannot be set for a retry: {FIXED_BY_PARENT}")
    told = f"the job of {parent.key}" if job is None else "the job given"
    if job is None:
        value = public_job(BatchJob.from_dict(parent.plan.job, told))
    else:
        value = job.to_dict()
    made = BatchJob.from_dict(with_fields(value, overrides), told)
    source = {
        "uri": f"{parent.ledger.store.uri}/{QUARANTINE_FOLDER}",
        "format": "parquet",
        "rows_per_shard": made.source.rows_per_shard,
    }
    changed = made.to_dict() | {"source": source}
    changed["output"] = {**changed["output"], "uri": root}
    return with_dated_targets(BatchJob.from_dict(changed, told), parent.key)


def _new_child(asked: RetryRequest) -> tuple[Ledger, Plan] | Nothing:
    """Create a child with the requested free rows, with the next key."""
    from prefect_raybatch import source

    family, parent = asked.family, asked.parent
    children = family.children(parent.key)
    ledger = Ledger(family.root.sub(family.next_key))
    ledger.store.probe()
    rows = _FailedRows(parent, asked.selection["errors"], children)
    attempt = uuid.uuid4().hex
    found = source.snapshot_tables(rows.tables, ledger.store, attempt)
    numbers = rows.numbers()
    if not len(numbers):
        return _all_taken(family, parent, rows.takers())
    taken = RunInput(found, ledger.store, attempt, copied=True)
    resolved = _as_parent(asked.known, parent.plan)
    spec = compile_job(resolved.job, found.schema.names)
    context = None
    if spec.engine.model.context_auto:  # these are other rows, often the long ones
        lengths = tokens.of_files(spec, resolved.model, found, ledger.store)
        before = (parent.plan.context or {}).get("max_model_len", 0)
        if spec.reuse.keeps and before > lengths.max_model_len:  # so that its answers are reused
            lengths = replace(lengths, max_model_len=before)
        context, spec = lengths.context(), spec.decide(context=lengths.max_model_len)
    # Failures are not stored, so there are no answers that these rows could reuse.
    plan, tables = new_plan(
        resolved, spec, family.next_key, taken, context, numbers_table(numbers), earlier=False
    )
    try:
        return ledger, ledger.create_plan(plan, tables)
    except PlanMismatch:
        raise PlanMismatch(
            f"another retry of failed rows of {parent.key} began as {family.next_key} at the same "
            "moment; run this again, and it takes the rows that are left under the next key"
        ) from None


class _FailedRows:
    """The requested free failed rows of a run, and findings on the way."""

    def __init__(self, parent: Member, errors: list[str] | None, children: Sequence[Member]):
        self.parent, self.errors = parent, errors
        self.children = {member.key: member for member in children}
        self.taken = {m.key: m.ledger.numbers(m.plan).all() for m in children}
        every = np.concatenate([np.zeros(0, np.int64), *self.taken.values()])
        self.all_taken = np.sort(every)
        self.schema = decode_schema(parent.plan.input_schema)
        self._begin()

    def _begin(self) -> None:
        self.asked: list[np.ndarray] = []
        self.free: list[np.ndarray] = []

    def tables(self) -> Iterator[tuple[str, pa.Table]]:
        """Yield (file, input rows)."""
        import pyarrow.compute as pc

        from prefect_raybatch.source.snapshot_writer import conform

        self._begin()
        last = -1
        for where, numbers, table in quarantine_of(self.parent, ["error", "input"]):
            if not len(numbers):
                continue
            if numbers[0] <= last or (np.diff(numbers) <= 0).any():
                raise CorruptRun(f"{where}: failed rows are not in the order of their numbers")
            last = int(numbers[-1])
            kinds = table["error"]
            mask = np.ones(len(numbers), bool)
            if self.errors is not None:
                mask = pc.is_in(kinds, pa.array(self.errors)).to_numpy()
            self.asked.append(numbers[mask])
            mask &= ~among(self.all_taken, numbers)
            if mask.any():
                self.free.append(numbers[mask])
                rows = pa.Table.from_struct_array(table["input"].filter(pa.array(mask)))
                yield where, conform(rows, self.schema)

    def numbers(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int64), *self.free])

    def takers(self) -> list[Member]:
        """Return the children that have taken requested rows."""
        asked = np.concatenate([np.zeros(0, np.int64), *self.asked])
        return [self.children[k] for k, rows in self.taken.items() if among(rows, asked).any()]


def _missing_targets(member: Member) -> list[str]:
    """Return the targets in the plan of a finished run to which no record says it was published: a
    kill after `_SUCCESS`, or a target that rejected the rows, leaves some."""
    job = BatchJob.from_dict(member.plan.job, f"the job of {member.key}")
    published = {record.target for record in all_published(member.ledger.store)}
    return [target.label for target in job.output.publish if target.label not in published]


def _all_taken(family: Family, parent: Member, takers: Sequence[Member]) -> Nothing:
    """Return that all rows are in other retries already, or raise `ConfigError` with what to do."""
    here = family.root.uri
    ends = [end for taker in takers for end in _ends(family, taker)]
    said = f"the failed rows of {parent.key} have been taken by "
    said += ", ".join(member.key for member in takers)
    for member in ends:
        if member.summary is None:
            raise ConfigError(
                f"{said}; {member.key} is not finished. Finish it with the command it was begun "
                "with or, if that cannot work and nothing works on it any more, delete "
                f"{here}/{member.key} whole"
            )
    for member in ends:
        if missing := _missing_targets(member):
            raise ConfigError(
                f"{said}; {member.key} is finished and not published to {', '.join(missing)}. "
                f"Publish it:\n  raybatch publish {here}/{member.key} --job JOB"
            )
    again = [member for member in ends if member.failed]
    if again:
        todo = "\n".join(
            f"  {_retry_command(here, member)}   ({member.failed:,} failed)" for member in again
        )
        raise ConfigError(f"{said}, and some failed again; retry those:\n{todo}")
    return Nothing(parent.ledger.store.uri, f"{said}; none is left that failed")


def _retry_command(root: str, member: Member) -> str:
    words = ["raybatch", "retry-failed", f"{root}/{member.key}", *options_of_retry(member.plan)]
    return shlex.join(words)


def _ends(family: Family, member: Member) -> list[Member]:
    """Return where the failed rows of `member` are now: there, or in the runs that took all of
    them."""
    children = family.children(member.key)
    if member.summary is None or not children or not family.is_taken(member):
        return [member]
    return [end for child in children for end in _ends(family, child)]


def _as_parent(resolved: Resolved, parent: Plan) -> Resolved:
    """Return it pinned. A Hugging Face name stays at the parent's commit, because the results form
    one table and the name may refer to another commit by now."""
    before = BatchJob.from_dict(parent.job, "the parent's job").engine
    now = resolved.job.engine
    same = (now.model, now.revision) == (before.model, before.revision)
    if resolved.known is None and same:
        return replace(resolved, known=parent.model)
    return resolved.pinned()


def _same_types(asked: RetryRequest, ledger: Ledger) -> None:
    """Give the child the output types that the parent's first shard fixed, because the results form
    one table. The first to write them fixes them, as in any run."""
    from prefect_raybatch.ledger.layout import OUTPUT_SCHEMA

    before = asked.parent.plan.job.get("output", {}).get("postprocess")
    output = asked.known.job.output
    if output.postprocess is None or output.output_schema or output.postprocess != before:
        return
    with suppress(FileNotFoundError):  # no row of the parent got through its postprocess
        types = read_record(asked.parent.ledger.store, OUTPUT_SCHEMA)
        put_record_if_absent(ledger.store, OUTPUT_SCHEMA, types)
