"""The report as one HTML file: result first, then figures, plots, failures, files, notes. Pure.

No script, nothing from elsewhere, and a policy that forbids both; whatever comes from a run (keys,
paths, error texts, names of hosts) is escaped, since it may be anybody's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from prefect_raybatch.ledger.records import RunReport
from prefect_raybatch.report import plots
from prefect_raybatch.report import report as reports
from prefect_raybatch.words import are, clean, counted

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
URL = re.compile(r"https?://[^\s\"'<>]+\Z")
FIGURE = re.compile(r"-|[\d.,]+%?\Z")
LONGEST = 500  # characters of a cell

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #f3f4f6; margin: 0; }
main { max-width: 980px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 12px; }
.where { color: #4b5563; overflow-wrap: anywhere; margin: 0 0 20px; }
.result { border-left: 6px solid #009e73; background: #fff; border-radius: 6px;
  padding: 14px 18px; }
.result.open { border-color: #e69f00; } .result strong { font-size: 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(122px, 1fr)); gap: 10px;
  margin-top: 16px; }
.tile { background: #fff; border-radius: 6px; padding: 12px; }
.tile b { display: block; font-size: 17px; white-space: nowrap; }
.tile span { color: #4b5563; font-size: 13px; }
.plot { background: #fff; border-radius: 6px; margin: 0 0 14px; padding: 6px; overflow-x: auto; }
.plot svg { display: block; max-width: 100%; height: auto; margin: 0 auto; }
.scroll { overflow-x: auto; background: #fff; border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 7px 12px; border-bottom: 1px solid #e5e7eb;
  vertical-align: top; overflow-wrap: anywhere; }
th { color: #4b5563; font-weight: 600; background: #fafafa; overflow-wrap: normal; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr:last-child td { border-bottom: 0; } footer { color: #6b7280; font-size: 13px; margin-top: 36px; }
@media print { body { background: #fff; } .plot, .tile { break-inside: avoid; } }
"""


def html(report: RunReport, made: str = "") -> str:
    """The page; `made` says when, in the footer."""
    title = f"{report.job} {report.run_key}: {report.state}"
    drawn = plots.of_report(report)
    body = [
        f"<h1>{_text(report.job)}</h1>",
        f'<p class="where">Run {_text(report.run_key)} in {_text(report.run)}</p>',
        _result(report),
        _tiles(report),
        _section("Advice", _table(reports.advice_table(report))),
        _section("Plots", "".join(f'<div class="plot">{svg}</div>' for svg in drawn.values())),
        _section("Commonest failures", _table(reports.failure_table(report.failures))),
        _section("Figures", _pairs(reports.result_rows(report))),
        _section("Stages", _table(reports.stage_table(report))),
        _section("Engines", _pairs([tuple(row.values()) for row in reports.engine_table(report)])),
        _section("Nodes", _table(reports.node_table(report))),
        _section("Notes", _list(report.notes)),
        _section("Files", _table(reports.part_table(report))),
        f"<footer>prefect_raybatch {_text(made)}. A dash is not known.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def verdict(report: RunReport) -> str:
    """What came of the run in one sentence."""
    done = report.good + report.failed + report.skipped
    quarantine = f"{report.failed:,} in quarantine" if report.failed else "none in quarantine"
    if done < report.rows:
        rows = counted(report.rows, "row")
        return f"{done:,} of {rows} {are(done)} committed ({quarantine}); the rest is to do."
    left = f", {report.skipped:,} left out by postprocess" if report.skipped else ""
    all_rows = "The row is" if report.rows == 1 else f"All {report.rows:,} rows are"
    return f"{all_rows} accounted for: {report.good:,} answered, {quarantine}{left}."


def _result(report: RunReport) -> str:
    kind = "result" if report.state == "completed" else "result open"
    return (
        f'<div class="{kind}"><strong>{_text(report.state.capitalize())}.</strong> '
        f"{_text(verdict(report))}</div>"
    )


def _tiles(report: RunReport) -> str:
    tokens = report.tokens.get("prompt_tokens", 0) + report.tokens.get("output_tokens", 0)
    tiles = {
        "rows answered": f"{report.good:,}",
        "rows in quarantine": f"{report.failed:,}",
        "time of work": reports.duration(report.seconds),
        "rows/s": reports.number(report.rows_per_s or None, 0),
        "tokens/s": reports.number(
            tokens / report.seconds if tokens and report.seconds else None, 0
        ),
        "GPU use": reports.percent(report.figures.get("gpu")),
        "KV cache at most": reports.percent(report.figures.get("kv_cache_peak")),
    }
    made = "".join(
        f'<div class="tile"><b>{_text(value)}</b><span>{_text(name)}</span></div>'
        for name, value in tiles.items()
    )
    return f'<div class="tiles">{made}</div>'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>" if body else ""


def _list(notes: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(note)}</li>' for note in notes)}</ul>" if notes else ""


def _pairs(rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(
        f"<tr><td>{_text(name)}</td><td>{_cell(value)}</td></tr>" for name, value in rows
    )
    return f'<div class="scroll"><table>{cells}</table></div>'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    # Figures stand to the right, one below the other.
    figures = {name for name in rows[0] if all(FIGURE.match(str(row[name])) for row in rows)}
    kind = {name: ' class="n"' if name in figures else "" for name in rows[0]}
    head = "".join(f"<th{kind[name]}>{_text(name)}</th>" for name in rows[0])
    body = "".join(
        f"<tr>{''.join(f'<td{kind[name]}>{_cell(row[name])}</td>' for name in rows[0])}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    text = str(value)
    if URL.match(text):
        return f'<a href="{_text(text)}" rel="noreferrer">{_text(text)}</a>'
    return _text(text)


def _text(value: Any) -> str:
    words = str(value)
    return escape(clean(words if len(words) <= LONGEST else words[: LONGEST - 3] + "..."))
