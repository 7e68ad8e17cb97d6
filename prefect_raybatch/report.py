"""Receipts and statistics to a report: `RunReport`, Markdown and tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prefect_raybatch.records import Part, Plan, RunReport
from prefect_raybatch.tally import Tally


def build(
    run: str,
    plan: Plan,
    tally: Tally,
    state: str,
    parts: Sequence[Part] = (),
    resumed_shards: int = 0,
    notes: Iterable[str] = (),
    engine_deaths: int = 0,
) -> RunReport:
    """A report of what the commits say."""
    busy = tally.busy_seconds
    tokens = {
        name: tally.sums.get(name, 0.0)
        for name in ("prompt_tokens", "cached_tokens", "output_tokens", "cut_off")
    }
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
        failures=dict(sorted(tally.failures.items(), key=lambda kv: -kv[1])[:20]),
        model=dict(plan.model),
        parts=tuple(parts),
        notes=tuple(notes),
        steady_rows_per_s=round(tally.steady_rate, 1),
        engine_deaths=engine_deaths,
    )


def markdown(report: RunReport) -> str:
    """The report as a page a manager can read: result first, figures after."""
    share = f" ({report.failed / report.rows:.2%})" if report.rows and report.failed else ""
    lines = [
        f"# {report.job}: {report.state}",
        "",
        f"Run `{report.run_key}` in `{report.run}`",
        "",
        "| | |",
        "| --- | --- |",
        f"| Rows in | {report.rows:,} |",
        f"| Rows answered | {report.good:,} |",
        f"| Rows in quarantine | {report.failed:,}{share} |",
        f"| Rows left out by postprocess | {report.skipped:,} |",
        f"| Working time | {duration(report.seconds)} |",
        f"| Rows a second | {report.rows_per_s:,.0f} (steady {report.steady_rows_per_s:,.0f}) |",
        f"| Tokens in / out | {report.tokens.get('prompt_tokens', 0):,.0f} / "
        f"{report.tokens.get('output_tokens', 0):,.0f} |",
        f"| From the prefix cache | {cached_share(report.tokens)} |",
        f"| Answers cut off at max_tokens | {report.tokens.get('cut_off', 0):,.0f} |",
        f"| Shards | {report.shards:,} ({report.resumed_shards:,} done by earlier attempts) |",
        f"| Engine deaths | {report.engine_deaths} |",
        f"| Model | {report.model.get('source')} |",
        "",
        "## Stages",
        "",
        *table_lines(stage_table(report)),
    ]
    if report.failures:
        lines += ["", "## Commonest failures", ""]
        lines += table_lines(failure_table(report.failures))
    if report.parts:
        lines += ["", "## Files", ""]
        lines += table_lines(
            [{"file": p.path, "rows": f"{p.rows:,}", "bytes": f"{p.bytes:,}"} for p in report.parts]
        )
    if report.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in report.notes)]
    return "\n".join(lines) + "\n"


def stage_table(report: RunReport) -> list[dict[str, Any]]:
    """One row a stage: time, rows, rows/s, tasks, balance between tasks."""
    return [
        {
            "stage": s.name,
            "tasks": s.tasks,
            "rows": f"{s.rows:,}",
            "seconds in all": f"{s.seconds:,.1f}",
            "rows/s a task": f"{s.rows_per_s:,.0f}",
            "balance": f"{s.balance:.2f}",
        }
        for s in report.stages
    ]


def failure_table(failures: Mapping[str, int]) -> list[dict[str, Any]]:
    """Commonest failures first: rows, stage, error, message."""
    rows = []
    for key, number in sorted(failures.items(), key=lambda kv: -kv[1]):
        stage, kind, message = [*key.split("|", 2), "", ""][:3]
        rows.append({"rows": f"{number:,}", "stage": stage, "error": kind, "message": message})
    return rows


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A Markdown table; cells are made harmless, since messages may quote anybody's data."""
    if not rows:
        return ["(none)"]
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(_cell(row[name]) for name in head) + " |" for row in rows]
    return lines


def _cell(value: Any) -> str:
    text = str(value).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
    return text if len(text) <= 200 else text[:197] + "..."


def cached_share(tokens: Mapping[str, float]) -> str:
    total = tokens.get("prompt_tokens", 0)
    return f"{tokens.get('cached_tokens', 0) / total:.0%} of prompt tokens" if total else "-"


def duration(seconds: float | None) -> str:
    """12 s, 3 min 05 s, 2 h 07 min; a dash for what is not known."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
