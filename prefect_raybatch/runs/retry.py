"""Retries the failed rows of a finished run in a child run.

The finished run does not change: its failed rows are copied from its quarantine into the child as a
snapshot, with their row numbers. No two children of a run take the same row. Apart from this, a
child is an ordinary run.
"""

from __future__ import annotations

import logging
import shlex
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from prefect_raybatch.compile.job import compile_job, planned_job
from prefect_raybatch.compile.resolved import KnownModels, Resolved
from prefect_raybatch.errors import ConfigError, CorruptRun, HubUnavailable, PlanMismatch
from prefect_raybatch.job.cluster import LOCAL
from prefect_raybatch.job.edits import larger_of
from prefect_raybatch.job.output import Output
from prefect_raybatch.ledger.family import Family, Member, load_family
from prefect_raybatch.ledger.forks import follow_forks
from prefect_raybatch.ledger.increments import increment_of, is_first_phase
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import decode_schema
from prefect_raybatch.ledger.published import unpublished_labels
from prefect_raybatch.ledger.record_files import put_record_if_absent, read_record
from prefect_raybatch.ledger.records import JsonObject, Plan, dump
from prefect_raybatch.ledger.row_numbers import among, numbers_table
from prefect_raybatch.plan import prompt_lengths as tokens
from prefect_raybatch.result.rows import failed_numbers, quarantine_of
from prefect_raybatch.runs.plan_run import RunInput, new_plan, with_checked_models
from prefect_raybatch.runs.retry_share import share_of_retry
from prefect_raybatch.sizing.sizes import check_step
from prefect_raybatch.storage import Store

log = logging.getLogger(__name__)

# Job fields that say where keys and rows are sent. They come from the caller, not from a plan,
# because others may write to the run directory. The key of an endpoint is never in a plan.
FROM_OPERATOR = (
    *("output.publish", "cluster.address", "cluster.job_server", "cluster.kubernetes"),
    *("cluster.block", "engine.endpoint.block", "engine.endpoint.url"),
    "output.escalate.to.endpoint.url",
)


@dataclass(frozen=True)
class NothingToRetry:
    """The outcome of a retry request if no row is left to retry; `message` says why."""

    run: str
    message: str


def retried_run(root: Store, key: str) -> tuple[Family, Member]:
    """Return (family, run) of the finished run `key` below `root`; its retries are in the family.

    So are the retries of damaged runs that it continues. Raises `ConfigError` if the run is not
    finished or is a requests phase, `CorruptRun` if a run of the family is unreadable.
    """
    family = load_family(root, key)
    family.read_former()
    if family.strays:
        raise CorruptRun(
            "the rows that these retries took are unknown, so none can be retried:\n"
            + "".join(f"  {stray}\n" for stray in family.strays)
            + f"Restore the folders of these runs in {root.uri}"
        )
    parent = family.members[key]
    where = parent.ledger.store.uri
    if is_first_phase(parent.plan):
        raise ConfigError(
            f"{where} holds the requests of a run, not its rows. Retry the failed rows "
            "of the run itself"
        )
    if parent.summary is None:
        raise ConfigError(
            f"{where} is not finished, so its failed rows are not final. Finish it first, with the "
            "command that started it"
        )
    return family, parent


def unfinished_retry(family: Family, key: str, fingerprint: str) -> Member | None:
    """Return the newest unfinished retry of run `key` with `fingerprint`; None if there is none.

    A retry that is not yet published to all targets in its plan counts as unfinished.
    """
    unfinished = None
    for member in family.children(key):
        if member.plan.fingerprint == fingerprint and (
            member.summary is None or _missing_targets(member)
        ):
            unfinished = member
    return unfinished


def operator_fields(plan: Plan) -> dict[str, str]:
    """Return {job field: text} of the targets, cluster and hosted models that a run's plan names.

    A retry takes these fields from its caller and not from the plan. Others may write to a run
    directory, and they must not decide where rows and keys are sent.
    """
    from prefect_raybatch.runs.publish_run import targets_text

    job = planned_job(plan)
    cluster, targets = job.cluster, targets_text(job.output.publish, plan.run_key)
    endpoint, larger = job.engine.endpoint, job.output.escalate.engine
    named = {
        "output.publish": targets.replace("\n", "; ").strip(),
        "cluster.address": cluster.address if cluster.address not in (LOCAL, "auto") else None,
        "cluster.job_server": cluster.job_server,
        "cluster.kubernetes": cluster.kubernetes.asked and "a cluster of the run's own",
        "cluster.block": cluster.block,
        "engine.endpoint.block": endpoint.block,
        "engine.endpoint.url": endpoint.url,
        "output.escalate.to.endpoint.url": larger and larger.endpoint.url,
    }
    return {field: str(named[field]) for field in FROM_OPERATOR if named[field]}


