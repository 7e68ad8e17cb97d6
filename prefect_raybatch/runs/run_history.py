"""Reads the recent runs of a job from their records."""

from __future__ import annotations

from dataclasses import replace

from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.job.placeholders import dated_parts
from prefect_raybatch.ledger.family import load_family, locate_run
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.row_numbers import among
from prefect_raybatch.ledger.same_job import differing
from prefect_raybatch.report.answers import Shift, comparable, shifts
from prefect_raybatch.report.drift import MOST_RUNS, drifts, enough, prompt_drift
from prefect_raybatch.report.inputs import Inputs, input_drifts
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.run_history import (
    HistoryLine,
    HistoryPage,
    remarks,
    replaced_keys,
)
from prefect_raybatch.report.verdict import missed_deadline, usual_seconds
from prefect_raybatch.result.rows import failed_numbers
from prefect_raybatch.runs.attempts import open_step_of
from prefect_raybatch.runs.drivers import has_driver
from prefect_raybatch.runs.finalize_run import load_report
from prefect_raybatch.runs.listing import (
    COMPLETED,
    DAMAGED,
    PRUNING,
    RunLine,
    list_runs,
    recency_key,
)
from prefect_raybatch.runs.run import STORE_AWAY
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import join, open_store

RUNS_SHOWN = 14
COMPARED_PARTS = ("prompt", "sampling", "engine", "model")  # of a plan's fingerprint
UNREADABLE_SHOWN = 5
DATES_LOOKED_AT = 400  # most folders that match an output.uri with placeholders


def history_of(
    output: str,
    options: StoreOptions | None = None,
    job: str | None = None,
    most: int = RUNS_SHOWN,
) -> list[HistoryPage]:
    """Return, for each job below `output` or only for `job`, a page with its newest `most` runs.

    Retries of failed rows are left out; the rows that they answered count for the run itself. If
    `output` contains {run_date} or {run_key}, all folders that match are read. A page names
    unreadable runs. Raises only if the store is unreachable.
    """
    lines = matching_runs(output, options)
    broken = {line.run_key: line.trouble for line in lines if line.state == DAMAGED}
    broken = dict(list(broken.items())[:UNREADABLE_SHOWN])
    lines = with_retries(lines, options)
    by_job: dict[str, list[RunLine]] = {} if job is None else {job: []}
    for line in lines:
        if line.job and line.parent is None and (job is None or line.job == job):
            by_job.setdefault(line.job, []).append(line)
    return [
        HistoryPage(
            name,
            _compared([_history_line(line, options) for line in _needed(found, most)])[:most],
            broken,
        )
        for name, found in by_job.items()
    ]


def usual_time(page: HistoryPage, run_key: str) -> float | None:
    """Return the median seconds of the latest complete runs on the page; None if there are none.

    The run `run_key` does not count, nor do runs that a repaired run replaces.
    """
    others = {run_key, *replaced_keys(page.runs)}
    times = [(line.elapsed, line.good) for line in page.runs if line.run_key not in others]
    return usual_seconds([elapsed for elapsed, good in times if elapsed and good is not None])


def with_retries(lines: list[RunLine], options: StoreOptions | None = None) -> list[RunLine]:
    """Return the runs, with rows that retries answered counted as good and not as quarantined.

    For a repaired run, retries of the damaged runs that it continues count as well.
    """
    by_place = {line.run: line for line in lines}
    answered: dict[str, int] = {}
    for line in lines:
        root, seen = line, {line.run}
        while root.parent is not None:
            place = join(line.run.rpartition("/")[0], root.parent)
            if place not in by_place or place in seen:  # records may name each other
                break
            seen.add(place)
            root = by_place[place]
        if root is not line and root.parent is None and line.quarantined is not None:
            rows = line.rows - line.quarantined
            answered[root.run] = answered.get(root.run, 0) + rows
    for line in lines if any(line.parent for line in lines) else ():
        if line.forked_from is not None and line.quarantined:
            rows = _answered_before_repair(line, options)
            answered[line.run] = answered.get(line.run, 0) + rows
    return [
        line
        if line.run not in answered or line.good is None or line.quarantined is None
        else replace(
            line,
            good=line.good + answered[line.run],
            quarantined=line.quarantined - answered[line.run],
        )
        for line in lines
    ]


