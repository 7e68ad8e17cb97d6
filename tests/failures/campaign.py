"""Plays the nights one after the other, looks at each in the page, and writes what was seen."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import programs
import pytest
from helpers import environ
from helpers.browser import SIZE, browser_page, expect, picture
from helpers.ray_head import ROOT
from playwright.sync_api import Page

from .cases import CASES, Case, Seen
from .world import World, new_world

DOCS = ROOT / "docs"
BEGIN, END = "<!-- nights: begin -->", "<!-- nights: end -->"
HEAD = [
    "| night | what the page says |",
    "| --- | --- |",
]
COMMAND = re.compile(
    r"prefect (flow-run retry [0-9a-f-]{36}|worker start --pool \S+|deployment run .+)"
)
ROW = re.compile(r"\| \[.*\]\(\.\./images/night-(.+)\.png\) \|")


def look(page: Page, world: World, case: Case, seen: Seen, folder: Path) -> None:
    """Opens what an operator opens, finds each text on the first screen, and keeps the picture."""
    opened(page, world.prefect.url.removesuffix("/api"), seen)
    for text in seen.texts:
        found = page.get_by_text(text, exact=False).first
        expect(found).to_be_visible()
        box = found.bounding_box()
        if box is None or box["y"] > SIZE["height"]:
            raise AssertionError(f"{text!r} is not on the first screen: {box}")
    if "Traceback" in page.locator("body").inner_text():
        raise AssertionError("a traceback is shown")
    picture(page, f"night-{case.name}", folder)


def shown_command(page: Page) -> str:
    """The first command on the page that continues or makes up a run, as a person copies it."""
    for block in page.locator("pre, code, .log-row, .state-message, li, td, p").all():
        text = block.inner_text().replace("\\\n", " ")
        if match := COMMAND.search(" ".join(text.split())):
            return match[0].rstrip(". ")
    raise AssertionError("the page shows no command")


def mended(world: World, seen: Seen, command: str) -> None:
    """Removes the cause, carries out the command that the page shows, and waits for the result."""
    if seen.mend is None:
        return
    seen.mend()
    if command:
        print(f"  {command}", flush=True)
        world.carry_out(command)
    world.complete(seen.mends)


def play(case: Case, folder: Path) -> Seen:
    """Plays a night in a world of its own, so that what it leaves behind disturbs no other, looks
    at it, and carries out the command that is shown. The browser is closed meanwhile: while one is
    open, Prefect's calls are awaitables."""
    with new_world() as world:
        try:
            seen = case.play(world)
        except BaseException:  # stopped by hand or by a limit of time, too
            print(world.told(), flush=True)
            raise
        with browser_page() as page:
            try:
                look(page, world, case, seen, folder)
                needed = seen.mend is not None and not seen.by_itself
                command = shown_command(page) if needed else ""
            except Exception:
                picture(page, f"wrong-{case.name}", Path(tempfile.gettempdir()))
                raise
        mended(world, seen, command)
    return seen


def opened(page: Page, site: str, seen: Seen) -> None:
    """The artifact of a night, a page of ours, or the log of its run: as the page comes up, or the
    warnings."""
    if seen.file is not None:
        page.goto(seen.file.as_uri())
        return
    if seen.key:
        page.goto(f"{site}/artifacts/key/{seen.key}")
        page.locator("a[href*='/artifacts/artifact/']").first.click()
        expect(page.get_by_text("Show raw data")).to_be_visible()
        return
    page.goto(f"{site}/runs/flow-run/{seen.run}")
    if seen.warnings:
        page.get_by_role("button", name="Oldest to newest").press("ArrowDown")
        page.locator(".p-select-option", has_text="Newest to oldest").click()
        page.get_by_role("button", name="Level: all").press("ArrowDown")
        page.locator(".p-select-option", has_text="Warning").click()


def write(found: Mapping[str, str]) -> None:
    """The rows of the nights that were seen into the page of failures; others stay as they are."""
    page = DOCS / "how-to/failures.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    table, after = rest.split(END)
    rows = {match[1]: line for line in table.splitlines() if (match := ROW.match(line))}
    rows |= found
    lines = HEAD + [rows[case.name] for case in CASES if case.name in rows]
    text = "\n".join([before + BEGIN, *lines, END + after])
    page.write_text(text, encoding="utf-8")


def row(case: Case) -> str:
    link = f"[{case.title}](../images/night-{case.name}.png)"
    return f"| {link} | {case.said} |"


def main() -> int:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(prog="failures", description=__doc__)
    parser.add_argument("--only", help=f"of {', '.join(names)}; without it all")
    args = parser.parse_args()
    only = args.only.split(",") if args.only else names
    if unknown := [name for name in only if name not in names]:
        parser.error(f"--only: {', '.join(unknown)} not known; {', '.join(names)} are")
    programs.install()
    os.environ["RAYBATCH_POLICY"] = environ.POLICY
    found, failed = dict[str, str](), 0
    for case in CASES:
        if case.name not in only:
            continue
        began = time.monotonic()
        print(f"{case.name}: {case.planted}", flush=True)
        try:
            seen = play(case, DOCS / "images")
        except (Exception, pytest.fail.Exception):
            failed += 1
            print(f"{case.name}: not as it should be\n{traceback.format_exc()}", flush=True)
        else:
            found[case.name] = row(case)
            took = time.monotonic() - began
            print(f"{case.name}: seen after {seen.seconds:.0f} s ({took:.0f} s in all)", flush=True)
    write(found)
    return 1 if failed else 0
