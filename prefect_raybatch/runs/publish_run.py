"""Publishes a finished run to the targets of its job, and updates its report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prefect_raybatch.errors import ConfigError, IncompleteRun
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.job.variables import VARIABLE
from prefect_raybatch.ledger.family import Member
from prefect_raybatch.ledger.forks import key_to_continue
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.finalize_run import load_report, put_pages
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import Store


def finished_member(store: Store) -> Member:
    """Return the run in the directory `store`; raise `IncompleteRun` if it is not finished."""
    ledger = Ledger(store)
    plan = need_plan(ledger)
    success = ledger.finished(plan)
    if success is None:
        raise IncompleteRun(
            f"{store.uri} is not finished, so it cannot be published. Finish it with the command "
            f"that started it: raybatch run JOB --run-key {key_to_continue(store.above(), plan)}"
        )
    return Member(plan.run_key, ledger, plan, success)


def publish_member(
    member: Member,
    targets: Sequence[PublishTarget],
    options: StoreOptions,
    observe: Callable[[str], None],
) -> RunReport:
    """Publish a finished run to each target that does not have it yet; return its updated report.

    `options` open the store with the run. `observe` is called with texts on the progress. Raises
    `ConfigError` if there is no target or the run cannot be published to one, and `PublishFailed`
    (worth a retry) if a target fails.
    """
    from prefect_raybatch.publish.publish import publish

    store = member.ledger.store
    if not targets:
        raise ConfigError(
            f"{store.uri}: the job has no `output.publish`, so there is nowhere to publish to. Add "
            "a target to the job file and pass it with --job"
        )
    if member.summary is not None and not member.summary.compact:
        raise ConfigError(
            f"{store.uri} was written with `output.compact: false`, and publishing needs data/. "
            "Run the job with `compact: true`"
        )
    try:
        publish(member, targets, options, observe)
    finally:
        _update_pages(member.ledger)
    return load_report(store)


def targets_text(targets: Sequence[PublishTarget], run_key: str) -> str:
    """Return the targets as text, one per line: name, format, location and mode.

    A line also names the environment variables that a target's URI or catalog settings use.
    """
    lines = []
    for target in targets:
        named = [target.uri or "", *map(str, target.catalog.values())]
        sent = sorted({name for text in named for name in VARIABLE.findall(text)})
        with_variables = f", with the variables {', '.join(sent)}" if sent else ""
        lines.append(
            f"  {target.label}: {target.format} {target.place(run_key)} ({target.mode})"
            f"{with_variables}"
        )
    return "\n".join(lines)


def _update_pages(ledger: Ledger) -> None:
    """Rewrite the report's Markdown and HTML with the targets published so far, if any."""
    made = load_report(ledger.store)
    if made.published:
        put_pages(ledger.store, made)