def check_not_repaired(parent: Member) -> None:
    """Raise `ConfigError` if another run continues `parent`: its retries take the failed rows."""
    later, plan = follow_forks(parent.ledger, parent.plan)
    if plan is not parent.plan:
        command = shlex.join(["raybatch", "retry-failed", later.store.uri, *options_of_retry(plan)])
        raise ConfigError(
            f"{parent.ledger.store.uri} was repaired, and {plan.run_key} continues it. Retry the "
            f"failed rows of that run, once it is finished:\n  {command}"
        )


def options_of_retry(plan: Plan) -> list[str]:
    """Return the options that `raybatch retry-failed` needs for this run.

    These are `--job JOB`, with JOB for the user to fill in, if the plan names publish targets, a
    cluster or the server of a hosted model; else none.
    """
    return ["--job", "JOB"] if operator_fields(plan) else []


def check_classes(parent: Member, errors: Sequence[str]) -> None:
    """Raise `ConfigError` if `errors` has an error class with which no row of the run failed.

    The message names the classes with which rows failed. Reads the commits, because the report
    names only the most common failures.
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
            f"no row of {parent.key} failed with {', '.join(unknown)}. Its rows failed with: "
            f"{known}"
        )


def new_child(
    family: Family, parent: Member, resolved: Resolved, selection: JsonObject
) -> tuple[Ledger, Plan] | NothingToRetry:
    """Create a retry of run `parent`, from failed rows that no other retry has taken.

    `selection["errors"]` are the error classes of the rows, None for all. Returns the (ledger,
    plan) of the retry. If no row is left, returns why. Raises `ConfigError` if a retry of these
    rows has to be finished, published or retried instead. Raises `PlanMismatch` if another retry
    began at the same moment.
    """
    from prefect_raybatch import source

    resolved = _checked(resolved.pinned(_models_of(parent.plan)))
    children = family.takers(parent.key)
    ledger = Ledger(family.root.sub(family.next_key))
    ledger.store.probe()
    rows = FailedRows(parent, selection["errors"], children)
    attempt = uuid.uuid4().hex
    found = source.snapshot_tables(rows.tables, ledger.store, attempt)
    numbers = rows.numbers()
    if not len(numbers):
        return require_all_retried(family, parent, rows.takers())
    taken = RunInput(found, ledger.store, attempt, copied=True)
    spec = compile_job(resolved.job, found.schema.names)
    context = None
    if spec.engine.model.context_auto:  # failed rows are often the long ones
        lengths = tokens.of_files(spec, resolved.model, found, ledger.store)
        before = (parent.plan.context or {}).get("max_model_len", 0)
        if spec.reuse.keeps and before > lengths.max_model_len:  # so that its answers are reused
            lengths = replace(lengths, max_model_len=before)
        check_step(spec.sizes, lengths.max_model_len)
        context, spec = lengths.context(), spec.decide(context=lengths.max_model_len)
    share = share_of_retry(family, spec.cascade, numbers)
    # Failures are not stored, so there are no answers that these rows could reuse.
    plan, tables = new_plan(
        *(resolved, spec, family.next_key, taken, context),
        numbers_table(numbers),
        earlier=False,
        share=None if share is None else share[0],
    )
    if share is not None:
        tables[share[0].table] = share[1]
    try:
        return ledger, ledger.create_plan(plan, tables)
    except PlanMismatch:
        raise PlanMismatch(
            f"another retry of failed rows of {parent.key} began as {family.next_key} at the same "
            "time. Run this again to retry the remaining rows"
        ) from None


class FailedRows:
    """The failed rows of a run that no retry in `children` has taken.

    `errors` are the error classes of the rows to take, None for all. Read `tables` to its end
    before `numbers` or `takers`.
    """

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
        """Yield (quarantine file, the input rows in it to retry).

        Raises `CorruptRun` unless the failed rows are in the order of their row numbers.
        """
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
        """Return the ascending row numbers (int64) of the rows that `tables` yielded."""
        return np.concatenate([np.zeros(0, np.int64), *self.free])

    def takers(self) -> list[Member]:
        """Return the retries that have taken failed rows of the requested classes."""
        asked = np.concatenate([np.zeros(0, np.int64), *self.asked])
        return [self.children[k] for k, rows in self.taken.items() if among(rows, asked).any()]


def _missing_targets(member: Member) -> list[str]:
    """Return the names of the targets in a finished run's plan to which it is not published yet."""
    return unpublished_labels(member.ledger.store, planned_job(member.plan).output.publish)


