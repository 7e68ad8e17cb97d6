"""Judges a sample of a finished run's answers with an ordinary run inside the run directory.

That run has its own plan, shards and commits, so a killed judgement resumes, and committed shards
are not judged again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prefect_raybatch.compile.job import compile_plan, planned_job, prices_of
from prefect_raybatch.driver.cost import HOUR, spent_on
from prefect_raybatch.errors import CostExceeded, RayBatchError, RunDrained
from prefect_raybatch.job.checks import template_fields
from prefect_raybatch.job.judge import ROW, SAYS_RIGHT, VERDICT, Judge, judge_fields
from prefect_raybatch.job.output import Output
from prefect_raybatch.job.quality import Quality
from prefect_raybatch.ledger.family import Member
from prefect_raybatch.ledger.forks import original_key
from prefect_raybatch.ledger.layout import JUDGE
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.quality.alarm import ACCURACY
from prefect_raybatch.quality.golden import Golden, golden_numbers
from prefect_raybatch.quality.judged_rows import (
    IN_SAMPLE,
    JUDGE_COLUMNS,
    KNOWN_RIGHT,
    judged_from_parquet,
    judged_rows,
    judged_to_parquet,
)
from prefect_raybatch.quality.judgement import (
    JUDGE_RUNS,
    JudgedRow,
    Judgement,
    RejectedAnswer,
    judge_runs,
    judgement_of,
    put_judgement,
    read_judgement,
)
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.costs import plain_price
from prefect_raybatch.runs.finalize_run import load_report, put_pages
from prefect_raybatch.runs.quality import golden_of
from prefect_raybatch.runs.series import MeasuredRun, judgement_in, series_with
from prefect_raybatch.storage import Store, join
from prefect_raybatch.words import counted, money

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

JUDGED_FILE = "rows.parquet"
MOST_ROWS_BYTES = 1 << 30
REJECTED_SHOWN = 10
JUDGED_ROW_SHOWN = 300  # characters of a shown row


# Called with (file of rows, folder for the judge's run, highest cost or None); returns its report.
AskJudge = Callable[[str, str, float | None], RunReport]


@dataclass(frozen=True)
class ToJudge:
    """A judgement to make: its id (`key`) and the golden rows (None without any).

    `before` is the judgement that the run has on record, None if it has none.
    """

    key: str
    golden: Golden | None
    before: Judgement | None


def judgement_to_make(
    member: Member, quality: Quality, output: Output, measure_again: bool = False
) -> ToJudge | None:
    """Return the judgement that a finished run (`member`) lacks.

    Returns None if the job has no judge, or if the run is a retry of failed rows, which are no
    random sample of the input. Also returns None if the run has a judgement, unless `measure_again`
    is set and the judge or the golden rows have changed since.
    """
    plan, judge = member.plan, quality.judge
    if not judge.asked or plan.parent is not None:
        return None
    golden, before = golden_of(quality, output), read_judgement(member.ledger.store)
    key = judgement_id(judge, golden)
    is_there = before is not None and before.plan == plan.hash
    if before is not None and is_there and (before.key == key or not measure_again):
        return None
    return ToJudge(key, golden, before)


def with_verdicts(
    report: RunReport,
    member: Member,
    quality: Quality,
    output: Output,
    most_cost: float | None,
    written: str,
    ask: AskJudge,
    to_judge: ToJudge,
) -> RunReport:
    """Judge answers of a finished run (`member`); write the judgement; return the report with it.

    The run and all its judgements together may cost `most_cost` (None: no limit). `written` is the
    job's output.uri before placeholders are filled in; earlier judgements are looked for there.

    `ask` runs the judge over the rows to judge and returns the report of that run. Raises
    `CostExceeded` if nothing is left of `most_cost`, and the errors of `ask`; the next call then
    resumes the judgement.
    """
    store, plan, judge = member.ledger.store, member.plan, quality.judge
    key, golden = to_judge.key, to_judge.golden
    others = _cost_of_others(store, key)
    left = _left(report, others, most_cost) if report.good else None
    place = store.sub(f"{JUDGE}/{key}")
    rows = _rows(place, report, member, judge, output, golden)
    verdicts: list[bool | None] = []
    cost: Mapping[str, float] = {}
    currency = report.currency
    if rows.num_rows:
        log.info("%s judges %s", judge.name, counted(rows.num_rows, "answer"))
        ended = _ask(ask, place, left)
        verdicts = _verdicts(ended, output, rows.num_rows)
        cost, currency = ended.cost, ended.currency or currency
    flags = (rows[IN_SAMPLE].to_pylist(), verdicts, rows[KNOWN_RIGHT].to_pylist())
    judgement = judgement_of(
        plan=plan.hash,
        judge=judge.name,
        key=key,
        judged=list(map(JudgedRow, *flags)),
        has_golden=golden is not None,
        rejected=_rejected(rows, verdicts),
        cost={name: cost.get(name, 0.0) + others.get(name, 0.0) for name in {*cost, *others}},
        currency=currency,
    )
    judgement = _with_series(judgement, to_judge.before, judge, member, output, written)
    report = load_report(store, judgement=judgement)
    put_pages(store, report)
    put_judgement(store, judgement)  # last: until then, the next call writes the pages again
    return report


def _ask(ask: AskJudge, store: Store, left: float | None) -> RunReport:
    """Run the judge over the rows in `store` for at most the cost `left` (None: no limit).

    Errors name the fields of `quality.judge`, not those of the judge's own job.
    """
    try:
        return ask(join(store.uri, JUDGED_FILE), join(store.uri, JUDGE_RUNS), left)
    except RunDrained:  # its message names no field
        raise
    except RayBatchError as error:  # it names fields of the judge's own job
        text = judge_fields(str(error))
        error.args = (text if text.startswith("quality.judge") else f"quality.judge: {text}",)
        raise


def _with_series(
    judgement: Judgement,
    before: Judgement | None,
    judge: Judge,
    member: Member,
    output: Output,
    written: str,
) -> Judgement:
    """Return the judgement with the series of the job's judged runs.

    Returns it unchanged if no row was judged. `before` is the run's own judgement that this one
    replaces, None if there is none.
    """
    if not judgement.rows:
        return judgement
    options, plan = output.options or None, member.plan
    run = MeasuredRun(_series_key(judge), judgement.right, judgement.rows, ACCURACY)
    own = before.series if before is not None and before.plan == plan.hash else None
    return replace(judgement, series=series_with(own, written, options, plan, judgement_in, run))


def _cost_of_others(store: Store, key: str) -> Mapping[str, float]:
    """Return what all judgements of the run but `key` have cost together, incomplete ones too.

    The result is {"gpu_hours": GPU-hours, "total": cost in money}, without figures that are 0.
    """
    hours, total = 0.0, 0.0
    for judgement, run in judge_runs(store):
        ledger = Ledger(run)
        plan = ledger.load_plan()
        if judgement == key or plan is None:
            continue
        spent = spent_on(ledger, plan)
        hours += spent.gpu_seconds / HOUR
        total += spent.cost_at(plain_price(prices_of(planned_job(plan).cluster))) or 0.0
    return {name: value for name, value in (("gpu_hours", hours), ("total", total)) if value}


def judgement_id(judge: Judge, golden: Golden | None) -> str:
    """Return a hash (16 hex digits) of the judge's settings and the golden rows.

    For a hosted judge, only URL and model of the endpoint are part of the hash. So an interrupted
    judgement is resumed even with another API key, rate limit or timeout.
    """
    said = {**judge.model_dump(mode="json"), "endpoint": _server_of(judge)}
    parts = {"judge": said, "golden": None if golden is None else golden.digest}
    return hashlib.sha256(dump(parts)).hexdigest()[:16]


def _server_of(judge: Judge) -> dict[str, object]:
    return {name: value for name, value in judge.endpoint.items() if name in ("url", "model")}


def _series_key(judge: Judge) -> str:
    """Return a hash of the judge's model and prompt; runs with equal hashes can be compared."""
    parts = {"model": judge.model or _server_of(judge), "prompt": judge.prompt}
    return hashlib.sha256(dump(parts)).hexdigest()[:16]


