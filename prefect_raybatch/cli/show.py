"""What the command line prints: progress, tables, findings and reports, in words and colours."""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from prefect_raybatch.cli.terminal import err, out
from prefect_raybatch.driver.heartbeat import ENDED, MAKING, STARTING, Beat, Listener
from prefect_raybatch.job.table_formats import TABLE_FORMATS
from prefect_raybatch.ledger.layout import DATA_FOLDER, PARTIAL_FOLDER, REPORT_HTML
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import duration, failure_table, published_text, stage_table
from prefect_raybatch.runs.listing import COMPLETED
from prefect_raybatch.runs.run import complete_before
from prefect_raybatch.words import are, counted, money

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from prefect_raybatch.doctor.finding import Finding
    from prefect_raybatch.driver.driver import Progress
    from prefect_raybatch.flow.reconcile import Action
    from prefect_raybatch.plan.prompt_lengths import PromptLengths
    from prefect_raybatch.result.reap import Reaped
    from prefect_raybatch.result.verify import Verdict
    from prefect_raybatch.result.verify_chain import ChainVerdict
    from prefect_raybatch.runs.dry_run import DryRun
    from prefect_raybatch.runs.repair import Repaired
    from prefect_raybatch.runs.status import Status

TEXT_SHOWN = 2000  # characters of a prompt
LINE_EVERY = 5.0  # seconds between progress lines where there is no terminal


class TerminalProgress(Listener):
    """Progress in the terminal: a bar there, a line every few seconds elsewhere."""

    def __init__(self, quiet: bool):
        self.quiet = quiet
        self.bar: Bar | None = None
        self.printed = 0.0
        self.phase, self.about = STARTING, ""
        self.progress: Progress | None = None
        self._lock = threading.RLock()  # beats come from a thread of their own

    def say(self, text: str) -> None:
        if not self.quiet:
            err.print(text, markup=False)

    def begin(self, uri: str) -> None:
        self.say(f"run {uri}")

    def hear(self, beat: Beat) -> None:
        with self._lock:
            fresh, self.phase = beat.phase != self.phase, beat.phase
            self.about = beat.about if self.phase in (STARTING, MAKING) else ""
            progress = self.progress
            if progress is None or progress.recent or self.phase == ENDED:
                return
            if fresh or self.about:
                self.printed = 0.0 if fresh else self.printed
                self(progress)

    def __call__(self, progress: Progress) -> None:
        if self.quiet:
            return
        with self._lock:
            self.progress = progress
            if err.is_terminal:
                self._bar(progress)
            elif time.time() - self.printed >= LINE_EVERY or progress.whole_done == progress.whole:
                self.printed = time.time()
                self.say(_progress_line(progress, self.phase, self.about))

    def _bar(self, progress: Progress) -> None:
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
        note = _progress_line(progress, self.phase, self.about)
        self.bar.update(self.bar.task_ids[0], completed=progress.whole_done, note=note)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def _progress_line(progress: Progress, phase: str, about: str) -> str:
    rows = counted(progress.whole, *progress.unit)
    if not progress.recent:
        # Requests that this attempt has answered itself count as done when rows are looked up.
        before = "" if progress.before.rows else " before"
        done = f"{progress.whole_done:,} of {rows} done{before}" if progress.whole_done else ""
        # The phase is that of the requests until the rows have a beat of their own.
        now = "" if phase == ENDED else f"{phase}{f': {about}' if about else ''}"
        return "; ".join(filter(None, (done, now)))
    failed = progress.failed + progress.held_back
    return (
        f"{progress.whole_done:,} of {rows}, {progress.rate:,.0f} rows/s, "
        f"{duration(progress.seconds_left)} left, {failed:,} failed"
    )


def show_findings(found: Sequence[Finding]) -> None:
    table = _grid()
    colours = {"pass": "green", "warn": "yellow", "fail": "red"}
    for finding in found:
        mark = f"[{colours[finding.mark]}]{finding.mark}[/]"
        table.add_row(mark, escape(finding.check), escape(finding.found))
        if finding.remedy:
            table.add_row("", "", f"[bold]->[/] {escape(finding.remedy)}")
    out.print(table)
    counts = {mark: sum(finding.mark == mark for finding in found) for mark in colours}
    out.print(", ".join(f"{number} {mark}" for mark, number in counts.items()))


