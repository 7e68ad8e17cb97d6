"""Builds a `RunReport` from summed commits, and turns it into Markdown and tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prefect_raybatch.harmless import code_span, link, markdown_text
from prefect_raybatch.ledger.failures import FailureKey, alike, failure_texts
from prefect_raybatch.ledger.published import Published
from prefect_raybatch.ledger.records import Part, Plan
from prefect_raybatch.ledger.stats import values_by_column
from prefect_raybatch.model.pinned import ENDPOINT
from prefect_raybatch.report.answers import answer_counts
from prefect_raybatch.report.charts import charts
from prefect_raybatch.report.inputs import null_counts
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.sizing.agreement import unanswered_text
from prefect_raybatch.stages.vllm.phases import START_PHASES
from prefect_raybatch.words import counted, money

DASH = "-"  # an unknown value
LONGEST_MARKDOWN_CELL = 200  # characters of a cell, before they are escaped
FILES = 100  # files of a result that a page names
COUNTED = (  # counts of rows or tokens, summed over the commits
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
    """Build the report of `plan` from its `tally`; the other parameters are report fields."""
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
        nulls=null_counts(totals.others),
        values=values_by_column(totals.others),
        code=dict(tally.codes.most_common()),
        roofline=tally.roofline(),
    )


def markdown(report: RunReport, plots: Sequence[str] = ()) -> str:
    """Return the report as Markdown, result first; `plots` are the lines that show the plots."""
    notes = _section("Notes", [f"- {markdown_text(note)}" for note in report.notes])
    is_complete, larger = report.state == "completed", _larger_in_titles(report)
    lines = [
        f"# {markdown_text(report.job)}: {markdown_text(report.state)}",
        "",
        f"Run {code_span(report.run_key)} in {code_span(report.run)}",
        *(() if is_complete else notes),
        "",
        *table_lines([{"": name, " ": value} for name, value in result_rows(report)]),
        *_section("Models of the cascade", _table_lines(cascade_table(report))),
        *_section("Plots" + larger, plots),
        *_section("Stages" + larger, _table_lines(stage_table(report))),
        *_section("Engines" + larger, _table_lines(engine_table(report))),
        *_section("Start-up" + larger, _table_lines(start_table(report))),
        *_section("Nodes" + larger, _table_lines(node_table(report))),
        *_section("Golden rows answered wrong", _table_lines(wrong_table(report))),
        *_section("Answers that the judge called wrong", _table_lines(rejected_table(report))),
        *_section("Precision", precision_lines(report)),
        *_section("Advice", _table_lines(advice_table(report))),
        *_section("Most common failures", _table_lines(failure_table(report.failures))),
        *_section("Files", _table_lines(part_table(report))),
        *(notes if is_complete else ()),
    ]
    return "\n".join(lines) + "\n"


def of_larger(report: RunReport) -> str:
    """Return " of MODEL" with the larger model of a cascade; "" for any other run.

    It is appended to titles: plots, stages, engines, starts and nodes of a cascade are of this
    model alone.
    """
    return f" of {report.cascade[1].model}" if report.cascade else ""


def _larger_in_titles(report: RunReport) -> str:
    """Return the text of `of_larger`, escaped for a Markdown title."""
    return f" {markdown_text(of_larger(report))}" if report.cascade else ""


def _model_of(report: RunReport) -> str:
    hosted = report.model.get("source") == ENDPOINT
    return f"{report.model.get('identity' if hosted else 'source')}"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", *lines] if lines else []


def result_rows(report: RunReport) -> list[tuple[str, str]]:
    """Return the outcome of the run and its main figures as (name, value), both as text."""
    share = f" ({report.failed / report.rows:.2%})" if report.rows and report.failed else ""
    done = report.good + report.failed + report.skipped
    remaining = [("Rows remaining", f"{report.rows - done:,}")] if done < report.rows else []
    left_out = [("Rows left out by postprocess", f"{report.skipped:,}")] if report.skipped else []
    resumed = f" ({report.resumed_shards:,} by earlier attempts)" if report.resumed_shards else ""
    rows = [
        ("Input rows", f"{report.rows:,}"),
        ("Rows answered", f"{report.good:,}"),
        ("Rows in quarantine", f"{report.failed:,}{share}"),
        *left_out,
        *remaining,
        *([("Accuracy", report.accuracy.text())] if report.accuracy else []),
        *([("Judged accuracy", report.judgement.text())] if report.judgement else []),
        *[
            (f"{series.measure.capitalize()} over time, {name}", series.text())
            for name, series in report.series.items()
        ],
        ("Working time", duration(report.seconds)),
        *(_work_rows(report) if done else ()),
        *reuse_rows(report.reuse),
        *cost_rows(report.cost, report.currency),
        ("Shards", f"{report.shards:,}{resumed}"),
        ("Engine deaths", f"{report.engine_deaths}"),
        ("Model", " and ".join(s.model for s in report.cascade) or _model_of(report)),
        *([("Classifier", report.classifier.text())] if report.classifier else []),
        *([("Engines on a GPU", arrangement_text(report))] if report.arrangement else []),
    ]
    if report.code:
        rows.append(("Code version", code_versions(report.code)))
    rows += [(f"Published: {target.target}", published_text(target)) for target in report.published]
    if report.dashboard:
        rows.append(("Ray dashboard", link(report.dashboard)))
    return rows


def arrangement_text(report: RunReport) -> str:
    """Return how engines were arranged, why, and what a trial showed; "" without learned sizes."""
    found = report.arrangement
    if found is None:
        return ""
    text, trial = f"{found.decided.incumbent}, {found.decided.why}", found.trial
    if trial is None:
        return text
    if trial.error:
        return f"{text}. The trial of {found.decided.challenger} did not work: {trial.error}"
    if found.uncounted:
        return f"{text}. The trial does not count: {found.uncounted}"
    if trial.gain is None or trial.bound is None:
        return f"{text}. The trial had too few shards"
    faster = f"{trial.gain:+.0%} faster, at least {trial.bound:+.0%} with 95 % confidence"
    return f"{text}. In the trial, {found.decided.challenger} were {faster}"


def _work_rows(report: RunReport) -> list[tuple[str, str]]:
    """Return the speed and the figures of tokens and requests as (name, value), both as text."""
    tokens = report.tokens
    tokens_in, tokens_out = tokens.get("prompt_tokens", 0), tokens.get("output_tokens", 0)
    return [
        ("Rows per second", f"{report.rows_per_s:,.0f} (steady {report.steady_rows_per_s:,.0f})"),
        ("Tokens in / out", f"{tokens_in:,.0f} / {tokens_out:,.0f}"),
        ("Prefix cache hits", cached_share(tokens)),
        ("Answers cut off at max_tokens", _cut_off(tokens)),
        *_changed_requests(tokens),
    ]


def code_versions(code: Mapping[str, int]) -> str:
    """Return e.g. `0.1.0+3f2a91c07be4`; with several versions, each with its number of rows.

    `code` is {version of the package on workers: rows}.
    """
    if len(code) == 1:
        return next(iter(code))
    return ", ".join(f"{name} ({counted(rows, 'row')})" for name, rows in code.items())


def published_text(target: Published) -> str:
    """Return where a run was published, e.g. `delta s3://lake/answers, 9,998 rows, version 12`."""
    version = f", version {target.version}" if target.version else ""
    return f"{target.format} {target.place}, {counted(target.rows, 'row')}{version}"


def published_verb(target: Published, began: float) -> str:
    """Return "published" if the run was published since `began`, else "was published before".

    `began` is the start of the publishing call, in seconds since 1970.
    """
    return "published" if target.at >= began else "was published before"


def _cut_off(tokens: Mapping[str, float]) -> str:
    number, structured = tokens.get("cut_off", 0), tokens.get("cut_off_structured", 0)
    incomplete = f", {structured:,.0f} of them incomplete structured output" if structured else ""
    return f"{number:,.0f}{incomplete}"


def _changed_requests(tokens: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return how many requests were deduplicated or truncated, as (name, value) for the report.

    A number that is 0 is left out.
    """
    rows = []
    if duplicates := tokens.get("deduplicated", 0):
        rows.append(("Duplicate requests", f"{duplicates:,.0f}, inferred once per shard"))
    if truncated := tokens.get("truncated", 0):
        rows.append(("Prompts truncated", f"{truncated:,.0f}"))
    return rows