def _rows(
    store: Store,
    report: RunReport,
    member: Member,
    judge: Judge,
    output: Output,
    golden: Golden | None,
) -> pa.Table:
    """Return the rows to judge; the first call draws them and writes them to `store`."""
    finish, result = compile_plan(member.plan).finish, report.dataset(output.options or None)
    if not store.holds(JUDGED_FILE):
        known = {} if golden is None else golden_numbers(golden, result, finish.row_number)
        columns = template_fields(judge.prompt or "")
        made = judged_rows(
            *(result, finish.row_number, columns, judge.sample, original_key(member.plan), known)
        )
        store.put_if_absent(JUDGED_FILE, judged_to_parquet(made))
    return judged_from_parquet(store.read(JUDGED_FILE, MOST_ROWS_BYTES))


def _left(report: RunReport, others: Mapping[str, float], most: float | None) -> float | None:
    """Return how much of the cost limit `most` is left for the judge; None if there is no limit.

    `others["total"]` is the cost of the run's other judgements. Raises `CostExceeded` if nothing is
    left.
    """
    if most is None:
        return None
    rows = report.cost.get("total", 0.0) - report.cost.get("judge", 0.0)
    spent = rows + others.get("total", 0.0)
    if spent >= most:
        raise CostExceeded(
            f"{report.run} is complete, but was not judged: it cost "
            f"{money(spent, report.currency)}, so nothing of limits.max_cost {most:g} is left for "
            "quality.judge. Raise limits.max_cost, or remove quality.judge, and run the same "
            "command again"
        )
    return most - spent


def _verdicts(ended: RunReport, output: Output, rows: int) -> list[bool | None]:
    """Return for each of the `rows` judged rows whether the judge called its answer right.

    `ended` is the report of the judge's run. The value is None for a row that failed there.
    """
    table = ended.to_arrow(output.options or None)
    found: dict[int, str] = {}
    if table.num_rows:  # else it has no verdicts either
        found = dict(zip(table[ROW].to_pylist(), table[VERDICT].to_pylist(), strict=True))
    said = [found.get(row) for row in range(rows)]
    return [None if verdict is None else verdict == SAYS_RIGHT for verdict in said]


def _rejected(rows: pa.Table, verdicts: Sequence[bool | None]) -> list[RejectedAnswer]:
    """Return up to REJECTED_SHOWN rows of the sample that the judge called wrong, as text."""
    flags = zip(rows[IN_SAMPLE].to_pylist(), verdicts, strict=True)
    is_wrong = [in_sample and verdict is False for in_sample, verdict in flags]
    if not any(is_wrong):
        return []
    wrong = rows.drop_columns(list(JUDGE_COLUMNS)).filter(is_wrong).slice(0, REJECTED_SHOWN)
    texts = (", ".join(f"{k}: {v}" for k, v in row.items()) for row in wrong.to_pylist())
    return [RejectedAnswer(text[:JUDGED_ROW_SHOWN]) for text in texts]