def _answered_before_repair(line: RunLine, options: StoreOptions | None) -> int:
    """Return how many failed rows of a repaired run the retries of its damaged runs answered.

    Returns 0 if the records of one of these runs cannot be read.
    """
    root, key = locate_run(line.run, dict(options) if options else None)
    try:
        family = load_family(root, key)
        family.read_former()
        failed = failed_numbers(family.members[key])
        pending = failed
        for retry in family.former.values():
            if retry.summary is not None:
                taken = retry.ledger.numbers(retry.plan).all()
                answered = taken[~among(failed_numbers(retry), taken)]
                pending = pending[~among(answered, pending)]
    except STORE_AWAY:
        raise
    except RayBatchError:
        return 0
    return len(failed) - len(pending)


def changed_fields(page: HistoryPage, run: HistoryLine, options: StoreOptions | None) -> str:
    """Return the job fields in which a run differs from the one it is compared with, as text.

    The other run is the one that the run's shifts name (`Shift.before`). Only prompt, sampling,
    engine and model are compared. Returns "" if nothing differs, if the other run is not on the
    page, or if a plan cannot be read.
    """
    before = next((b for s in run.shifts for b in page.runs if b.run_key == s.before), None)
    if before is None:
        return ""
    try:
        plans = [
            Ledger(open_store(line.run, dict(options) if options else None)).load_plan()
            for line in (before, run)
        ]
    except RayBatchError:
        return ""
    old, new = ({} if plan is None else plan.parts for plan in plans)
    return ", ".join(k for k in differing(old, new) if k.partition(".")[0] in COMPARED_PARTS)


def _needed(found: list[RunLine], most: int) -> list[RunLine]:
    """Return the newest `most` of the runs `found`, followed by earlier ones to compare them with.

    `found` is newest first. There are as many earlier runs as needed to contain MOST_RUNS complete
    ones, because drift is computed from so many. If there are fewer, all runs are returned.
    """
    completed = [number for number in range(most, len(found)) if found[number].state == COMPLETED]
    return found[: completed[MOST_RUNS - 1] + 1] if len(completed) >= MOST_RUNS else found


def matching_runs(output: str, options: StoreOptions | None) -> list[RunLine]:
    """Return the runs below all folders that match `output`, newest first.

    `output` may contain {run_date} or {run_key}.
    """
    folders = _dated_folders(output, options)
    lines = [line for folder in folders for line in list_runs(folder, options)]
    return lines if len(folders) == 1 else sorted(lines, key=recency_key, reverse=True)


def _dated_folders(output: str, options: StoreOptions | None) -> list[str]:
    """Return the folders that match `output`, which may contain {run_date} or {run_key}.

    If more than DATES_LOOKED_AT match, returns the last ones by name.
    """
    base, parts = dated_parts(output)
    folders = [base]
    for part in parts:
        below = []
        for folder in folders:
            names = open_store(folder, dict(options) if options else None).folders()
            below += [join(folder, name) for name in names if part.fullmatch(name)]
        folders = sorted(below)[-DATES_LOOKED_AT:]
    return folders


def _compared(lines: list[HistoryLine]) -> tuple[HistoryLine, ...]:
    """Return `lines` (newest first), each with its differences from complete runs before it."""
    made: list[HistoryLine] = []
    replaced = replaced_keys(lines)
    earlier: list[HistoryLine] = []  # completed, newest first
    for line in reversed(lines):
        if line.good is not None:
            before = next((run for run in earlier if run.answers), None)
            line = replace(
                line,
                shifts=_shifts(line, earlier, before),
                compared=before is not None and comparable(line.answers, before.answers),
                is_first=bool(line.answers) and before is None,
            )
            if line.run_key not in replaced:
                earlier.insert(0, line)
        made.append(line)
    return tuple(reversed(made))