def require_all_retried(family: Family, parent: Member, takers: Sequence[Member]) -> NothingToRetry:
    """Return `NothingToRetry` if the retries `takers` answered all rows that they took.

    A row that failed there may also have been answered by a retry of the retry, and so on. The last
    retry of each such chain must be finished and published. Otherwise raises `ConfigError`, which
    says which retry to finish, publish or retry.
    """
    here = family.root.uri
    failed = failed_numbers(parent)
    ends = [end for taker in takers for end in _ends(family, taker, failed)]
    said = f"the failed rows of {parent.key} are already retried by "
    said += ", ".join(member.key for member in takers)
    for member, _ in ends:
        if member.summary is None:
            raise ConfigError(
                f"{said}; {member.key} is not finished. Finish it with the command that started "
                "it or, if that cannot work and no process works on it, delete the folder "
                f"{here}/{member.key}"
            )
    for member, _ in ends:
        if missing := _missing_targets(member):
            raise ConfigError(
                f"{said}; {member.key} is finished and not published to {', '.join(missing)}. "
                f"Publish it:\n  raybatch publish {here}/{member.key} --job JOB"
            )
    again = [(member, rows) for member, rows in ends if rows]
    if again:
        todo = "\n".join(
            f"  {_retry_command(here, member)}   ({rows:,} failed)" for member, rows in again
        )
        raise ConfigError(f"{said}, and some failed again. Retry those:\n{todo}")
    return NothingToRetry(parent.ledger.store.uri, f"{said}, and none failed again")


def takers_of_all(family: Family, parent: Member) -> list[tuple[Member, int]]:
    """Return the retries of a finished run, each with the number of rows that failed there again.

    The number is 0 for an unfinished retry. If `parent` is a repaired run, retries of the damaged
    run count as its retries. Only rows that failed in `parent` are then counted. Returns [] if some
    failed rows of the run are in no retry.
    """
    children = family.children(parent.key)
    if family.is_fully_retried(parent):
        return [(child, child.failed if child.summary else 0) for child in children]
    if len(takers := family.takers(parent.key)) == len(children):
        return []
    failed = failed_numbers(parent)
    found, free = [], failed
    for taker in takers:
        taken = taker.ledger.numbers(taker.plan).all()
        if among(taken, failed).any():
            again = failed_numbers(taker) if taker.summary else taken[:0]
            found.append((taker, int(among(failed, again).sum())))
            free = free[~among(taken, free)]
    return [] if len(free) else found


def _retry_command(root: str, member: Member) -> str:
    words = ["raybatch", "retry-failed", f"{root}/{member.key}", *options_of_retry(member.plan)]
    return shlex.join(words)


def _ends(family: Family, member: Member, rows: np.ndarray) -> list[tuple[Member, int]]:
    """Return the last runs that retry the failed rows of `member`, as far as these are in `rows`.

    If retries took all these rows, returns the last retry of each chain, which may be unfinished.
    Otherwise returns `member` itself. Each run comes with the number of these rows that failed
    there, 0 for an unfinished run.
    """
    if member.summary is None or not member.failed:
        return [(member, 0)]
    failed = failed_numbers(member)
    failed = failed[among(rows, failed)]
    free, ends = failed, []
    for child in family.children(member.key):
        taken = child.ledger.numbers(child.plan).all()
        if among(taken, failed).any():
            free = free[~among(taken, free)]
            ends += _ends(family, child, failed)
    return [(member, len(failed))] if len(free) or not ends else ends


def _models_of(plan: Plan) -> KnownModels:
    """Return the pinned models of a run; in a cascade, of both its models.

    A retry pins a Hugging Face model of the same name and revision as its parent did: the name may
    refer to another commit by now, and the results of both runs form one table.
    """
    increment = increment_of(plan)
    asks = None if increment is None else increment.asks
    plans = (plan,) if asks is None else (plan, Plan.from_bytes(dump(asks)))
    return {
        (str(one.model["source"]), larger_of(planned_job(one)).engine.revision): {
            name: value for name, value in one.model.items() if name != "adapters"
        }
        for one in plans
    }


def _checked(resolved: Resolved) -> Resolved:
    """Check that the models fit the job, unless the Hugging Face Hub is away (logged)."""
    try:
        return with_checked_models(resolved)
    except HubUnavailable as error:  # engines may have the model in their cache
        log.warning("the model is not checked: %s", error)
        return resolved


def copy_output_types(parent: Member, output: Output, child: Ledger) -> None:
    """Copy the column types of output.postprocess, fixed by the parent's first shard, to the child.

    The results of both form one table. Does nothing if the child has another postprocess or an
    output.schema, or if the parent fixed no types.
    """
    from prefect_raybatch.ledger.layout import OUTPUT_SCHEMA

    before = parent.plan.job.get("output", {}).get("postprocess")
    if output.postprocess is None or output.output_schema or output.postprocess != before:
        return
    with suppress(FileNotFoundError):  # no row of the parent got through its postprocess
        types = read_record(parent.ledger.store, OUTPUT_SCHEMA)
        put_record_if_absent(child.store, OUTPUT_SCHEMA, types)
