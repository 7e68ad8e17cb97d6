"""The report as one HTML file: result, advice and failures first, then plots and figures. Pure.

It has no script and loads nothing; its Content-Security-Policy forbids both. The template escapes
everything that comes from a run (keys, paths, error messages, host names), because none of it is
trusted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from prefect_raybatch.harmless import PageLink, clean
from prefect_raybatch.report import plots, run_history
from prefect_raybatch.report import report as reports
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.run_history import HistoryPage
from prefect_raybatch.words import are, counted, money

FIGURE = re.compile(r"-\Z|[\d.,]+(%| s| min \d\d s| h \d\d min)?\Z")
LONGEST_CELL = 500  # characters of a cell


def html(report: RunReport, made: str = "") -> str:
    """Return the report as an HTML page; `made` is the time shown in its footer."""
    pictures = [Markup(picture) for picture in plots.report_plots(report).values()]
    return _template().render(**_parts(report), plots=pictures, made=made)


def fragment(report: RunReport) -> str:
    """Return the report as HTML without plots and style, to show below a notebook's cell."""
    return _template("fragment.html.j2").render(**_parts(report))


def _parts(report: RunReport) -> dict[str, object]:
    """Return the variables of the report's templates, by name."""
    return {
        "report": report,
        "verdict": verdict(report),
        "tiles": _tiles(report),
        "advice": reports.advice_table(report),
        "failures": reports.failure_table(report.failures),
        "result": reports.result_rows(report),
        "of_larger": reports.of_larger(report),
        "stages": reports.stage_table(report),
        "precision": reports.precision_text(report),
        "tries": reports.precision_table(report),
        "wrong": reports.wrong_table(report),
        "rejected": reports.rejected_table(report),
        "models": reports.cascade_table(report),
        "disagreements": reports.disagreement_table(report),
        "engines": [tuple(row.values()) for row in reports.engine_table(report)],
        "starts": reports.start_table(report),
        "nodes": reports.node_table(report),
        "files": reports.part_table(report),
    }


def history_html(pages: Sequence[HistoryPage], made: str = "") -> str:
    """Return the run history of several jobs as one HTML page; each of `pages` has one job's runs.

    `made` is the time shown in its footer.
    """
    drawn = [plots.history_plot(page.runs) for page in pages]
    return _template("history.html.j2").render(
        pages=pages,
        made=made,
        headlines=[run_history.headlines(page) for page in pages],
        runs=[run_history.history_rows(page) for page in pages],
        compared=[run_history.comparison_note(page) for page in pages],
        answers=[run_history.answers_table(page) for page in pages],
        plots=[Markup(picture) if picture else "" for picture in drawn],
        to_continue=[run_history.runs_to_continue(page) for page in pages],
        notes=[run_history.unread(page) for page in pages],
    )


def diff_html(parts: Mapping[str, object], made: str = "") -> str:
    """Return an HTML page that compares a run with a changed job: changed answers side by side.

    `parts` has the template's variables, by name; `made` is the time shown in the footer.
    """
    return _template("diff.html.j2").render(**parts, made=made)


@cache
def _template(name: str = "report.html.j2") -> Template:
    environment = Environment(
        loader=PackageLoader("prefect_raybatch", "report"),
        autoescape=True,
        finalize=_text,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["link"] = lambda value: isinstance(value, PageLink)
    environment.filters["figures"] = _figures
    return environment.get_template(name)


def _text(value: object) -> str:
    """Return a value as cleaned text, cut to 500 characters; `Markup` is returned unchanged.

    The template escapes the text.
    """
    if isinstance(value, Markup):
        return value
    text = str(value)
    return clean(text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 3] + "...")


def _figures(rows: Sequence[Mapping[str, object]]) -> set[str]:
    """Return the columns in which all cells are figures; the page aligns them right."""
    return {name for name in rows[0] if all(FIGURE.match(str(row[name])) for row in rows)}


def verdict(report: RunReport) -> str:
    """Return the numbers of rows answered, in quarantine and remaining, in one sentence."""
    done = report.good + report.failed + report.skipped
    quarantine = f"{report.failed:,} in quarantine" if report.failed else "none in quarantine"
    if done < report.rows:
        rows = counted(report.rows, "row")
        return f"{done:,} of {rows} {are(done)} done ({quarantine}); {report.rows - done:,} remain."
    left_out = f", {report.skipped:,} left out by postprocess" if report.skipped else ""
    all_rows = "The row is" if report.rows == 1 else f"All {report.rows:,} rows are"
    return f"{all_rows} accounted for: {report.good:,} answered, {quarantine}{left_out}."


def _tiles(report: RunReport) -> dict[str, str]:
    """Return {name: value} of the main figures; unknown figures are left out."""
    tokens = report.tokens.get("prompt_tokens", 0) + report.tokens.get("output_tokens", 0)
    tiles = {
        "rows answered": f"{report.good:,}",
        "in quarantine": f"{report.failed:,}",
        **({"accuracy": f"{report.accuracy.share:.1%}"} if report.accuracy else {}),
        **({"judged accuracy": report.judgement.headline} if report.judgement else {}),
        "working time": reports.duration(report.seconds),
        "rows/s": reports.number(report.rows_per_s or None, 0),
        "tokens/s": reports.number(
            tokens / report.seconds if tokens and report.seconds else None, 0
        ),
        **(
            {"cost": money(report.cost["total"], report.currency)} if "total" in report.cost else {}
        ),
        "GPU use": reports.percent(report.figures.get("gpu")),
        "KV cache peak": reports.percent(report.figures.get("kv_cache_peak")),
    }
    return {name: value for name, value in tiles.items() if value != reports.DASH}
