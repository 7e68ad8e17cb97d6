"""Plays the nights one after the other, looks at each in the page, and writes what was seen."""

from __future__ import annotations

import argparse
import os
import tempfile
import traceback
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from helpers.browser import SHOTS, SIZE, expect, picture
from helpers.ray_head import ROOT

from .cases import CASES, Case, Seen
from .world import World, new_world

DOCS = ROOT / "docs"
BEGIN, END = "<!-- nights: begin -->", "<!-- nights: end -->"


def look(world: World, case: Case, seen: Seen, folder: Path) -> None:
    """Opens what an operator opens, finds each text on the first screen, and keeps the picture."""
    world = seen.world or world
    page, site = world.page, world.prefect.url.removesuffix("/api")
    if seen.key:
        page.goto(f"{site}/artifacts/key/{seen.key}")
        page.locator("a[href*='/artifacts/artifact/']").first.click()
        expect(page.get_by_text("Show raw data")).to_be_visible()
    else:
        page.goto(f"{site}/runs/flow-run/{seen.run}")
        page.get_by_role("button", name="Oldest to newest").press("ArrowDown")
        page.locator(".p-select-option", has_text="Newest to oldest").click()
    if seen.green:
        page.get_by_role("button", name="Level: all").press("ArrowDown")
        page.locator(".p-select-option", has_text="Warning").click()
    for text in seen.texts:
        found = page.get_by_text(text, exact=False).first
        expect(found).to_be_visible()
        box = found.bounding_box()
        if (seen.key or seen.green) and (box is None or box["y"] > SIZE["height"]):
            raise AssertionError(f"{text!r} is not on the first screen: {box}")
    if "Traceback" in page.locator("body").inner_text():
        raise AssertionError("a traceback is shown")
    picture(page, f"night-{case.name}", folder)


def table(found: Sequence[tuple[Case, Seen]]) -> str:
    """What the page of failures shows of the nights."""
    lines = [f"Played on {date.today()}, two CPU cores.", ""]
    lines += ["| night | how it was made | in the page after |", "| --- | --- | --- |"]
    for case, seen in found:
        link = f"[{case.title}](images/night-{case.name}.png)"
        lines.append(f"| {link} | {case.planted} | {seen.seconds:.0f} s |")
    return "\n".join(lines)


def write(found: Sequence[tuple[Case, Seen]]) -> None:
    page = DOCS / "failures.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main() -> int:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(prog="failures", description=__doc__)
    parser.add_argument("--only", help=f"of {', '.join(names)}; without it all, into docs/")
    args = parser.parse_args()
    only = args.only.split(",") if args.only else names
    if unknown := [name for name in only if name not in names]:
        parser.error(f"--only: {', '.join(unknown)} not known; {', '.join(names)} are")
    found, failed = [], 0
    with tempfile.TemporaryDirectory(prefix="nights-") as made:
        folder = Path(made)
        shots = Path(os.environ.get(SHOTS) or (DOCS / "images" if not args.only else "nights"))
        with new_world(folder) as world:
            for case in CASES:
                if case.name not in only:
                    continue
                try:
                    seen = case.play(world)
                    look(world, case, seen, shots)
                except Exception:
                    failed += 1
                    print(f"{case.name}: not as it should be\n{traceback.format_exc()}", flush=True)
                    picture(world.page, f"wrong-{case.name}", folder.parent)
                else:
                    found.append((case, seen))
                    print(f"{case.name}: seen after {seen.seconds:.0f} s", flush=True)
    if not args.only and not failed:
        write(found)
    return 1 if failed else 0