def show_plan(found: DryRun) -> None:
    size, have = found.sizing, found.have
    table = _grid()
    where = f"in {counted(found.files, f'{found.format} file')}"
    if found.table is not None and found.format in TABLE_FORMATS:
        version, made = found.table["version"], found.table.get("made")
        when = f" of {made}" if made not in (None, version) else ""
        where = f"of {TABLE_FORMATS[found.format].source} at version {version}{when}"
    about = "about " if found.rows_guessed else ""
    table.add_row("input", escape(f"{about}{counted(found.rows, 'row')} {where}"))
    typed = (f"{name}: {kind}" for name, kind in zip(found.columns, found.types, strict=True))
    table.add_row("columns", escape(", ".join(typed)))
    for number, (name, kind) in enumerate(found.result):
        table.add_row("" if number else "result", escape(f"{name}: {kind}"))
    for number, line in enumerate(found.publish):
        table.add_row("" if number else "publish to", escape(line))
    model = f"{found.model['source']} {found.model.get('revision') or ''}"
    table.add_row("model", escape(model))
    table.add_row("shards", f"{size.shards:,} of {counted(size.rows_per_shard, 'row')}")
    engines = counted(size.pool.engines, "engine")
    table.add_row("shards an engine", f"{size.shards_a_worker:g} ({engines})")
    table.add_row(
        "saturation",
        f"{counted(size.rows_per_shard, 'row')} * {size.concurrent} at once "
        f"{'>=' if size.saturated else '<'} {counted(size.max_num_seqs, 'sequence')}",
    )
    needs = (counted(found.needs[f"{kind.lower()}s"], kind) for kind in ("CPU", "GPU"))
    table.add_row("needs", ", ".join(needs))
    kinds = " and ".join(have["accelerators"]) or "of unknown kind"
    gpus = f"{counted(have['gpus'], 'GPU')} {kinds}" if have["gpus"] else "no GPU"
    asked = "assumed, as it cannot be asked" if have["assumed"] else f"at {have['address']}"
    cpus, nodes = counted(have["cpus"], "CPU"), counted(have["nodes"], "node")
    table.add_row("cluster", escape(f"{cpus}, {gpus}, {nodes}, {asked}"))
    table.add_row("run directory", escape(found.run))
    for number, line in enumerate(reuse_lines(found)):
        table.add_row("" if number else "reuse", escape(line))
    if found.cost is not None:
        table.add_row("cost", escape(found.cost.line()))
    out.print(table)
    sizes = Table(box=None, pad_edge=False)
    for name in ("size", "value", "why"):
        sizes.add_column(name, overflow="fold")
    for figure in found.figures:
        sizes.add_row(escape(figure.name), escape(figure.value), escape(figure.why))
    out.print(sizes)
    over = (found.cost.warning,) if found.cost is not None and found.cost.warning else ()
    for warning in (*size.warnings, *over):
        out.print(f"[yellow]warning[/]: {escape(warning)}")
    if found.tokens is not None:
        _show_prompts(found.tokens)
    for problem in found.problems:
        out.print(f"[red]problem[/]: {escape(problem)}")


def reuse_lines(found: DryRun) -> list[str]:
    """How many rows of a job that reuses would be asked, and why not fewer."""
    if found.reuse is None:
        return []
    reuse = found.reuse
    lines = [
        f"{counted(reuse.counts.asked, 'row')} asked, {reuse.counts.reused:,} with an earlier "
        f"run's answer, {reuse.counts.merged:,} with another row's"
    ]
    if reuse.counts.none:
        lines.append(f"{counted(reuse.counts.none, 'row')} make no request and will fail")
    lines += [f"answers of {run}" for run in reuse.earlier]
    if not reuse.earlier:
        lines.append("no earlier run of this job keeps answers")
    lines += [f"nothing is taken over: {line}" for line in reuse.differs]
    return lines


