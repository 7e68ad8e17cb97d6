"""Print progress, plans, states, findings and verdicts in the terminal."""

from __future__ import annotations

import json
import logging
import math
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from prefect_raybatch.cli.ending import failed_rows_command, print_next
from prefect_raybatch.cli.terminal import err, out
from prefect_raybatch.driver.heartbeat import (
    ENDED,
    INFERRING,
    MAKING,
    STARTING,
    WAITING,
    Heartbeat,
    Listener,
    to_larger_text,
)
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.table_formats import TABLE_FORMATS
from prefect_raybatch.ledger.last_attempt import advice
from prefect_raybatch.ledger.layout import PARTIAL_FOLDER
from prefect_raybatch.ledger.records import JsonObject
from prefect_raybatch.model.pinned import model_name
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import duration, failure_table
from prefect_raybatch.runs.listing import COMPLETED
from prefect_raybatch.runs.starts import starts_of
from prefect_raybatch.spec.cascade import most_rows
from prefect_raybatch.words import are, counted, finite_in, money, sentence

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from prefect_raybatch.doctor.check_result import CheckResult
    from prefect_raybatch.driver.driver import Progress
    from prefect_raybatch.flow.reconcile import Action
    from prefect_raybatch.plan.prompt_lengths import PromptLengths
    from prefect_raybatch.result.reap import Reaped
    from prefect_raybatch.result.verify import Verdict
    from prefect_raybatch.result.verify_chain import ChainVerdict
    from prefect_raybatch.runs.dry_run import DryRun
    from prefect_raybatch.runs.next_step import NextStep
    from prefect_raybatch.runs.repair import Repaired
    from prefect_raybatch.runs.status import Status
    from prefect_raybatch.sizing.sizes import Sizing
    from prefect_raybatch.standby.claim import StandingCluster

TEXT_SHOWN = 2000  # characters of a prompt
LINE_EVERY = 5.0  # seconds between progress lines where there is no terminal


class TerminalProgress(Listener):
    """Shows the progress of a run: as a bar on a terminal, else as a line at intervals."""

    def __init__(self, quiet: bool):
        self.quiet, self.draws = quiet, err.is_terminal
        self.bar: Bar | None = None
        self.printed, self.line = 0.0, ""  # when the last progress line was printed, and the line
        self.phase, self.about = STARTING, ""
        self.progress: Progress | None = None
        self._explained = False
        self._lock = threading.RLock()  # heartbeats come from another thread

    def say(self, text: str) -> None:
        if not self.quiet:
            err.print(text, markup=False)

    def begin(self, uri: str) -> None:
        self.say(f"run {uri}")

    def on_judge(self, uri: str) -> None:
        self.close()
        with self._lock:
            self.phase, self.about, self.progress = STARTING, "", None
            self.printed, self.line = 0.0, ""
        self.say(f"judging answers: run {uri}")

    def on_heartbeat(self, beat: Heartbeat) -> None:
        with self._lock:
            fresh, self.phase = beat.phase != self.phase, beat.phase
            waits = self.phase == WAITING and not beat.alarms
            told = waits or self.phase in (STARTING, MAKING, INFERRING)
            self.about = beat.about if told else ""
            progress = self.progress
            if progress is None or self.phase == ENDED or (progress.recent and not self.about):
                return
            if fresh or self.about:
                self.printed = 0.0 if fresh else self.printed
                self(progress)

    def __call__(self, progress: Progress) -> None:
        if self.quiet:
            return
        with self._lock:
            self.progress = progress
            if progress.unit[0] == "step" and not self._explained:
                self._explained = True
                self.say("a step is an answer of the first phase, or a finished row of the second")
            if self.draws:
                self.draw(progress)
            elif time.time() - self.printed >= LINE_EVERY or progress.whole_done == progress.whole:
                self._say_if_new(describe_progress(progress, self.phase, self.about))

    def _say_if_new(self, line: str) -> None:
        """Print a progress line unless it equals the last one.

        Many heartbeats in a row describe the same state.
        """
        if line != self.line:
            self.printed, self.line = time.time(), line
            self.say(line)

    def draw(self, progress: Progress) -> None:
        """Draw the progress bar, or update it."""
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        if self.bar is None:
            self.bar = Bar(
                TextColumn("{task.fields[note]}", markup=False),
                BarColumn(),
                TextColumn("{task.percentage:.0f}%"),
                console=err,
            )
            self.bar.add_task("rows", total=progress.whole, note="")
            self.bar.start()
        note = describe_progress(progress, self.phase, self.about)
        self.bar.update(self.bar.task_ids[0], completed=progress.whole_done, note=note)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def describe_progress(progress: Progress, phase: str, about: str) -> str:
    """Return in one line how many rows or requests are done, at which rate, and what is happening.

    `phase` and `about` are from the last heartbeat. `phase` is what the driver does; `about` has
    details, or is "".
    """
    rows = counted(progress.whole, *progress.unit)
    if not progress.recent:
        # In the rows phase, requests that this attempt has answered count as done too.
        before = "" if progress.before.rows else " before"
        done = f"{progress.whole_done:,} of {rows} done{before}" if progress.whole_done else ""
        # Until the rows phase has a heartbeat, `phase` is the last one of the requests phase.
        now = "" if phase == ENDED else f"{phase}{f': {about}' if about else ''}"
        return "; ".join(filter(None, (done, now)))
    failed = progress.failed + progress.held_back
    state = ""
    if about and progress.whole_done < progress.whole:
        state = f", {about}" if phase == INFERRING else f"; {phase}: {about}"
    return (
        f"{progress.whole_done:,} of {rows}, {progress.rate:,.0f} {progress.unit[1]}/s, "
        f"{duration(progress.seconds_left)} left, {failed:,} failed"
        f"{to_larger_text(progress.to_larger)}{state}"
    )


