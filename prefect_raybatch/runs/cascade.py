"""Plans the first model of a cascade, and tells in the report what each model did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.cluster.cascade import first_answers
from prefect_raybatch.compile.job import public_job
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.ledger.increments import (
    OF_FIRST,
    OF_LARGER,
    Increment,
    asks_ledger,
)
from prefect_raybatch.ledger.record_files import put_table
from prefect_raybatch.ledger.records import JsonObject, load
from prefect_raybatch.plan import image_bytes
from prefect_raybatch.plan.plan import make_plan
from prefect_raybatch.report.records import ModelShare, RunReport
from prefect_raybatch.spec.cascade import CascadeSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.runs.plan_run import RunInput


def plan_first(resolved: Resolved, spec: RunSpec, taken: RunInput) -> JsonObject:
    """Return `Plan.increment` of a cascade, with the tables of its first plan written."""
    plan, named = make_plan(
        spec,
        resolved.identity,
        resolved.with_adapters(),
        public_job(resolved.job),
        "first",
        taken.found.files,
        taken.found.schema,
        image_bytes.row_bytes(
            spec.prompt.images,
            spec.engine.model,
            spec.read,
            resolved.model,
            taken.found,
            taken.snapshot,
        ),
        snapshot=taken.copied,
        engines=sized.engines_to_plan_for(spec.sizes, spec.cluster),
        increment=Increment(ledger=OF_FIRST, context="").to_dict(),
        weights=taken.found.weights,
    )
    ledger = asks_ledger(taken.store)
    for table, data in named.items():
        put_table(ledger.store, table, data)
    plan = replace(plan, parent=None)  # of a retry, the run itself has it
    asks = load(plan.to_bytes(), "the plan of the first model")
    return Increment(ledger=OF_LARGER, context="", asks=asks).to_dict()


def with_shares(
    report: RunReport,
    store: Store,
    increment: Increment,
    cascade: CascadeSpec,
    first: RunReport | None,
) -> RunReport:
    """Return the report with the rows, tokens and cost of each model; `first` is that of its own.

    Notes say which rows the larger model answered, and whether `at_most` left any out.
    """
    if first is None:
        return report
    answers = first_answers(store, increment, cascade)
    unsure, asked = answers.unsure, answers.escalated
    shares = (
        ModelShare(
            cascade.first_name, first.rows, first.rows - asked, _tokens(first), _spent(first)
        ),
        ModelShare(
            cascade.larger_name,
            asked,
            asked,
            _without(_tokens(report), _tokens(first)),
            _without(_spent(report), _spent(first)),
        ),
    )
    note = (
        f"{counted(unsure, 'row')} of {first.rows:,} met output.escalate.when, and "
        f"{cascade.larger_name} was asked about {asked:,}"
    )
    if asked < unsure:
        note += (
            f". output.escalate.at_most ({cascade.at_most:g}) left {unsure - asked:,} to "
            f"{cascade.first_name}, so a guarantee of raybatch tune does not hold for this run"
        )
    return replace(report, cascade=shares, notes=(note, *report.notes))


def with_tokens_of(report: RunReport, first: RunReport | None) -> RunReport:
    """Return the report with the tokens and the seconds of the first model added to its own."""
    if first is None:
        return report
    names = {**report.tokens, **first.tokens}
    tokens = {n: report.tokens.get(n, 0.0) + first.tokens.get(n, 0.0) for n in names}
    seconds = round(report.seconds + first.seconds, 1)
    rate = round(report.rows / seconds, 1) if seconds else report.rows_per_s
    return replace(
        report,
        tokens=tokens,
        seconds=seconds,
        rows_per_s=rate,
        engine_deaths=report.engine_deaths + first.engine_deaths,
    )


def _tokens(report: RunReport) -> dict[str, float]:
    return {name: report.tokens.get(name, 0.0) for name in ("prompt_tokens", "output_tokens")}


def _spent(report: RunReport) -> dict[str, float]:
    return {name: report.cost[name] for name in ("gpu_hours", "total") if name in report.cost}


def _without(both: Mapping[str, float], first: Mapping[str, float]) -> dict[str, float]:
    """Return what the larger model took of the figures of both."""
    return {name: max(0.0, value - first.get(name, 0.0)) for name, value in both.items()}
