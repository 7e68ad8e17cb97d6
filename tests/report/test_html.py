"""The HTML report: whole, self-contained, and harmless whatever a run holds."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.reports import REPORT, full
from helpers.small import small_run

from prefect_raybatch.api import finalize_run
from prefect_raybatch.cli import commands as cli
from prefect_raybatch.errors import NoSuchRun
from prefect_raybatch.ledger.records import Part
from prefect_raybatch.report.html import html, verdict
from prefect_raybatch.report.records import Advice, NodeStats, RunReport, WorkerStats
from prefect_raybatch.report.report import markdown
from prefect_raybatch.runs.finalize_run import load_report
from prefect_raybatch.runs.run import Run, run_of
from prefect_raybatch.runs.status import report_of
from prefect_raybatch.storage import open_store

DRAWS = True

EVIL = "</td></style></title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x00"
VOID = {"meta", "img", "br", "path", "rect", "circle"}


class Page(HTMLParser):
    """Tags and attributes of a page; fails on tags that do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def names(self) -> set[str]:
        return {tag for tag, _ in self.tags}


def test_the_result_comes_first_and_all_parts_are_there():
    text = html(full(notes=("a note",), failures={"engine|ValueError|refused": 3}))
    order = ["<h1>", verdict(full()), "Most common failures", "Plots", "Stages", "Engines", "Nodes"]
    places = [text.index(words.replace("'", "&#39;")) for words in [*order, "Notes", "a note"]]
    assert places == sorted(places)
    page = Page(text)
    assert sum(tag == "svg" for tag, _ in page.tags) == 4
    assert "93%" in text and "200.0" in text


def test_nothing_comes_from_elsewhere_and_nothing_runs():
    page = Page(html(full(dashboard="http://head:8265")))
    assert page.names() & {"script", "iframe", "link", "object", "form", "base"} == set()
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert "src" not in attributes
        if "href" in attributes:
            assert (tag, attributes["href"]) == ("a", "http://head:8265")
    (policy,) = [a for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert str(policy["content"]).startswith("default-src 'none'")


def test_whatever_a_run_holds_is_text():
    plain = Page(html(full()))
    evil = full(
        run=EVIL,
        run_key=EVIL,
        job=EVIL,
        state=EVIL,
        failures={f"{EVIL}|{EVIL}|{EVIL}": 2},
        model={"source": EVIL},
        parts=(Part(EVIL, 1, 1, EVIL),),
        notes=(EVIL,),
        workers=(WorkerStats(EVIL, 1, 1, 1.0, 1.0),),
        nodes=(NodeStats(EVIL, 1, 1, 1, {}),),
        dashboard='javascript:alert("1")',
    )
    text = html(evil, EVIL)
    page = Page(text)
    assert page.names() - plain.names() <= {"ul", "li"}
    assert "\x00" not in text
    assert not [a for _, a in page.tags if any(n.startswith("on") or n == "href" for n in a)]


def test_advice_stands_before_the_plots():
    advice = Advice("engines are uneven", "one of 8 <slow>", "smaller shards")
    text = html(full(advice=(advice,)))
    assert text.index("one of 8 &lt;slow&gt;") < text.index("<h2>Plots</h2>")


def test_long_texts_are_cut():
    assert len(html(full(notes=("x" * 1_000_000,)))) < 100_000


def test_unknown_figures_are_left_out():
    text = html(replace(REPORT, tokens={}))
    assert "rows/s</span>" in text
    assert "GPU use" not in text and "tokens/s</span>" not in text
    assert "Nodes" not in text and "<svg" not in text


def test_the_verdict_says_what_came_of_it():
    whole = replace(REPORT, rows=10, good=7, failed=2, skipped=1)
    assert verdict(whole) == (
        "All 10 rows are accounted for: 7 answered, 2 in quarantine, 1 left out by postprocess."
    )
    assert "4 of 10 rows are done (none in quarantine); 6 remain." in verdict(
        replace(whole, good=4, failed=0, skipped=0)
    )


# --- from a run directory -----------------------------------------------------------------------


def test_an_unfinished_run_has_a_report_of_its_commits(tmp_path):
    run = small_run(tmp_path)
    run.commit(0)
    run.commit(2, failed=[1])
    found = report_of(str(tmp_path))
    assert (found.state, found.good, found.failed, found.shards) == ("unfinished", 9, 1, 4)
    assert [cell[1:3] for cell in found.charts.cells] == [(1, 0), (0, 0), (1, 1), (0, 0)]
    assert "10 of 20 rows are done" in html(found)
    assert "Rows remaining | 10" in markdown(found)


def test_a_run_that_has_only_a_plan_has_one_too(tmp_path):
    small_run(tmp_path)
    found = report_of(str(tmp_path))
    assert (found.state, found.good) == ("planned", 0)
    Page(html(found))
    with pytest.raises(NoSuchRun, match="not a run directory"):
        report_of(str(tmp_path / "other"))


def finished(tmp_path: Path) -> Run:
    run = small_run(tmp_path)
    run.commit_all(failed=[(1, 2)])
    handed = run_of(run.store, run.plan, run.ledger)
    finalize_run(run.job, handed)
    return handed


def test_a_finished_run_has_the_page_beside_its_report(tmp_path):
    finished(tmp_path)
    text = (tmp_path / "_raybatch/report.html").read_text(encoding="utf-8")
    assert "All 20 rows are accounted for: 19 answered, 1 in quarantine." in text
    assert sum(tag == "svg" for tag, _ in Page(text).tags) >= 3
    assert report_of(str(tmp_path)) == load_report(open_store(str(tmp_path)))


@pytest.mark.parametrize("form", ["markdown", "html", "json"])
def test_the_command_writes_what_is_asked_for(tmp_path, capsys, form):
    small_run(tmp_path / "run").commit(0)
    file = tmp_path / "page.html"
    more = {"markdown": [], "html": ["--html", str(file)], "json": ["--json"]}[form]
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(tmp_path / "run"), *more])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    if form == "markdown":
        assert printed.startswith("# nightly: unfinished")
    elif form == "json":
        assert RunReport.from_bytes(printed.encode()).good == 5
    else:
        assert printed == "" and file.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_page_that_cannot_be_written_is_a_clear_error(tmp_path):
    small_run(tmp_path / "run")
    command = [sys.executable, "-m", "prefect_raybatch.cli", "report", str(tmp_path / "run")]
    done = subprocess.run(
        [*command, "--html", str(tmp_path / "no/where.html")], capture_output=True, text=True
    )
    assert done.returncode == 2 and "No such file" in done.stderr