def show_findings(findings: Sequence[CheckResult]) -> None:
    """Print the findings of `raybatch doctor` with remedies, then how many pass, warn and fail."""
    table = _grid()
    colours = {"pass": "green", "warn": "yellow", "fail": "red"}
    for finding in findings:
        mark = f"[{colours[finding.mark]}]{finding.mark}[/]"
        table.add_row(mark, escape(finding.check), escape(finding.found))
        if finding.remedy:
            table.add_row("", "", f"[bold]->[/] {escape(finding.remedy)}")
    out.print(table)
    counts = {mark: sum(finding.mark == mark for finding in findings) for mark in colours}
    out.print(", ".join(f"{number} {mark}" for mark, number in counts.items()))


def show_next_step(step: NextStep) -> None:
    """Print the next `step`: what `raybatch run` would do with the job and run key."""
    first, *others = step.lines
    out.print(f"[bold]raybatch run[/] with --run-key {escape(step.run_key)} {escape(first)}")
    for line in others:
        out.print(line, markup=False)
    out.print(f"run directory: {step.run}", markup=False)


def show_plan(plan: DryRun) -> None:
    """Print what a run would do: input, result, sizes with their reasons, warnings, problems."""
    if plan.first is not None:
        out.print("[bold]First model of the cascade[/], which answers all rows:")
        show_plan(replace(plan.first, problems=()))
        most = plan.rows if plan.at_most is None else most_rows(plan.at_most, plan.rows)
        check = f", and checks up to {plan.check:,} of the others" if plan.check else ""
        out.print(f"[bold]Larger model[/], which answers at most {counted(most, 'row')}{check}:")
    table = _grid()
    for name, lines in _plan_facts(plan):
        for number, line in enumerate(lines):
            table.add_row("" if number else name, escape(line))
    out.print(table)
    sizes = Table(box=None, pad_edge=False)
    for name in ("size", "value", "why"):
        sizes.add_column(name, overflow="fold")
    for figure in plan.figures:
        sizes.add_row(escape(figure.name), escape(figure.value), escape(figure.why))
    out.print(sizes)
    over = (plan.cost.warning,) if plan.cost is not None and plan.cost.warning else ()
    for warning in (*plan.sizing.warnings, *over):
        out.print(f"[yellow]warning[/]: {escape(warning)}")
    if plan.tokens is not None:
        _show_prompts(plan.tokens)
    for problem in plan.problems:
        out.print(f"[red]problem[/]: {escape(problem)}")


