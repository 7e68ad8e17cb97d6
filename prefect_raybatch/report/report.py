"""Builds a `RunReport` from receipts and statistics, and its Markdown and tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prefect_raybatch.harmless import code_span, link, markdown_text
from prefect_raybatch.ledger.failures import FailureKey, alike, failure_texts
from prefect_raybatch.ledger.published import Published
from prefect_raybatch.ledger.records import Part, Plan
from prefect_raybatch.report.answers import answer_counts
from prefect_raybatch.report.charts import charts
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.stages.vllm.phases import START_PHASES
from prefect_raybatch.words import counted, money

DASH = "-"  # what is not known
LONGEST_MARKDOWN_CELL = 200  # characters of a cell, before they are escaped
FILES = 100  # files of a result that a page names
COUNTED = (  # by row or token, summed over the commits
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "cut_off",
    "cut_off_structured",
    "deduplicated",
    "truncated",
)


def build(
    run: str,
    plan: Plan,
    tally: Tally,
    state: str,
    parts: Sequence[Part] = (),
    resumed_shards: int = 0,
    notes: Iterable[str] = (),
    engine_deaths: int = 0,
    dashboard: str = "",
    losses: Mapping[str, int] | None = None,
) -> RunReport:
    """Build the report from the commits; `dashboard` is the URL of Ray's dashboard, "" if there is
    none."""
    busy, totals = tally.busy_seconds, tally.stats
    tokens = {name: float(getattr(totals, name) or 0.0) for name in COUNTED}
    return RunReport(
        run=run,
        run_key=plan.run_key,
        job=plan.job_name,
        state=state,
        rows=plan.rows,
        good=tally.good,
        failed=tally.failed,
        skipped=tally.skipped,
        shards=plan.shards,
        resumed_shards=resumed_shards,
        seconds=round(busy, 1),
        rows_per_s=round(tally.rows / busy, 1) if busy else 0.0,
        tokens=tokens,
        stages=tally.stages(),
        failures=failure_texts(dict(alike(tally.failures).most_common(20))),
        model=dict(plan.model),
        parts=tuple(parts),
        notes=tuple(notes),
        steady_rows_per_s=round(tally.steady_rate, 1),
        engine_deaths=engine_deaths,
        figures=totals.figures(),
        workers=tally.workers(),
        nodes=tally.nodes(),
        engines=tally.engines,
        other_engines=len(tally.by_engine) - tally.engines,
        charts=charts(tally, plan.shards),
        dashboard=dashboard,
        losses=dict(losses or {}),
        answers=answer_counts(totals.others),
        code=dict(tally.codes.most_common()),
        roofline=tally.roofline(),
    )


def markdown(report: RunReport, plots: Sequence[str] = ()) -> str:
    """Return the report as a page that a manager can read: result first, figures after. `plots` are
    lines of Markdown that show them."""
    lines = [
        f"# {markdown_text(report.job)}: {markdown_text(report.state)}",
        "",
        f"Run {code_span(report.run_key)} in {code_span(report.run)}",
        "",
        *table_lines([{"": name, " ": value} for name, value in result_rows(report)]),
        *_section("Plots", plots),
        *_section("Stages", table_lines(stage_table(report))),
        *_section("Engines", table_lines(engine_table(report))),
        *_section("Start", table_lines(start_table(report)) if report.starts else ()),
        *_section("Nodes", table_lines(node_table(report)) if report.nodes else ()),
    ]
    lines += _section("Precision", precision_lines(report))
    lines += _section("Advice", table_lines(advice_table(report)) if report.advice else ())
    if report.failures:
        lines += _section("Commonest failures", table_lines(failure_table(report.failures)))
    if report.parts:
        lines += _section("Files", table_lines(part_table(report)))
    lines += _section("Notes", [f"- {markdown_text(note)}" for note in report.notes])
    return "\n".join(lines) + "\n"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", *lines] if lines else []


def result_rows(report: RunReport) -> list[tuple[str, str]]:
    """Return the outcome of the run as (name, value)."""
    share = f" ({report.failed / report.rows:.2%})" if report.rows and report.failed else ""
    done = report.good + report.failed + report.skipped
    open_rows = [("Rows still to do", f"{report.rows - done:,}")] if done < report.rows else []
    tokens = report.tokens
    rows = [
        ("Rows in", f"{report.rows:,}"),
        ("Rows answered", f"{report.good:,}"),
        ("Rows in quarantine", f"{report.failed:,}{share}"),
        ("Rows left out by postprocess", f"{report.skipped:,}"),
        *open_rows,
        ("Working time", duration(report.seconds)),
        (
            "Rows a second",
            f"{report.rows_per_s:,.0f} (steady {report.steady_rows_per_s:,.0f})",
        ),
        (
            "Tokens in / out",
            f"{tokens.get('prompt_tokens', 0):,.0f} / {tokens.get('output_tokens', 0):,.0f}",
        ),
        ("From the prefix cache", cached_share(tokens)),
        ("Answers cut off at max_tokens", _cut_off(tokens)),
        *_about_requests(tokens),
        *reuse_rows(report.reuse),
        *cost_rows(report.cost),
        ("Shards", f"{report.shards:,} ({report.resumed_shards:,} done by earlier attempts)"),
        ("Engine deaths", f"{report.engine_deaths}"),
        ("Model", f"{report.model.get('source')}"),
    ]
    if report.code:
        rows.append(("Code of the workers", code_said(report.code)))
    rows += [(f"Published: {one.target}", published_text(one)) for one in report.published]
    if report.dashboard:
        rows.append(("Ray dashboard", link(report.dashboard)))
    return rows


def code_said(code: Mapping[str, int]) -> str:
    """Return e.g. `0.1.0+3f2a91c07be4`, or each version with the rows that it did."""
    if len(code) == 1:
        return next(iter(code))
    return ", ".join(f"{name} ({counted(rows, 'row')})" for name, rows in code.items())


def published_text(one: Published) -> str:
    """Return e.g. `delta s3://lake/answers, 9,998 rows, version 12`."""
    version = f", version {one.version}" if one.version else ""
    return f"{one.format} {one.place}, {counted(one.rows, 'row')}{version}"


def _cut_off(tokens: Mapping[str, float]) -> str:
    number, formed = tokens.get("cut_off", 0), tokens.get("cut_off_structured", 0)
    rest = f", of which {formed:,.0f} had to have a given form and are not whole" if formed else ""
    return f"{number:,.0f}{rest}"


def _about_requests(tokens: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return figures of requests that were changed before they were sent; empty if there were
    none."""
    rows = []
    if same := tokens.get("deduplicated", 0):
        rows.append(("Rows with the request of another", f"{same:,.0f}, inferred once a shard"))
    if cut := tokens.get("truncated", 0):
        rows.append(("Prompts cut to fit", f"{cut:,.0f}"))
    return rows