def reuse_rows(reuse: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the reused rows and the savings of a run as (name, value); [] if `reuse` is empty.

    `reuse` is `RunReport.reuse`.
    """
    if not reuse:
        return []
    rows = [
        ("Rows answered by an earlier run", f"{reuse.get('reused', 0):,.0f}"),
        ("Rows answered by an equal row", f"{reuse.get('merged', 0):,.0f}"),
        ("Rows inferred", f"{reuse.get('asked', 0):,.0f}"),
        ("Tokens saved", f"{reuse.get('saved_tokens', 0):,.0f}"),
    ]
    if (seconds := reuse.get("saved_seconds")) is not None:
        rows.append(("GPU-seconds saved (estimate)", f"{seconds:,.0f}"))
    return rows


def cost_rows(cost: Mapping[str, float], currency: str = "") -> list[tuple[str, str]]:
    """Return the cost and the savings of a run as (name, value); `cost` is `RunReport.cost`.

    If no price is known, the list has only the GPU-hours. It is empty for a run without GPUs.
    """
    judge = ", without the judge" if "judge" in cost else ""
    names = {
        "total": "Cost",
        "judge": "Of this, the judge",
        "per_million_tokens": f"Cost per million tokens{judge}",
        "per_answered_row": f"Cost per answered row{judge}",
        "saved_by_resume": "Saved by resuming (estimate)",
        "saved_by_reuse": "Saved by reuse (estimate)",
    }
    costs = [(text, money(cost[name], currency)) for name, text in names.items() if name in cost]
    hours = cost.get("gpu_hours")
    return costs if hours is None else [("GPU-hours", money(hours)), *costs]


def stage_table(report: RunReport) -> list[dict[str, str]]:
    """Return one row per stage: tasks, rows, times, rates, and balance of tasks and workers."""
    return [
        {
            "stage": s.name,
            "tasks": f"{s.tasks:,}",
            "rows": f"{s.rows:,}",
            "total s": f"{s.seconds:,.1f}",
            "rows/s per task": f"{s.rows_per_s:,.0f}",
            "mean s": number(s.mean_s, 2),
            "slowest s": number(s.slowest_s, 2),
            "balance": f"{s.balance:.2f}",
            "busiest": number(s.busiest, 2),
        }
        for s in report.stages
    ]


def engine_table(report: RunReport) -> list[dict[str, str]]:
    """Return one row per known figure of all engines: tokens/s, sequences, caches, GPU use."""
    known, tokens = report.figures, report.tokens
    rates = [
        number(tokens[name] / report.seconds if report.seconds and tokens.get(name) else None, 0)
        for name in ("prompt_tokens", "output_tokens")
    ]
    rows = {
        "engines": _engines(report) if report.workers else DASH,
        "tokens/s in / out": " / ".join(rates),
        "running sequences per engine (mean)": number(known.get("running"), 1),
        "sequence limit per engine (max_num_seqs)": number(known.get("sequences"), 0),
        "waiting sequences per engine (mean)": number(known.get("waiting"), 1),
        "KV cache use (mean)": percent(known.get("kv_cache")),
        "KV cache use (peak)": percent(known.get("kv_cache_peak")),
        "prefix cache hits": cached_share(tokens),
        "steps/s per engine (mean)": number(known.get("steps_per_s"), 1),
        **_roofline_rows(report.roofline),
    }
    return [{"figure": name, "": value} for name, value in rows.items() if value.strip(" -/")]


def start_table(report: RunReport) -> list[dict[str, str]]:
    """Return one row per attempt that started engines: the seconds of each phase, and their sum."""
    known = {name for start in report.starts for name in start.seconds}
    names = [name for name in START_PHASES if name in known]
    return [
        {
            "attempt": start.attempt[:8],
            "engines": f"{start.engines:,}",
            **{f"{name} s": number(start.seconds.get(name), 1) for name in names},
            "total s": number(sum(start.seconds.values()), 1),
        }
        for start in report.starts
    ]


def _roofline_rows(roofline: Mapping[str, float]) -> dict[str, str]:
    """Return {name: used or idle share of the GPUs} as text; {} if `roofline` is empty.

    `roofline` is what `Tally.roofline` returns.
    """
    if not roofline:
        return {}
    causes = [percent(roofline.get(f"idle_{cause}")) for cause in ("rows", "host", "tail")]
    return {
        "share of the GPU's peak FLOPs (MFU)": percent(roofline.get("mfu")),
        "share of the GPU's peak memory bandwidth (MBU)": percent(roofline.get("mbu")),
        "GPU idle: no rows yet / host busy / no rows left": " / ".join(causes),
    }


def wrong_table(report: RunReport) -> list[dict[str, str]]:
    """Return one row for each wrongly answered golden row in the report, which lists up to 10."""
    return [
        {"golden row": one.row, "right answer": one.expected, "answer": one.answer}
        for one in (report.accuracy.wrong if report.accuracy else ())
    ]


def rejected_table(report: RunReport) -> list[dict[str, str]]:
    """Return one row for each answer called wrong by the judge; the report lists up to 10."""
    rejected = report.judgement.rejected if report.judgement else ()
    return [{"judged row": one.shown} for one in rejected]


def cascade_table(report: RunReport) -> list[dict[str, str]]:
    """Return one row per model of a cascade: its rows, tokens and cost."""
    return [
        {
            "model": share.model,
            "rows asked": f"{share.asked:,}",
            "answered": f"{share.answered:,}",
            "failed": f"{share.failed:,}",
            "share": f"{share.answered / report.rows:.1%}" if report.rows else DASH,
            "tokens in": number(share.tokens.get("prompt_tokens"), 0),
            "tokens out": number(share.tokens.get("output_tokens"), 0),
            "GPU-hours": money(share.cost["gpu_hours"]) if "gpu_hours" in share.cost else DASH,
            "cost": money(share.cost["total"], report.currency) if "total" in share.cost else DASH,
        }
        for share in report.cascade
    ]


def cascade_text(report: RunReport) -> str:
    """Describe how many rows each model of a cascade answered; "" for any other run.

    If answers of the smaller model were checked, the text says how often the models agree.
    """
    answered = ", ".join(
        f"{share.answered:,} by {share.model}"
        + (f" ({share.failed:,} failed)" if share.failed else "")
        for share in report.cascade
    )
    agreed = report.cascade[0].agreement() if report.cascade else ""
    failed = report.cascade[0].unanswered if report.cascade else 0
    return "; ".join(
        [
            answered,
            *([f"they agree on {agreed} of the checked rows"] if agreed else []),
            *([unanswered_text(failed, "checked row", "the larger model")] if failed else []),
        ]
    )


def precision_table(report: RunReport) -> list[dict[str, str]]:
    """Return one row per quantization that a trial compared with the stored precision."""
    note = report.precision
    if note is None:
        return []
    return [
        {
            "tried": settings_text(trial.tried),
            "decision": "used" if trial.tried == note.decided else "not used",
            "rows": f"{trial.rows:,}",
            "same answer": DASH if trial.error else f"{trial.agreed:,} ({trial.agreement:.2%})",
            "lower bound": DASH
            if trial.error
            else f"{trial.bound:.2%} ({trial.confidence:.1%} confidence)",
            "seconds": number(trial.seconds, 0),
            "error": trial.error,
        }
        for trial in note.tries
    ]


def disagreement_table(report: RunReport) -> list[dict[str, str]]:
    """Return one row per sampled answer that a tried quantization changed, with both answers."""
    tries = report.precision.tries if report.precision else ()
    return [
        {
            "row": str(row.row),
            "tried": settings_text(trial.tried),
            "answer at stored precision": row.stored,
            "answer as tried": row.tried,
        }
        for trial in tries
        for row in trial.disagreeing
    ]


def precision_text(report: RunReport) -> str:
    """Describe in sentences which quantization a trial decided on; "" if there was no trial."""
    note = report.precision
    if note is None:
        return ""
    text = f"The run used {settings_text(note.decided)}"
    if not note.tries:
        return f"{text}, as run {note.by} decided."
    text += f"; limits.min_agreement is {note.min_agreement:g}, and the trial took "
    text += f"{duration(note.seconds)}."
    if note.itself is not None:
        text += (
            f" At stored precision, {note.itself:.2%} of the answers were the same when the rows "
            "were asked again in another order."
        )
    return text


def precision_lines(report: RunReport) -> list[str]:
    """Return the decision of a precision trial and its evidence as Markdown; [] without a trial."""
    if report.precision is None:
        return []
    lines = [markdown_text(precision_text(report))]
    for table in (precision_table(report), disagreement_table(report)):
        lines += ["", *table_lines(table)] if table else []
    return lines


def settings_text(arguments: Mapping[str, str]) -> str:
    """Return engine arguments as text, e.g. `quantization: fp8`; `stored precision` if none."""
    text = ", ".join(f"{name}: {value}" for name, value in arguments.items())
    return text or "stored precision"


def _engines(report: RunReport) -> str:
    others = f" ({report.other_engines:,} more in other attempts)" if report.other_engines else ""
    return f"{report.engines or len(report.workers):,}{others}"


def node_table(report: RunReport) -> list[dict[str, str]]:
    """Return one row per node with engines: mean CPU and GPU utilization, and peak memory."""
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
    """Return one row per advice: problem, evidence, change."""
    return [
        {"problem": advice.about, "evidence": advice.evidence, "change": advice.change}
        for advice in report.advice
    ]


def part_table(report: RunReport) -> list[dict[str, str]]:
    """Return one row for each of the first 100 files of the result, and one for all others."""
    shown, others = report.parts[:FILES], report.parts[FILES:]
    lines = [(part.path, part.rows, part.bytes) for part in shown]
    if others:
        rows, size = sum(part.rows for part in others), sum(part.bytes for part in others)
        lines.append((f"{len(others):,} more", rows, size))
    return [{"file": path, "rows": f"{rows:,}", "bytes": f"{size:,}"} for path, rows, size in lines]


def number(value: float | None, digits: int) -> str:
    """Return e.g. `1,234.5`, with `digits` decimals; a dash for an unknown value (None)."""
    return DASH if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """Return e.g. `41%` for 0.41; a dash for an unknown value (None)."""
    return DASH if share is None else f"{share:.0%}"


def failure_table(failures: Mapping[str, int]) -> list[dict[str, str]]:
    """Return one row for each kind of failure: rows, stage, error and message.

    The kind with most rows comes first. `failures` is `RunReport.failures`.
    """
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


def table_lines(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the lines of a Markdown table, or `(none)` if there are no rows.

    The keys of the first row are its columns. Cells are escaped, because messages may quote any
    data.
    """
    return _table_lines(rows) or ["(none)"]


def _table_lines(rows: Sequence[Mapping[str, object]]) -> list[str]:
    if not rows:
        return []
    head = list(rows[0])
    lines = [f"| {' | '.join(map(_cell, head))} |", f"| {' | '.join('---' for _ in head)} |"]
    lines += [f"| {' | '.join(_cell(row[name]) for name in head)} |" for row in rows]
    return lines


def _cell(value: object) -> str:
    long = len(str(value)) > LONGEST_MARKDOWN_CELL
    return markdown_text(f"{str(value)[: LONGEST_MARKDOWN_CELL - 3]}..." if long else value)


def cached_share(tokens: Mapping[str, float]) -> str:
    """Return e.g. `41% of prompt tokens`: the share from the prefix cache; a dash if unknown."""
    total = tokens.get("prompt_tokens", 0)
    return f"{tokens.get('cached_tokens', 0) / total:.0%} of prompt tokens" if total else DASH


def duration(seconds: float | None) -> str:
    """Return e.g. `0.4 s`, `12 s`, `3 min 05 s` or `2 h 07 min`; a dash for None (unknown)."""
    if seconds is None:
        return DASH
    if 0 < seconds < 0.95:
        return f"{max(seconds, 0.1):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