def _plan_facts(plan: DryRun) -> list[tuple[str, list[str]]]:
    """Return (name, lines) pairs that describe what a run would read, write and need."""
    size = plan.sizing
    about = "about " if plan.rows_guessed else ""
    columns = (f"{name}: {kind}" for name, kind in zip(plan.columns, plan.types, strict=True))
    kept = ", including those that the first model answers" if plan.first is not None else ""
    # Tokens of a hosted model are priced for each model alone; GPU-hours of an earlier run include
    # both models.
    apart = plan.hosted is not None or (plan.first is not None and plan.first.hosted is not None)
    cost_of = "cost of larger" if apart else "cost of both"
    return [
        ("input", [f"{about}{counted(plan.rows, 'row')} {_input_place(plan)}"]),
        ("columns", [", ".join(columns)]),
        ("result", [f"{name}: {kind}" for name, kind in plan.result]),
        ("publish to", list(plan.publish)),
        ("model", [model_name(plan.model)]),
        ("classifier", [plan.classifier] if plan.classifier else []),
        ("shards", [f"{size.shards:,} of {counted(size.rows_per_shard, 'row')}{kept}"]),
        (
            "shards per engine",
            [f"{size.shards_a_worker:g} ({counted(size.pool.engines, 'engine')})"],
        ),
        ("saturation", [_saturation(size)]),
        ("resources", [", ".join(counted(plan.needs[f"{k.lower()}s"], k) for k in ("CPU", "GPU"))]),
        ("cluster", [_cluster(plan.have)]),
        ("run directory", [plan.run]),
        ("reuse", reuse_lines(plan)),
        ("golden", [plan.golden] if plan.golden else []),
        ("judged", [plan.judged] if plan.judged else []),
        ("tokens per row", [plan.hosted.line()] if plan.hosted and plan.hosted.tokens else []),
        (
            "cost" if plan.first is None else cost_of,
            [plan.cost.line()] if plan.cost is not None else [],
        ),
    ]


def _saturation(size: Sizing) -> str:
    """Return how many shards are in flight per engine, and whether they fill its sequence slots."""
    if size.shards <= size.concurrent * size.pool.engines:
        return "all rows are in flight at once"
    fill = "fill" if size.saturated else "do not fill"
    return (
        f"{counted(size.concurrent, 'shard')} in flight per engine, "
        f"{counted(size.rows_per_shard, 'row')} each, {fill} "
        f"{counted(size.max_num_seqs, 'sequence')}"
    )


def _input_place(plan: DryRun) -> str:
    """Return e.g. `in 3 parquet files`, or the table and its version."""
    if plan.table is None or plan.format not in TABLE_FORMATS:
        return f"in {counted(plan.files, f'{plan.format} file')}"
    version, created = plan.table["version"], plan.table.get("made")
    when = f" of {created}" if created not in (None, version) else ""
    return f"of {TABLE_FORMATS[plan.format].source} at version {version}{when}"


def _cluster(have: Mapping[str, Any]) -> str:
    """Return a cluster's CPUs, GPUs, nodes and address as text.

    If the cluster could not be queried, the text says that these are assumed, instead of the
    address.
    """
    kinds = " and ".join(have["accelerators"]) or "of unknown kind"
    gpus = f"{counted(have['gpus'], 'GPU')} {kinds}" if have["gpus"] else "no GPU"
    cpus, nodes = counted(have["cpus"], "CPU"), counted(have["nodes"], "node")
    where = "assumed, because it cannot be queried" if have["assumed"] else f"at {have['address']}"
    return f"{cpus}, {gpus}, {nodes}, {where}"