def _shifts(
    line: HistoryLine, earlier: list[HistoryLine], before: HistoryLine | None
) -> tuple[Shift, ...]:
    """Return how far the answers and inputs of a run drift from those of the `earlier` runs.

    `earlier` are complete runs, newest first. For kinds of answers that too few of them have,
    returns the differences from the run `before` alone.
    """
    if not earlier:
        return ()
    newest, distributions = earlier[0].run_key, [run.distributions for run in earlier]
    pairwise = tuple(
        shift
        for shift in (shifts(line.answers, before.answers, before.run_key) if before else ())
        if not enough(shift.kind, line.answers, distributions)
    )
    prompts = prompt_drift(
        line.prompt_tokens, [run.prompt_tokens or 0.0 for run in earlier], newest
    )
    drift = drifts(line.distributions, distributions, newest)
    inputs = input_drifts(line.inputs, [run.inputs for run in earlier], newest)
    return (*drift, *pairwise, *([] if prompts is None else [prompts]), *inputs)


def unusual_lines(
    output: str, options: StoreOptions | None, job: str, run_key: str, limited: bool = False
) -> list[str]:
    """Return what is unusual about the completed run `run_key`, compared with earlier runs.

    Drift has a line for each kind. `output` is as in `history_of`. With `limited`, only part of the
    input was read, so rows and duration are not compared. Returns [] for a retry of failed rows.
    """
    (page,) = history_of(output, options, job)
    line = next((line for line in page.runs if line.run_key == run_key), None)
    if line is None or line.good is None:
        return []
    return [*([] if limited else remarks(page, line)), *(shift.line() for shift in line.drift)]


def _prompt_tokens(report: RunReport) -> float | None:
    """Return the mean prompt tokens of an answered row, None if unknown.

    Also None for a run that reused answers, because it did not send all requests.
    """
    tokens = report.tokens.get("prompt_tokens")
    return tokens / report.good if tokens and report.good and not report.reuse else None


def _is_left(line: RunLine, options: StoreOptions | None) -> bool:
    """Return whether an incomplete run is abandoned: it has a plan, but no driver is at work.

    False if its directory is unreadable or being removed.
    """
    if not line.has_plan or line.trouble or line.state == PRUNING:
        return False
    try:
        return not has_driver(open_store(line.run, dict(options) if options else None))
    except STORE_AWAY:
        raise
    except RayBatchError:
        return False


def _history_line(line: RunLine, options: StoreOptions | None) -> HistoryLine:
    share = line.committed / line.shards if line.shards else None
    rows = line.rows if line.has_plan else None
    entry = HistoryLine(line.run_key, line.run, line.state, line.created, rows, share)
    entry = replace(entry, failure=line.failure, command=line.command, first_step=line.first_step)
    if line.state != COMPLETED:
        return replace(entry, is_left=_is_left(line, options))
    try:
        store = open_store(line.run, dict(options) if options else None)
        if (attempt := open_step_of(store)) is not None:
            entry = replace(entry, undone=attempt.undone, under_way=attempt.under_way)
            entry = replace(entry, command=attempt.command)
            entry = replace(entry, first_step=attempt.first_step)
        report = load_report(store)
    except STORE_AWAY:
        raise
    except RayBatchError as error:
        return replace(
            entry, good=line.good, quarantined=line.quarantined, trouble=f"its report: {error}"
        )
    return replace(
        entry,
        good=line.good,
        quarantined=line.quarantined,
        rate=report.rows_per_s,
        seconds=report.seconds,
        elapsed=max(report.elapsed, report.seconds),
        is_late=missed_deadline(report),
        cost=report.cost.get("total"),
        currency=report.currency,
        accuracy=report.accuracy,
        judgement=report.judgement,
        checked=report.cascade[0] if report.cascade else None,
        agreement=report.agreement,
        answers={kind: dict(counts) for kind, counts in report.answers.items()},
        prompt_tokens=_prompt_tokens(report),
        inputs=Inputs(report.nulls, report.values),
    )