def _show_prompts(tokens: PromptLengths) -> None:
    table = _grid()
    failed = f", {tokens.failed:,} made none" if tokens.failed else ""
    table.add_row("prompts", f"{tokens.rows:,} sampled in {tokens.seconds:.1f} s{failed}")
    table.add_row(
        "prompt tokens",
        f"min {tokens.least:,}  median {tokens.median:,}  P90 {tokens.p90:,}  "
        f"P99 {tokens.p99:,}  max {tokens.most:,}",
    )
    longest = f"{tokens.longest['file']}, row {tokens.longest['row']:,}"
    table.add_row("longest", escape(longest))
    table.add_row("shared prefixes", f"{tokens.shared:.0%} of prompt tokens, within the sample")
    table.add_row("same requests", f"{tokens.repeated:.1%} of rows, within the sample")
    table.add_row("max_model_len auto", escape(f"{tokens.max_model_len:,} ({tokens.why})"))
    table.add_row("too long for it", f"{tokens.over:.1%} of rows")
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
    """A prompt as the model gets it, cut where it is long."""
    out.print(f"[bold]prompt of {escape(where)}[/], {counted(tokens, 'token')}")
    more = f" ... {len(text) - TEXT_SHOWN:,} characters more" * (len(text) > TEXT_SHOWN)
    out.print(f"{text[:TEXT_SHOWN]}{more}", markup=False, highlight=False)


def show_report(report: RunReport, fresh: bool, page: bool = False) -> None:
    """`page`: it was made by a flow, which Prefect shows."""
    out.print(f"[bold]{escape(report.job)}[/] {escape(f'{report.run_key}: {report.state}')}")
    table = _grid()
    table.add_row(
        "rows",
        f"{report.rows:,} = {report.good:,} answered + {report.failed:,} in "
        f"quarantine + {report.skipped:,} left out",
    )
    if reused := reused_text(report.reuse):
        table.add_row("reuse", reused)
    table.add_row("working time", duration(report.seconds))
    table.add_row(
        "rate", f"{report.rows_per_s:,.0f} rows/s (steady {report.steady_rows_per_s:,.0f})"
    )
    table.add_row("shards", f"{report.shards} ({report.resumed_shards} from earlier attempts)")
    if "total" in report.cost:
        hours = money(report.cost.get("gpu_hours", 0.0))
        table.add_row("cost", f"{money(report.cost['total'])} for {hours} GPU-hours")
    table.add_row("result", escape(f"{report.run}/data/"))
    if failed := report.quarantine_folder:
        table.add_row("failed rows", escape(f"{report.run}/{failed}/"))
    for made in report.published:
        table.add_row(escape(f"published: {made.target}"), escape(published_text(made)))
    table.add_row("report", escape(f"{report.run}/{REPORT_HTML}"))
    out.print(table)
    show_rows(stage_table(report))
    _print_failures(report.failures)
    for one in report.advice:
        out.print(f"[yellow]advice[/]: {escape(f'{one.about}: {one.evidence}')}")
        out.print(f"        [bold]->[/] {escape(one.change)}")
    if page:
        _print_page()
    if not fresh:
        out.print(complete_before(report), markup=False)


def reused_text(reuse: Mapping[str, float]) -> str:
    """Whose answers the rows of a run have; "" where all were asked for."""
    taken = (("reused", "with an earlier run's answer"), ("merged", "with another row's"))
    said = [f"{reuse[name]:,.0f} {what}" for name, what in taken if reuse.get(name)]
    return ", ".join([*said, f"{reuse.get('asked', 0):,.0f} asked"]) if said else ""


def _print_page() -> None:
    from prefect_raybatch.doctor.services import prefect_api

    url = prefect_api()
    if url:
        out.print(f"Prefect page: {url.removesuffix('/api')}/runs", markup=False)
    else:
        command = Path(sys.executable).with_name("prefect")
        out.print(
            f"Prefect page: {command} server start   then http://127.0.0.1:4200/runs", markup=False
        )