def reuse_lines(plan: DryRun) -> list[str]:
    """Return lines that say how many rows are inferred, how many reuse answers, and why not more.

    [] for a job that does not reuse answers.
    """
    if plan.reuse is None:
        return []
    reuse = plan.reuse
    lines = [
        f"{counted(reuse.counts.asked, 'row')} to infer, {reuse.counts.reused:,} answered by an "
        f"earlier run, {reuse.counts.merged:,} equal to another row"
    ]
    if reuse.counts.none:
        lines.append(f"{counted(reuse.counts.none, 'row')} will fail, because they make no request")
    lines += [f"answers of {run}" for run in reuse.earlier]
    if not reuse.earlier:
        lines.append("no earlier run of this job keeps answers")
    lines += [f"answers not reused: {line}" for line in reuse.differs]
    return lines


def _show_prompts(tokens: PromptLengths) -> None:
    table = _grid()
    failed = f", {tokens.failed:,} of them make no prompt" if tokens.failed else ""
    sampled = f"{counted(tokens.rows, 'row')} sampled in {tokens.seconds:.1f} s{failed}"
    table.add_row("prompts", sampled)
    table.add_row(
        "prompt tokens",
        f"min {tokens.least:,}  median {tokens.median:,}  P90 {tokens.p90:,}  "
        f"P99 {tokens.p99:,}  max {tokens.most:,}",
    )
    longest = f"{tokens.longest['file']}, row {tokens.longest['row']:,}"
    table.add_row("longest", escape(longest))
    table.add_row("shared prefixes", f"{tokens.shared:.0%} of prompt tokens in the sample")
    table.add_row("equal requests", f"{tokens.repeated:.1%} of rows in the sample")
    table.add_row("max_model_len auto", escape(f"{tokens.max_model_len:,} ({tokens.why})"))
    table.add_row("too long for that", f"{tokens.over:.1%} of rows")
    out.print(table)
    most = max(rows for _, _, rows in tokens.histogram)
    wide = len(f"{tokens.most:,}")
    for low, high, rows in tokens.histogram:
        bar = "#" * math.ceil(40 * rows / most)
        out.print(f"  {low:>{wide},} - {high:>{wide},}  {rows:>7,} {bar}", markup=False)
    for note in (*tokens.notes, *tokens.hints):
        out.print(f"  {note}", markup=False)
    for one in tokens.examples:
        print_prompt(f"{one.file}, row {one.row:,}", one.tokens, one.text)


def print_prompt(where: str, tokens: int, text: str) -> None:
    """Print a prompt as the model gets it, below a title; cut a long one.

    The title says which row it is of (`where`, e.g. `row 7`) and how many `tokens` it has.
    """
    out.print(f"[bold]prompt of {escape(where)}[/], {counted(tokens, 'token')}")
    rest = f" ... {len(text) - TEXT_SHOWN:,} more characters" * (len(text) > TEXT_SHOWN)
    out.print(f"{text[:TEXT_SHOWN]}{rest}", markup=False, highlight=False)


def show_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table. Its first column is text; the others are figures, aligned right."""
    table = Table(box=None, pad_edge=False)
    for at, name in enumerate(rows[0] if rows else ()):
        table.add_column(escape(name), overflow="fold", justify="right" if at else "left")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    out.print(table)


def show_sample(report: RunReport, columns: list[str]) -> None:
    """Print `columns` of the first 10 rows of a run's result."""
    from prefect_raybatch.result.finalize import first_rows
    from prefect_raybatch.storage import open_store

    files = [part.path for part in report.parts if part.path.startswith("data/")]
    rows = first_rows(open_store(report.run), files, 10)
    if rows is None:
        return
    table = Table(title="First rows", title_justify="left", box=None, pad_edge=False)
    for name in columns:
        table.add_column(escape(name), overflow="fold")
    for row in rows.select(columns).to_pylist():
        table.add_row(*(escape(str(row[name])) for name in columns))
    out.print(table)


def _print_strays(strays: Sequence[str]) -> None:
    if strays:
        out.print("Unexpected files among the commits, which are ignored, e.g.:")
        for name in strays[:3]:
            out.print(f"  {name}", markup=False)


