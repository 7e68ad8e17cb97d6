"""Hostile texts in a real browser: report pages and Prefect's pages of artifacts show them, run
nothing, and ask no other host for anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import markdown as python_markdown
import pytest
from attacks import FOREIGN, HIDDEN, MARKUP
from helpers.browser import browser_page, expect
from helpers.hostile import hostile_beat, hostile_cause, hostile_history, hostile_report
from helpers.prefect_server import Prefect, settings_for
from markdown_it import MarkdownIt
from playwright.sync_api import Page, Request
from prefect.artifacts import Artifact, MarkdownArtifact, ProgressArtifact, TableArtifact

from prefect_raybatch.flow.artifacts import put
from prefect_raybatch.flow.page import live_rows
from prefect_raybatch.harmless import markdown_text
from prefect_raybatch.report import plots
from prefect_raybatch.report.html import history_html, html
from prefect_raybatch.report.report import failure_table, markdown, table_lines
from prefect_raybatch.report.run_history import history_markdown

DRAWS = True

pytestmark = [pytest.mark.e2e, pytest.mark.whole, pytest.mark.timeout(900)]

TEXTS = [*MARKUP.values(), *HIDDEN.values()]
LAST = "the text after all others"
# What a text would have to become to do something; plots are images within the page.
LIVE = (
    "script, iframe, img[src]:not([src^='data:image/svg+xml']), a, form, input, video, object, base"
)
PREFECTS_OWN = ".amplitude.com"  # which its newer page asks of itself
POLICY = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")
SHAPES = ("<svg onload", "<details open", "<style>@import", "<base href")


@dataclass
class Watched:
    """A page, and what it did that no text should make it do."""

    page: Page
    asked: list[str] = field(default_factory=list)  # other hosts
    said: list[str] = field(default_factory=list)  # in dialogs

    def hear(self, request: Request) -> None:
        url = urlsplit(request.url)
        host = url.hostname or ""
        if url.scheme in ("file", "data", "blob") or host == "127.0.0.1":
            return
        if not host.endswith(PREFECTS_OWN):
            self.asked.append(request.url)

    def did_nothing(self) -> None:
        assert self.page.evaluate("window.ran") is None
        assert (self.asked, self.said) == ([], [])


@pytest.fixture
def watched() -> Iterator[Watched]:
    with browser_page() as page:
        made = Watched(page)
        page.on("request", made.hear)
        page.on("dialog", lambda dialog: (made.said.append(dialog.message), dialog.dismiss()))
        # Nothing leaves this machine, whatever comes of the test.
        page.route(re.compile(re.escape(FOREIGN)), lambda route: route.abort())
        yield made


def opened(watched: Watched, folder: Path, text: str) -> None:
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    watched.page.goto(file.as_uri(), wait_until="networkidle")


@pytest.mark.parametrize("policy", [True, False], ids=["as it is", "without its policy"])
@pytest.mark.parametrize("kind", ["report", "history"])
def test_pages_show_hostile_texts_and_do_nothing(
    kind: str, policy: bool, watched: Watched, tmp_path: Path
) -> None:
    """The policy in the page is a second wall: without it nothing happens either."""
    texts = [*TEXTS, LAST]
    made = html(hostile_report(*texts))
    if kind == "history":
        made = history_html([hostile_history(*texts)])
    opened(watched, tmp_path, made if policy else POLICY.sub("", made))
    expect(watched.page.get_by_text(LAST).first).to_be_visible()
    assert watched.page.locator(LIVE).count() == 0
    shown = watched.page.inner_text("body")
    assert all(words in shown for words in SHAPES)
    watched.did_nothing()


@pytest.mark.parametrize("reader", ["CommonMark", "Python-Markdown"])
def test_markdown_shows_hostile_texts_where_html_is_allowed(
    reader: str, watched: Watched, tmp_path: Path
) -> None:
    texts = [*TEXTS, LAST]
    text = "\n\n".join(
        [
            markdown(hostile_report(*texts)),
            history_markdown(hostile_history(*texts), plots=False),
            hostile_cause(*texts).markdown(),
        ]
    )
    if reader == "CommonMark":
        made = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text)
    else:
        made = python_markdown.markdown(text, extensions=["tables", "fenced_code"])
    opened(watched, tmp_path, f"<meta charset=utf-8>{made}")
    expect(watched.page.get_by_text(LAST).first).to_be_visible()
    assert watched.page.locator(LIVE).count() == 0
    watched.did_nothing()


def test_a_page_that_does_something_is_noticed(watched: Watched, tmp_path: Path) -> None:
    """Else the tests here would hold of any page."""
    with watched.page.expect_request(re.compile(re.escape(FOREIGN))):
        opened(watched, tmp_path, MARKUP["an image from elsewhere"])
    opened(watched, tmp_path, MARKUP["an image that is not there"] + "<script>alert(1)</script>")
    watched.page.wait_for_function("window.ran === 1")
    assert watched.asked and watched.said == ["1"]


def artifacts(texts: list[str]) -> dict[str, Artifact]:
    """Artifacts of each kind that this package makes, of hostile texts."""
    report = hostile_report(*texts)
    lines = plots.image_lines(report)
    beat = hostile_beat(texts[0])
    rows = list(reversed(texts))  # the newer page shows the first ten
    return {
        "report": MarkdownArtifact(markdown=markdown(report, lines), description="Report."),
        "history": MarkdownArtifact(markdown=history_markdown(hostile_history(*texts))),
        "failure": MarkdownArtifact(markdown=hostile_cause(*texts).markdown()),
        "live": MarkdownArtifact(markdown="\n".join([*table_lines(live_rows(beat)), "", LAST])),
        "failures": TableArtifact(table=failure_table({text: 1 for text in rows})),
        "cells": TableArtifact(table=[{"what": text, "rows": 1} for text in rows]),
        "progress": ProgressArtifact(
            progress=50.0, description=" ".join(map(markdown_text, texts))
        ),
    }


PAGES = {  # of Prefect, by where they are: what shows an artifact
    "": ".markdown-renderer, .artifact-data-table__cell, .artifact-data-progress",
    "/v2": "[data-testid='markdown-display'], td, .prose, [data-testid='progress-display']",
}


def test_prefects_pages_show_hostile_texts_and_do_nothing(
    prefect_process: Prefect, watched: Watched
) -> None:
    page, site = watched.page, prefect_process.url.removesuffix("/api")
    # What is not escaped is live there: else this test would hold of any text.
    cell = f'[{{"what": "![x](http://{FOREIGN}/x.png)"}}]'
    raw = prefect_process.ask("artifacts/", {"key": "raw", "type": "table", "data": cell})["id"]
    with page.expect_request(re.compile(re.escape(FOREIGN))):
        page.goto(f"{site}/artifacts/artifact/{raw}")
    watched.asked.clear()

    with settings_for(prefect_process):
        made = {
            kind: put(artifact, f"hostile-{kind}", MARKUP["the end of code"])
            for kind, artifact in artifacts([*TEXTS, LAST]).items()
        }
    for pages, inside in PAGES.items():
        for kind, known in made.items():
            page.goto(f"{site}{pages}/artifacts/artifact/{known}")
            expect(page.get_by_text(LAST).first).to_be_visible()
            found = page.locator(inside)
            made_live = found.locator(LIVE).evaluate_all("all => all.map(one => one.outerHTML)")
            assert found.count() and made_live == [], (pages, kind)
            watched.did_nothing()
