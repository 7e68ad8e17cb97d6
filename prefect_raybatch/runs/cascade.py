"""What each model of a cascade did, for the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from prefect_raybatch.cluster.cascade import first_answers
from prefect_raybatch.ledger.increments import increment_of
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.stats import AGREED, CHECKED
from prefect_raybatch.quality.accuracy import interval
from prefect_raybatch.report.records import ModelShare, RunReport
from prefect_raybatch.spec.cascade import CascadeSpec
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
    """Return the report with the rows, tokens and cost of each model; `first` is that of its own.

    Notes say which rows the larger model answered, whether `at_most` left any out, and by the
    run's `figures` in how many checked rows both models agree.
    """
    increment = increment_of(plan)
    if first is None or increment is None:
        return report
    answers = first_answers(store, increment, cascade, plan)
    unsure, asked = answers.unsure, answers.escalated
    shares = (
        ModelShare(
            cascade.first_name, first.rows, first.rows - asked, _tokens(first), _spent(first)
        ),
        ModelShare(
            cascade.larger_name,
            answers.asked,
            asked,
            _without(_tokens(report), _tokens(first)),
            _without(_spent(report), _spent(first)),
        ),
    )
    note = (
        f"{counted(unsure, 'row')} of {first.rows:,} met output.escalate.when, and "
        f"{cascade.larger_name} was asked about {asked:,}"
    )
    if answers.asked > asked:
        note += f", and about {answers.asked - asked:,} more to check"
    if asked < unsure:
        note += (
            f". output.escalate.at_most ({cascade.at_most:g}) left {unsure - asked:,} to "
            f"{cascade.first_name}, so a guarantee of raybatch tune does not hold for this run"
        )
    notes = (note, *_agreement(cascade, figures))
    return replace(report, cascade=shares, notes=(*notes, *report.notes))


def _agreement(cascade: CascadeSpec, figures: Mapping[str, float]) -> tuple[str, ...]:
    """Return the note on the checked rows; () for a run that checked none."""
    checked, agreed = int(figures.get(CHECKED, 0)), int(figures.get(AGREED, 0))
    if not checked:
        return ()
    low, high = interval(agreed, checked)
    return (
        f"checked: {cascade.larger_name} gave {agreed:,} of {counted(checked, 'row')} the answer "
        f"of {cascade.first_name}: {agreed / checked:.1%} ({low:.1%} to {high:.1%}, 95 % interval)",
    )


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