def _print_failures(failures: Mapping[str, int]) -> None:
    for row in failure_table(failures)[:5]:
        rows = f"{row['rows']} {'row' if row['rows'] == '1' else 'rows'}"
        reason = f"{row['stage']}: {row['error']}: {row['message']}"
        out.print(f"  {rows} failed in {reason}", markup=False)


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    return table


def write_page(path: Path, page: str) -> None:
    """Write an HTML page to the path of `--html`."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror}. Choose another file.") from None
    err.print(f"wrote {path}", markup=False)


def print_json(value: object) -> None:
    """Print a value as one line of JSON; NaN and infinity become null."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    print(json.dumps(finite_in(value), default=str))


def _driver(beat: JsonObject) -> str:
    """Return host and process id of the run's driver, the age of its heartbeat, and what it does.

    If the driver died or may be dead, the text says so instead.
    """
    from prefect_raybatch.driver.heartbeat import alive
    from prefect_raybatch.runs.drivers import driver_state

    place = f"{beat.get('host', '?')}:{beat.get('pid', '?')}"
    age = duration(max(0, beat["age"]))
    state = driver_state(beat)
    if state == "died":
        return f"{place}, died after its heartbeat {age} ago; `raybatch run` resumes the run"
    if state == "silent":
        return f"{place}, no heartbeat for {age}; it may be dead"
    engines = counted(alive(beat["engines"]), "engine")
    text = f"{place}, heartbeat {age} ago: {beat['phase']}, pass {beat['passes']}, {engines}"
    return f"{text}; {beat['about']}" if beat["about"] else text


def show_chain(verdict: ChainVerdict) -> None:
    """Print whether each row of a run is there once, counting all retries of its failed rows."""
    table = Table(box=None, pad_edge=False)
    table.add_column("run", overflow="fold")
    for name in ("rows", "data", "quarantine", "left out", "retried"):
        table.add_column(name, justify="right")
    for link in verdict.runs:
        counts = (link.rows, link.data, link.quarantined, link.skipped, link.retried)
        table.add_row(escape(link.run_key), *(f"{count:,}" for count in counts))
    out.print(table)
    if verdict.ok:
        rows, runs = counted(verdict.rows, "row"), counted(len(verdict.runs), "run")
        out.print(
            f"[green]proved[/]: {rows} of {runs} = {verdict.data:,} in data/ + "
            f"{verdict.quarantined:,} in quarantine + {verdict.skipped:,} left out, each once"
        )
        return
    out.print(f"[red]not proved[/]: {escape(verdict.run)}")
    for fault in verdict.faults:
        out.print(f"  {fault}", markup=False)


def show_store_warnings() -> None:
    """Print warnings of the store, even if Prefect hides log lines.

    Otherwise a command would wait for an unreachable store without saying why.
    """
    logger = logging.getLogger("prefect_raybatch.storage")
    if not any(isinstance(handler, _StoreWarnings) for handler in logger.handlers):
        logger.addHandler(_StoreWarnings(logging.WARNING))


class _StoreWarnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        err.print(f"warning: {record.getMessage()}", markup=False)


def show_status(state: Status) -> None:
    """Print the state of a run, its failures, and the command that continues it."""
    title = escape(f"{state.run_key}: {state.state}  ({state.run})")
    out.print(f"[bold]{escape(state.job)}[/] {title}")
    if state.superseded_by is not None:
        out.print(f"superseded by {state.superseded_by} (repaired); use that run", markup=False)
    first = state.first_model
    if first is not None and state.state != COMPLETED:
        out.print("first model of the cascade, which answers all rows:")
        show_status(first)
        out.print("larger model, which then answers the unsure ones and keeps the others:")
    table = _grid()
    for name, text in _status_facts(state):
        table.add_row(name, escape(text))
    out.print(table)
    if first is None and state.first_phase is not None and state.first_phase.state != COMPLETED:
        out.print("requests phase, which answers new rows first:")
        show_status(state.first_phase)
    _print_strays(state.strays)
    _print_failures(state.failures)
    _print_stops(state)
    if state.state == COMPLETED and state.quarantined and state.superseded_by is None:
        _print_retry(state)