def show_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table; its first column is text, the others are figures."""
    table = Table(box=None, pad_edge=False)
    for at, name in enumerate(rows[0] if rows else ()):
        table.add_column(escape(name), overflow="fold", justify="right" if at else "left")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    out.print(table)


def show_sample(report: RunReport, columns: list[str]) -> None:
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
        out.print("files among the commits that are none, and count for nothing, such as")
        for name in strays[:3]:
            out.print(f"  {name}", markup=False)


def _print_failures(failures: Mapping[str, int]) -> None:
    for row in failure_table(failures)[:5]:
        out.print(
            f"  {row['rows']} {'row' if row['rows'] == '1' else 'rows'} failed in {row['stage']}: "
            f"{row['error']}: {row['message']}",
            markup=False,
        )


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    return table


def print_json(value: object) -> None:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    print(json.dumps(value, default=str))


def _heard(beat: dict[str, Any]) -> str:
    from prefect_raybatch.driver.heartbeat import SILENT_AFTER, alive

    place = f"{beat.get('host', '?')}:{beat.get('pid', '?')} {duration(max(0, beat['age']))} ago"
    if beat["age"] > SILENT_AFTER:
        return f"{place}, silent since; it may be dead"
    engines = counted(alive(beat["engines"]), "engine")
    text = f"{place}: {beat['phase']}, pass {beat['passes']}, {engines}"
    return f"{text}; {beat['about']}" if beat["about"] else text


def show_chain(found: ChainVerdict) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("run", overflow="fold")
    for name in ("rows", "data", "quarantine", "left out", "retried"):
        table.add_column(name, justify="right")
    for link in found.runs:
        counts = (link.rows, link.data, link.quarantined, link.skipped, link.retried)
        table.add_row(escape(link.run_key), *(f"{count:,}" for count in counts))
    out.print(table)
    if found.ok:
        out.print(
            f"[green]proved[/]: {counted(found.rows, 'row')} of {counted(len(found.runs), 'run')} "
            f"= {found.data:,} in data/ + {found.quarantined:,} in quarantine + "
            f"{found.skipped:,} left out, each once"
        )
        return
    out.print(f"[red]not proved[/]: {escape(found.run)}")
    for fault in found.faults:
        out.print(f"  {fault}", markup=False)


def show_store_warnings() -> None:
    """Shows the store's warnings, whatever Prefect does with log lines: nobody waits blindly."""
    logger = logging.getLogger("prefect_raybatch.storage")
    if not any(isinstance(handler, _StoreWarnings) for handler in logger.handlers):
        logger.addHandler(_StoreWarnings(logging.WARNING))


class _StoreWarnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        err.print(f"warning: {record.getMessage()}", markup=False)


def show_status(found: Status) -> None:
    state = escape(f"{found.run_key}: {found.state}  ({found.run})")
    out.print(f"[bold]{escape(found.job)}[/] {state}")
    if found.superseded_by is not None:
        out.print(f"was repaired: {found.superseded_by} goes on in its place", markup=False)
    table = _grid()
    table.add_row("rows", f"{found.done:,} of {found.rows:,} ({found.done / found.rows:.0%})")
    table.add_row("shards", f"{found.committed:,} committed, {found.pending:,} pending")
    table.add_row("in quarantine", f"{found.quarantined:,}")
    table.add_row("rate", f"{found.rate:,.0f} rows/s")
    if found.pending:
        table.add_row("time left", duration(found.seconds_left))
    table.add_row("attempts", f"{len(found.attempts)}")
    if found.gpu_hours:
        table.add_row("GPU-hours", money(found.gpu_hours))
    if found.cost is not None:
        left = f", about {money(found.cost_end)} at the end" if found.cost_end is not None else ""
        table.add_row("cost", f"{money(found.cost)}{left}")
    for beat in found.beats:
        table.add_row("heard of", escape(_heard(beat)))
    out.print(table)
    if found.asks is not None and found.asks.state != "completed":
        out.print("what nobody has answered is asked first:")
        show_status(found.asks)
    _print_strays(found.strays)
    _print_failures(found.failures)
    if found.state == COMPLETED and found.quarantined and found.superseded_by is None:
        out.print(f"to ask again about these: raybatch retry-failed {found.run}", markup=False)
    if found.failure:
        out.print("[red]failed[/] while ", end="")
        out.print(found.failure, markup=False)
        if found.command:
            out.print(f"to continue: {found.command}", markup=False)
    if found.drained is not None:
        by = found.drained.by
        out.print(f"drained by {by}: what is left waits for a later call", markup=False)
    for one in found.partials:
        out.print("[yellow]partial result[/]: ", end="")
        out.print(f"{one.line} ({found.run}/{PARTIAL_FOLDER}/{one.name})", markup=False)
    if found.stopped is not None:
        out.print("[red]stopped[/]: ", end="")
        out.print(found.stopped.line(), markup=False)
        for line in found.stopped.lines():
            out.print(f"  {line}", markup=False)


