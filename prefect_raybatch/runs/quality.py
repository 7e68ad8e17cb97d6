"""Measures a finished run's accuracy on golden rows, and checks whether it may be published.

Golden rows are input rows whose right answers are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from prefect_raybatch.compile.job import model_request
from prefect_raybatch.errors import ConfigError, QualityTooLow
from prefect_raybatch.job.answer_schema import FIELD as SCHEMA_FIELD
from prefect_raybatch.job.answer_types import columns_of
from prefect_raybatch.job.checks import template_fields
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.judge import judge_fields
from prefect_raybatch.job.output import Output
from prefect_raybatch.job.quality import Quality
from prefect_raybatch.job.tasks import TaskName, pools
from prefect_raybatch.ledger.family import Member, locate_run, root_member
from prefect_raybatch.quality.accuracy import Accuracy, put_accuracy, read_accuracy
from prefect_raybatch.quality.alarm import ACCURACY
from prefect_raybatch.quality.golden import (
    GOLDEN_FIELD,
    Golden,
    accuracy_on,
    check_golden_answers,
    check_golden_columns,
    read_golden,
)
from prefect_raybatch.quality.judgement import read_judgement
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.finalize_run import load_report, put_pages
from prefect_raybatch.runs.series import MeasuredRun, accuracy_in, series_with
from prefect_raybatch.spec.request import SamplingSpec
from prefect_raybatch.spec.result import FinishSpec
from prefect_raybatch.stages.result_columns import named_answers, result_columns
from prefect_raybatch.words import counted


@dataclass(frozen=True)
class AnswerSpec:
    """The parts of a run's spec that decide what its answers and result columns are.

    `has_function`: prompt.function makes the requests, and may set sampling fields of a row.
    """

    finish: FinishSpec
    sampling: SamplingSpec
    task: TaskName
    has_function: bool

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Return (name, type in words) of each result column that is not from the input."""
        return result_columns(self.finish, self.sampling, self.task)


def golden_of(quality: Quality, output: Output) -> Golden | None:
    """Return the job's golden rows, None if it names none; raise the errors of `read_golden`."""
    if quality.golden is None:
        return None
    named = (quality.answer, "quality.answer") if quality.answer else (output.column, GOLDEN_FIELD)
    return read_golden(quality.golden, output.options, quality.key, *named)


def check_quality_columns(
    quality: Quality, output: Output, spec: AnswerSpec, names: Sequence[str]
) -> Golden | None:
    """Check that the result will have the columns and answers that golden rows and judge need.

    Returns the golden rows, None without any. Raises `ConfigError` if the result will lack a column
    that is needed, if the right answer of a golden row is not a possible answer, or if the judge's
    prompt names no column with the answer. `names` are the input columns. With output.postprocess
    but no output.schema, the result's columns are not known in advance; then only the golden rows
    are read.
    """
    finish, sampling, task = spec.finish, spec.sampling, spec.task
    golden = golden_of(quality, output)
    if finish.postprocess is not None and not finish.types:
        return golden
    there = [*finish.kept(list(names)), *(name for name, _ in spec.columns)]
    if golden is not None:
        check_golden_columns(golden, there)
        check_golden_answers(golden, *_listed_answers(golden.answer, spec))
    fields = template_fields(quality.judge.prompt or "")
    for name in fields:
        if name not in there:
            raise ConfigError(
                f"quality.judge.prompt: the result has no column {name!r} (it has: "
                f"{', '.join(there)}). Add it to output.columns, or correct the prompt"
            )
    answers = [name for name, _ in named_answers(finish, sampling, task)]
    if quality.judge.asked and not set(answers) & set(fields):
        columns = ", ".join(f"{{{name}}}" for name in answers)
        raise ConfigError(
            "quality.judge.prompt: the judge cannot see the answer, because the prompt names no "
            f"column that holds it. Add {'one of ' if len(answers) > 1 else ''}{columns} to the "
            "prompt"
        )
    return golden


def _listed_answers(column: str, spec: AnswerSpec) -> tuple[str, Sequence[object]]:
    """Return (job field that lists the values of a result's `column`, the values).

    There are no values if they are not known before the run, for example because each row may set
    its own choice.
    """
    finish, sampling = spec.finish, spec.sampling
    if finish.postprocess or finish.classifier or sampling.several or pools(spec.task):
        return "", ()
    if finish.schema is not None:
        shape = columns_of(finish.schema).get(column)
        if shape is None:
            return "", ()
        values = shape.values or ((True, False) if shape.kind == "boolean" else ())
        return SCHEMA_FIELD, (*values, None) if values and shape.nullable else values
    if column != finish.column or (spec.has_function and not sampling.fixed_form):
        return "", ()
    return f"sampling.{'structured_outputs' if sampling.form else 'choice'}", sampling.choices


def golden_plan(golden: Golden | None) -> str:
    """Return e.g. `200 rows of golden.csv, compared in "answer" by id`; "" without golden rows."""
    if golden is None:
        return ""
    rows = counted(len(golden.answers), "row")
    columns = ", ".join(golden.columns)
    return f'{rows} of {golden.uri}, compared in "{golden.answer}" by {columns}'


def check_judge(quality: Quality) -> None:
    """Raise `ConfigError` if the judge's engine names a Prefect block that is not loaded."""
    if not quality.judge.asked:
        return
    try:
        model_request(quality.judge.whole_engine)
    except ConfigError as error:
        raise ConfigError(judge_fields(str(error))) from None