def _print_retry(state: Status) -> None:
    """Print the next command for the failed rows of a complete run.

    It retries them or, if there are retries already, shows the status of the latest one.
    """
    if state.retried_by:
        keys = ", ".join(state.retried_by)
        again = state.failed_again
        verb = "are" if again is None else "were"
        outcome = "" if again is None else f": {again:,} failed again"
        out.print(f"failed rows {verb} retried in {keys}{outcome}", markup=False)
        root = state.run.rpartition("/")[0]
        print_next("raybatch", "status", f"{root}/{state.retried_by[-1]}")
    else:
        options = state.retry_options
        print_next(*failed_rows_command(state.run, state.good, state.failures, options))


def _status_facts(state: Status) -> list[tuple[str, str]]:
    """Return (name, value) pairs: what a run has committed, and which process drives it."""
    asked = f", {state.asked_larger:,} asked of the larger model" if state.asked_larger else ""
    facts = [
        ("rows", f"{state.done:,} of {state.rows:,} ({state.done / state.rows:.0%}){asked}"),
        ("shards", f"{state.committed:,} committed, {state.pending:,} pending"),
        ("in quarantine", f"{state.quarantined:,}{to_larger_text(state.to_larger)}"),
        ("rate", f"{state.rate:,.0f} rows/s"),
    ]
    if state.seconds_left is not None and state.pending:
        facts.append(("time left", duration(state.seconds_left)))
    facts.append(("attempts", f"{len(state.attempts)}"))
    if starts := starts_of(state.attempts):
        phases = {name: seconds for name, seconds in starts[-1].seconds.items() if seconds}
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in phases.items())
        facts.append(("last start", f"{duration(sum(phases.values()))}: {parts}"))
    if state.gpu_hours:
        facts.append(("GPU-hours", money(state.gpu_hours)))
    if state.cost is not None:
        end = (
            f", about {money(state.cost_end, state.currency)} at the end"
            if state.cost_end is not None
            else ""
        )
        facts.append(("cost", f"{money(state.cost, state.currency)}{end}"))
    return facts + [("driver", _driver(beat)) for beat in state.beats]


def _print_stops(state: Status) -> None:
    """Print why the latest attempt stopped, how to continue, and the partial results."""
    from prefect_raybatch.runs.status import live_beats

    if state.failure:
        out.print("[red]failed[/] during ", end="")
    if reason := state.failure or state.undone:
        out.print(reason, markup=False)
    if state.under_way:
        gone = advice("if that process is gone", state.command)
        out.print(f"{state.under_way}; {gone}{state.command}", markup=False)
    if state.drained is not None:
        again = "" if state.command else "; run the same command again to resume"
        out.print(f"drained by {state.drained.by}{again}", markup=False)
    if reason or (state.command and not state.under_way and not live_beats(state)):
        todo = advice(state.first_step, state.command)
        out.print(f"{sentence(todo)}{state.command}", markup=False)
    for partial in state.partials:
        out.print("[yellow]partial result[/]: ", end="")
        place = f"{state.run}/{PARTIAL_FOLDER}/{partial.name}"
        out.print(f"{partial.line} ({place})", markup=False)
    if state.stopped is not None:
        out.print("[red]stopped[/]: ", end="")
        out.print(state.stopped.line(), markup=False)
        for line in state.stopped.lines():
            out.print(f"  {line}", markup=False)