def show_partial(report: RunReport) -> None:
    """What a partial result holds, and loudly what it is not."""
    out.print(f"[bold yellow]PARTIAL[/] {escape(report.job)} {escape(report.run_key)}")
    for note in report.notes:
        out.print(note, markup=False)
    out.print(f"rows: {report.good:,} answered in {report.run}/{DATA_FOLDER}/", markup=False)
    if folder := report.quarantine_folder:
        out.print(f"failed rows: {report.failed:,} in {report.run}/{folder}/", markup=False)
    out.print("the run itself is as it was: run the job again, and it goes on", markup=False)


def show_verdict(found: Verdict, run_dir: str) -> None:
    if found.ok:
        out.print(
            f"[green]proved[/]: {found.rows:,} planned rows = {found.data:,} in data/ + "
            f"{found.quarantined:,} in quarantine + {found.skipped:,} left out, each once"
        )
    else:
        out.print(f"[red]not proved[/]: {escape(run_dir)}")
        for fault in found.faults:
            out.print(f"  {fault}", markup=False)
        if found.finished:
            out.print(f"to mend it: raybatch repair {run_dir}", markup=False)
        else:
            out.print("to go on: run the job again under the same run key", markup=False)
    _print_strays(found.strays)
    if found.orphans:
        size = found.orphan_bytes / 2**20
        pieces = counted(found.orphans, "piece")
        out.print(f"{pieces} that no commit names ({size:,.1f} MiB), such as")
        for name in found.orphan_names[:3]:
            out.print(f"  {name}", markup=False)
        out.print("  nobody reads them; `raybatch reap` removes those that may go", markup=False)


def show_repaired(found: Repaired) -> None:
    for text in found.faults:
        out.print(f"[red]fault[/]  {escape(text)}")
    for text in found.restored:
        out.print(f"[green]restored[/]  {escape(text)}")
    if found.run_key is None:
        rows = "no row is lost" if found.faults else "nothing is lost"
        done = "no run was begun" if found.restored else "nothing was written"
        out.print(f"{found.run}: {rows}; {done}", markup=False)
        return
    out.print(
        f"{found.run_key} holds {found.taken:,} of {counted(found.shards, 'shard')}; "
        f"{counted(len(found.lost), 'shard')} of {found.run} {are(len(found.lost))} lost. To have "
        f"the rest done, the result written and proved:\n"
        f"  raybatch run JOB --run-key {found.run_key}",
        markup=False,
    )
    for target in found.published:
        out.print(
            f"{target} has rows of {found.run}: take them out before {found.run_key} is "
            "published, or they are there twice",
            markup=False,
        )


def show_reaped(found: Reaped, older_than: str, dry_run: bool) -> None:
    from prefect_raybatch.result.reap import REAPED_KINDS

    for kind, files in found.files.items():
        size = found.bytes[kind] / 2**20
        verb = "would remove" if dry_run else "removed"
        out.print(f"{verb} {files:,} {REAPED_KINDS[kind]} ({size:,.1f} MiB)")
    if not found.files:
        out.print(f"nothing older than {older_than} to remove")
    if found.kept:
        out.print(f"kept {counted(found.kept, 'piece')} that a live driver may still commit")


def show_actions(actions: Sequence[Action]) -> None:
    for action in actions:
        out.print(f"{action.what}  {action.job}  {action.why}", markup=False)
    if not actions:
        out.print("nothing to reconcile: no jobs of ours are live and no flow run waits for one")