def judge_plan(quality: Quality, rows: int) -> str:
    """Return the rows to judge, as text, e.g. `200 of 500 rows, by MODEL`; "" without a judge.

    `rows` is the run's number of rows.
    """
    if not quality.judge.asked:
        return ""
    golden = ", and the golden rows" if quality.golden is not None else ""
    sample = min(quality.judge.sample, rows)
    return f"{sample:,} of {counted(rows, 'row')}{golden}, by {quality.judge.name}"


def judge_warning(quality: Quality, engine: Engine, larger: Engine | None) -> str:
    """Return a warning if the judge is a model whose answers it judges, else "".

    `engine` has the job's model, `larger` the larger model of a cascade.
    """
    judge = quality.judge
    if not judge.asked:
        return ""
    own = _model_of(judge.whole_engine)
    if own == (None, None) or own not in (_model_of(engine), larger and _model_of(larger)):
        return ""
    return (
        f"quality.judge: {judge.name} judges its own answers, and models prefer these. Name "
        "another model"
    )


def _model_of(engine: Engine) -> tuple[str | None, str | None]:
    """Return (URL of the hosted model's server or None, model name) of an engine."""
    if engine.endpoint.asked is not None:
        return engine.endpoint.url, engine.endpoint.model
    return None, engine.model


def measured(
    report: RunReport,
    member: Member,
    quality: Quality,
    output: Output,
    written: str,
    step: AbstractContextManager[None],
    measure_again: bool = False,
) -> RunReport:
    """Measure a finished run on the golden rows; write its accuracy; return the report with it.

    Returns `report` unchanged if the job has no golden rows or if the run is a retry of failed rows
    (these are no random sample of the input). A run that was measured before is measured again only
    with `measure_again`. `written` is the job's output.uri before placeholders are filled in;
    earlier runs to compare with are looked for there. `step` is entered while the run is measured.
    """
    if quality.golden is None or member.plan.parent is not None:
        return report
    before = read_accuracy(member.ledger.store)
    if before is not None and before.plan == member.plan.hash and not measure_again:
        return report
    with step:
        return _measured(report, before, member, quality, output, written)


def _measured(
    report: RunReport,
    before: Accuracy | None,
    member: Member,
    quality: Quality,
    output: Output,
    written: str,
) -> RunReport:
    """Compare a finished run with the golden rows; record its accuracy; return its report with it.

    `before` is the accuracy that the run recorded when it was last measured, None if it never was.
    If neither plan nor golden rows have changed since, its series is kept. If the accuracy is the
    same as before, writes nothing and returns `report`.
    """
    store, plan, golden = member.ledger.store, member.plan, golden_of(quality, output)
    if golden is None:
        return report
    options = output.options or None
    failed = report.quarantine(options) if report.failed else None
    accuracy = accuracy_on(golden, report.dataset(options), failed, plan.hash)
    if accuracy.rows:
        kept = before.series if before is not None and before.plan == plan.hash else None
        if kept is None or kept.key != golden.digest:
            run = MeasuredRun(golden.digest, accuracy.right, accuracy.rows, ACCURACY)
            kept = series_with(kept, written, options, plan, accuracy_in, run)
        accuracy = replace(accuracy, series=kept)
    if accuracy != before:
        report = load_report(store, accuracy)
        put_pages(store, report)
        put_accuracy(store, accuracy)  # last: until then, the next call writes the pages again
    return report


def check_accuracy(report: RunReport, member: Member, quality: Quality, output: Output) -> None:
    """Raise `QualityTooLow` if the run's accuracy is too low, or not known, to publish it.

    The lower end of the accuracy's interval must reach quality.at_least. The accuracy is measured
    on golden rows or, in a job without them, by the judge. A retry of failed rows is not measured:
    for it, the recorded accuracy of its family's root run counts. Does nothing without
    quality.at_least.
    """
    least = quality.at_least
    if least is None:
        return
    accuracy = report.accuracy if quality.golden is not None else report.judgement
    run, whose, then = report.run, "its accuracy", ""
    if member.plan.parent is not None:
        folder, _ = locate_run(member.ledger.store.uri, output.options or None)
        store = root_member(folder, member).ledger.store
        accuracy = read_accuracy(store) if quality.golden is not None else read_judgement(store)
        run, whose = store.uri, f"the accuracy of {store.uri}, whose rows it retries,"
        then = f", then: raybatch publish {report.run} --job JOB"
    outcome = "was not published"
    if report.published:
        targets = ", ".join(one.target for one in report.published)
        outcome = f"stays published to {targets}, and nothing else was published"
    if accuracy is None:
        raise QualityTooLow(
            f"{report.run} {outcome}: {whose} was not measured, and quality.at_least is "
            f"{least:g}. Run: raybatch publish {run} --job JOB{then}"
        )
    if accuracy.low >= least:
        return
    if isinstance(accuracy, Accuracy):
        remedy = accuracy.remedy(least, str(quality.golden))
    else:
        remedy = accuracy.remedy(least)
    raise QualityTooLow(
        f"{report.run} {outcome}: {whose} is {accuracy.text()}, and quality.at_least "
        f"{least:g} needs the lower end of the interval. {remedy}, then run: raybatch publish "
        f"{run} --job JOB{then}"
    )