def show_verdict(verdict: Verdict, run_dir: str) -> None:
    """Print whether the files of a run prove that every planned row is there once."""
    if verdict.ok:
        out.print(
            f"[green]proved[/]: {verdict.rows:,} planned rows = {verdict.data:,} in data/ + "
            f"{verdict.quarantined:,} in quarantine + {verdict.skipped:,} left out, each once"
        )
    else:
        out.print(f"[red]not proved[/]: {escape(run_dir)}")
        for fault in verdict.faults:
            out.print(f"  {fault}", markup=False)
    _print_strays(verdict.strays)
    if verdict.orphans:
        size = verdict.orphan_bytes / 2**20
        pieces = counted(verdict.orphans, "unused piece")
        out.print(
            f"{pieces} ({size:,.1f} MiB): no commit names them, and nothing reads them, e.g.:"
        )
        for name in verdict.orphan_names[:3]:
            out.print(f"  {name}", markup=False)
        remove = shlex.join(["raybatch", "reap", run_dir])
        out.print(f"  Remove those that are no longer needed: {remove}", markup=False)
    if not verdict.ok and verdict.finished:
        print_next("raybatch", "repair", run_dir)
    elif not verdict.ok:
        out.print("The run is not finished. Run the job again with the same run key.")
        print_next("raybatch", "status", run_dir)


def show_repaired(repaired: Repaired) -> None:
    """Print the faults of a run, what was restored, and which run continues it."""
    for text in repaired.faults:
        out.print(f"[red]fault[/]  {escape(text)}")
    for text in repaired.restored:
        out.print(f"[green]restored[/]  {escape(text)}")
    if repaired.run_key is None:
        rows = "no row is lost" if repaired.faults else "nothing is lost"
        outcome = "no run was created" if repaired.restored else "nothing was written"
        out.print(f"{repaired.run}: {rows}; {outcome}", markup=False)
        return
    lost = len(repaired.lost)
    out.print(
        f"{repaired.run_key} holds {repaired.taken:,} of {counted(repaired.shards, 'shard')}; "
        f"{counted(lost, 'shard')} of {repaired.run} {are(lost)} lost. Run the job to infer them "
        f"again and to write the result:\n  raybatch run JOB --run-key {repaired.continue_as}",
        markup=False,
    )
    for target in repaired.published:
        out.print(
            f"{target} has rows of {repaired.run}. Delete them before {repaired.run_key} is "
            "published, or they will be there twice.",
            markup=False,
        )
    if repaired.retries:
        out.print(
            f"{', '.join(repaired.retries)} retried failed rows. A retry of {repaired.run_key} "
            "leaves these rows out.",
            markup=False,
        )


def show_reaped(reaped: Reaped, older_than: str, dry_run: bool) -> None:
    """Print how many files were removed, or in a `dry_run` would be removed, by kind.

    `older_than` is the age given to the command, such as `1h`.
    """
    from prefect_raybatch.result.reap import REAPED_KINDS

    for kind, files in reaped.files.items():
        size = reaped.bytes[kind] / 2**20
        verb = "would remove" if dry_run else "removed"
        out.print(f"{verb} {files:,} {REAPED_KINDS[kind]} ({size:,.1f} MiB)")
    if not reaped.files:
        out.print(f"nothing to remove: no unused file is older than {older_than}")
    if reaped.kept:
        out.print(f"kept {counted(reaped.kept, 'piece')} that an active driver may still commit")


def show_engines(clusters: Sequence[StandingCluster]) -> None:
    """Print the engines that wait for the next command, and until when."""
    rows = []
    for one in clusters:
        until = f"ends in {duration(one.seconds_left)}"
        use = f"used by process {one.used_by}" if one.used_by is not None else until
        for engine in one.engines or [None]:
            takes = engine.resources if engine is not None else {}
            held = ", ".join(f"{amount:g} {name}" for name, amount in takes.items() if amount)
            model = engine.model if engine is not None else "no engine yet"
            rows.append({"model": model, "resources": held, "state": use})
    if rows:
        show_rows(rows)
    else:
        out.print("no engine waits on this machine")


def show_actions(actions: Sequence[Action]) -> None:
    """Print the actions of `reconcile_jobs` or `restart_crashed`, and the reason for each."""
    for action in actions:
        out.print(f"{action.what}  {action.job}  {action.why}", markup=False)
    if not actions:
        out.print(
            "nothing to reconcile: no Ray job or cluster of raybatch is live, and no flow run "
            "waits for one"
        )
