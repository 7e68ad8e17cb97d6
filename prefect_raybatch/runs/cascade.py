"""Adds to a cascade's report the rows, tokens and cost of each model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from prefect_raybatch.cluster.cascade import first_answers
from prefect_raybatch.compile.job import compile_plan
from prefect_raybatch.ledger.increments import OF_LARGER, Increment, increment_of
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.stats import (
    AGREED,
    CHECKED,
    LARGER_ANSWERED,
    LARGER_FAILED,
    UNANSWERED,
)
from prefect_raybatch.report.records import ModelShare, RunReport
from prefect_raybatch.sizing.agreement import unanswered_text
from prefect_raybatch.spec.cascade import CascadeSpec
from prefect_raybatch.stages.cascade import FirstAnswers, failing_kinds
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted


def with_shares(
    report: RunReport,
    store: Store,
    plan: Plan,
    cascade: CascadeSpec,
    first: RunReport | None,
    figures: Mapping[str, float],
) -> RunReport:
    """Return a cascade's report with the rows, tokens and cost of each model.

    `report` has the totals of both models. `first` is the report of the first model alone; if it is
    None, `report` is returned unchanged. `figures` are counts of the run by name, such as checked
    rows. Adds notes: how many rows the larger model was asked about, how many rows
    output.escalate.at_most kept from it, and on how many checked rows both models agree.
    """
    increment = increment_of(plan)
    if first is None or increment is None:
        return report
    answers = first_answers(store, increment, cascade, plan)
    answered, failed = (int(figures.get(n, 0)) for n in (LARGER_ANSWERED, LARGER_FAILED))
    shares = (
        ModelShare(
            *(cascade.first_name, first.rows, report.good - answered, report.failed - failed),
            *(_tokens(first), _spent(first)),
            *(int(figures.get(name, 0)) for name in (CHECKED, AGREED, UNANSWERED)),
        ),
        ModelShare(
            *(cascade.larger_name, answers.asked, answered, failed),
            _without(_tokens(report), _tokens(first)),
            _without(_spent(report), _spent(first)),
        ),
    )
    notes = (_escalation(cascade, increment, answers, first.rows), *_agreement(*shares))
    return replace(report, cascade=shares, notes=(*notes, *report.notes))


def _escalation(
    cascade: CascadeSpec, increment: Increment, answers: FirstAnswers, rows: int
) -> str:
    """Return the note on how many of the run's `rows` the larger model was asked about, and why."""
    unsure, asked = answers.unsure, answers.escalated
    note = (
        f"{counted(unsure, 'row')} of {rows:,} met output.escalate.when, and "
        f"{cascade.larger_name} was asked about {asked:,}"
    )
    if answers.asked > asked:
        note += f", and about {answers.asked - asked:,} more to check"
    if asked < unsure:
        share = f"{cascade.at_most:g}"
        if increment.share is not None:
            share += (
                f" of the first run's {counted(increment.share.rows, 'row')}, over that run and "
                "all its retries"
            )
        note += (
            f". output.escalate.at_most ({share}) left {unsure - asked:,} to "
            f"{cascade.first_name}, so a guarantee of raybatch tune does not hold for this run"
        )
    return note


def passed_on(plan: Plan) -> frozenset[str]:
    """Return the error classes for which a cascade's larger model takes over failed rows.

    Empty for a run that is no cascade.
    """
    increment = increment_of(plan)
    if increment is None or increment.ledger != OF_LARGER:
        return frozenset()
    cascade = compile_plan(plan).cascade
    return frozenset() if cascade is None else frozenset(failing_kinds(cascade))


def _agreement(first: ModelShare, larger: ModelShare) -> tuple[str, ...]:
    """Return (note,); the note says on how many checked rows both models agree.

    It also says how many rows sent for checking got no answer of the larger model. If none did get
    one, it says only that. Returns () if there were no rows to check.
    """
    failed = unanswered_text(first.unanswered, "checked row", "the larger model")
    if not first.checked:
        return (failed,) if failed else ()
    return (
        f"checked: {larger.model} gave {first.agreed:,} of {counted(first.checked, 'row')} the "
        f"answer of {first.model}: {first.agreement()}, 95 % interval"
        + (f"; {failed}" if failed else ""),
    )


def with_tokens_of(report: RunReport, first: RunReport | None) -> RunReport:
    """Return a cascade's report with tokens, seconds and engine deaths of the first model added.

    `first` is that model's report; None leaves the report unchanged.
    """
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
    """Return the larger model's figures: those of `both` models minus those of the `first`."""
    return {name: max(0.0, value - first.get(name, 0.0)) for name, value in both.items()}