def reuse_rows(reuse: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return what a run reused and saved as (name, value); empty for a run that reuses nothing."""
    if not reuse:
        return []
    rows = [
        ("Rows with an earlier run's answer", f"{reuse.get('reused', 0):,.0f}"),
        ("Rows with another row's answer", f"{reuse.get('merged', 0):,.0f}"),
        ("Rows asked", f"{reuse.get('asked', 0):,.0f}"),
        ("Tokens saved", f"{reuse.get('saved_tokens', 0):,.0f}"),
    ]
    if (seconds := reuse.get("saved_seconds")) is not None:
        rows.append(("GPU-seconds saved, about", f"{seconds:,.0f}"))
    return rows


def cost_rows(cost: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return what a run cost and saved as (name, value); only GPU-hours if the price is unknown,
    and nothing for a run without GPUs."""
    names = {
        "gpu_hours": "GPU-hours",
        "total": "Cost",
        "per_million_tokens": "Cost of a million tokens",
        "per_answered_row": "Cost of an answered row",
        "saved_by_resume": "Cost saved by resuming, about",
        "saved_by_reuse": "Cost saved by reuse, about",
    }
    return [(text, money(cost[name])) for name, text in names.items() if name in cost]


def stage_table(report: RunReport) -> list[dict[str, Any]]:
    """Return one row for each stage: tasks, rows, seconds, rates, and how even tasks and workers
    were."""
    return [
        {
            "stage": s.name,
            "tasks": f"{s.tasks:,}",
            "rows": f"{s.rows:,}",
            "seconds in all": f"{s.seconds:,.1f}",
            "rows/s a task": f"{s.rows_per_s:,.0f}",
            "mean s": number(s.mean_s, 2),
            "slowest s": number(s.slowest_s, 2),
            "balance": f"{s.balance:.2f}",
            "busiest": number(s.busiest, 2),
        }
        for s in report.stages
    ]


def engine_table(report: RunReport) -> list[dict[str, str]]:
    """Return the figures of the engines: tokens per second, sequences, caches. A dash means
    unknown."""
    known, tokens = report.figures, report.tokens
    busy = report.seconds or None
    rates = [
        number(tokens[name] / busy if busy and tokens.get(name) else None, 0)
        for name in ("prompt_tokens", "output_tokens")
    ]
    rows = {
        "engines": _engines(report) if report.workers else DASH,
        "tokens/s in / out": " / ".join(rates),
        "sequences running (mean an engine)": number(known.get("running"), 1),
        "sequences that may run (max_num_seqs)": number(known.get("sequences"), 0),
        "sequences waiting (mean an engine)": number(known.get("waiting"), 1),
        "KV cache in use (mean)": percent(known.get("kv_cache")),
        "KV cache in use (most)": percent(known.get("kv_cache_peak")),
        "from the prefix cache": cached_share(tokens),
        "steps/s (mean an engine)": number(known.get("steps_per_s"), 1),
        **_roofline_rows(report.roofline),
    }
    return [{"engine": name, "": value} for name, value in rows.items()]


def start_table(report: RunReport) -> list[dict[str, str]]:
    """Return one row for each attempt: seconds of each phase until its first commit. A dash means
    unknown."""
    known = {name for one in report.starts for name in one.seconds}
    names = [name for name in START_PHASES if name in known]
    return [
        {
            "attempt": one.attempt[:8],
            "engines": f"{one.engines:,}",
            **{f"{name} s": number(one.seconds.get(name), 1) for name in names},
            "in all s": number(sum(one.seconds.values()), 1),
        }
        for one in report.starts
    ]


def _roofline_rows(roofline: Mapping[str, float]) -> dict[str, str]:
    """Return how much of the GPUs' peak was used; empty if that is unknown."""
    if not roofline:
        return {}
    causes = [percent(roofline.get(f"idle_{cause}")) for cause in ("rows", "host", "tail")]
    return {
        "FLOPs of the GPU's peak (MFU)": percent(roofline.get("mfu")),
        "memory bandwidth of the GPU's peak (MBU)": percent(roofline.get("mbu")),
        "GPU idle: no rows yet / Python on the host / no rows left": " / ".join(causes),
    }


def precision_table(report: RunReport) -> list[dict[str, str]]:
    """Return the quantizations that were tried, and their results; [] if there was no trial."""
    note = report.precision
    return (
        []
        if note is None
        else [
            {
                "tried": settings_text(one.tried),
                "decision": "taken" if one.tried == note.decided else "not taken",
                "rows": f"{one.rows:,}",
                "the same answer": DASH if one.error else f"{one.agreed:,} ({one.agreement:.2%})",
                "shown at least": DASH
                if one.error
                else f"{one.bound:.2%} ({one.confidence:.1%} sure)",
                "seconds": number(one.seconds, 0),
                "why not": one.error,
            }
            for one in note.tries
        ]
    )


def disagreement_table(report: RunReport) -> list[dict[str, str]]:
    """Return sampled rows whose answers differ, with both answers."""
    tries = report.precision.tries if report.precision else ()
    return [
        {
            "row": str(row.row),
            "tried": settings_text(one.tried),
            "as the model is stored": row.stored,
            "as tried": row.tried,
        }
        for one in tries
        for row in one.disagreeing
    ]


def precision_said(report: RunReport) -> str:
    """Return the decision in a sentence; "" if there was nothing to decide."""
    note = report.precision
    if note is None:
        return ""
    text = f"Asked with {settings_text(note.decided)}"
    if not note.tries:
        return f"{text}, as run {note.by} decided."
    text += f"; limits.min_agreement is {note.min_agreement:g}, and the trial took "
    text += f"{duration(note.seconds)}."
    if note.itself is not None:
        text += (
            f" Asked twice, in another order, the model as it is stored gave {note.itself:.2%} of "
            "the answers again."
        )
    return text


def precision_lines(report: RunReport) -> list[str]:
    """Return the decision, the trials, and the rows that differ; [] if there was no trial."""
    if report.precision is None:
        return []
    lines = [markdown_text(precision_said(report))]
    for table in (precision_table(report), disagreement_table(report)):
        lines += ["", *table_lines(table)] if table else []
    return lines


def settings_text(arguments: Mapping[str, str]) -> str:
    """Return e.g. `quantization: fp8`, or that the model is as it is stored."""
    text = ", ".join(f"{name}: {value}" for name, value in arguments.items())
    return text or "the model as it is stored"


def _engines(report: RunReport) -> str:
    more = f" ({report.other_engines:,} more in other attempts)" if report.other_engines else ""
    return f"{report.engines or len(report.workers):,}{more}"


def node_table(report: RunReport) -> list[dict[str, str]]:
    """Return one row for each node with engines: mean CPU and GPU utilization, and peak memory."""
    return [
        {
            "node": node.name,
            "engines": f"{node.engines}",
            "rows": f"{node.rows:,}",
            "CPU": percent(node.figures.get("node_cpu")),
            "memory GiB": number(node.figures.get("node_memory_peak"), 1),
            "GPU": percent(node.figures.get("gpu")),
            "GPU memory GiB": number(node.figures.get("gpu_memory_peak"), 1),
        }
        for node in report.nodes
    ]


def advice_table(report: RunReport) -> list[dict[str, str]]:
    """Return what to change, and why."""
    return [
        {"what": one.about, "evidence": one.evidence, "change": one.change} for one in report.advice
    ]


def part_table(report: RunReport) -> list[dict[str, str]]:
    """Return the first hundred files of the result; the rest in a line."""
    shown, rest = report.parts[:FILES], report.parts[FILES:]
    lines = [(part.path, part.rows, part.bytes) for part in shown]
    if rest:
        rows, size = sum(part.rows for part in rest), sum(part.bytes for part in rest)
        lines.append((f"{len(rest):,} more", rows, size))
    return [{"file": path, "rows": f"{rows:,}", "bytes": f"{size:,}"} for path, rows, size in lines]


def number(value: float | None, digits: int) -> str:
    """Return e.g. 1,234.5; a dash for an unknown value."""
    return DASH if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """Return e.g. 41%; a dash for an unknown value."""
    return DASH if share is None else f"{share:.0%}"


def failure_table(failures: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the most common failures first: rows, stage, error, message."""
    rows = []
    for text, number in sorted(failures.items(), key=lambda item: -item[1]):
        key = FailureKey.parse(text)
        rows.append(
            {
                "rows": f"{number:,}",
                "stage": key.stage,
                "error": key.error,
                "message": key.message,
            }
        )
    return rows


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a Markdown table; cells are escaped, because messages may quote any data."""
    if not rows:
        return ["(none)"]
    head = list(rows[0])
    lines = [f"| {' | '.join(map(_cell, head))} |", f"| {' | '.join('---' for _ in head)} |"]
    lines += [f"| {' | '.join(_cell(row[name]) for name in head)} |" for row in rows]
    return lines


def _cell(value: Any) -> str:
    long = len(str(value)) > LONGEST_MARKDOWN_CELL
    return markdown_text(f"{str(value)[: LONGEST_MARKDOWN_CELL - 3]}..." if long else value)


def cached_share(tokens: Mapping[str, float]) -> str:
    total = tokens.get("prompt_tokens", 0)
    return f"{tokens.get('cached_tokens', 0) / total:.0%} of prompt tokens" if total else "-"


def duration(seconds: float | None) -> str:
    """Return e.g. 12 s, 3 min 05 s, 2 h 07 min; a dash for an unknown value."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
