"""The pages of the documentation: their blocks of code, and the commands within them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), ROOT / "deployments/README.md"]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def page_name(page: Path) -> str:
    """Return the page's path from the root of the repository; ids of parametrized tests."""
    return page.relative_to(ROOT).as_posix()


def pages_in(folder: str) -> list[Path]:
    """Return the pages of one part of the documentation, such as `how-to`."""
    return [page for page in PAGES if page.is_relative_to(DOCS / folder)]


@dataclass(frozen=True)
class Block:
    """A block of a page between fences: what it is written in, its text, and where that stands in
    the page."""

    language: str
    text: str
    start: int
    end: int


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page's text, in order."""
    return [
        Block(found[2], re.sub(f"^{found[1]}", "", found[3], flags=re.M), *found.span(3))
        for found in FENCE.finditer(text)
    ]


@dataclass(frozen=True)
class Step:
    """Something a reader does, and the output that the page shows of it, if it does. Of an output
    after `<!-- first N lines -->` no more is shown."""

    does: Block
    shows: Block | None
    lines: int | None


def steps(text: str) -> Iterator[Step]:
    """A page's blocks that are run, each with the block of output that follows it."""
    found = blocks(text)
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.language == "text":
            continue
        between = text[block.end : after.start] if after else ""
        shows = after if after is not None and after.language == "text" else None
        limit = re.search(r"<!-- first (\d+) lines -->", between)
        yield Step(block, shows, int(limit[1]) if limit else None)


PROGRAM = r"raybatch|prefect|make|pip|uv|python|kubectl|ray|apt-get|export|cd|source|mkdir|kill"
COMMAND = re.compile(rf"(?:\$ )?(?:\.venv/bin/)?((?:{PROGRAM}) .+)")


def commands(text: str) -> list[str]:
    """The commands that a page gives, in blocks of code and in the text, each once."""
    text = text.replace("\\\n", " ")
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    fenced = [line for block in blocks(text) for line in block.text.splitlines()]
    indented = re.findall(r"^ {4,}(.+)$", FENCE.sub("", text), re.M)
    found = filter(None, map(COMMAND.fullmatch, map(str.strip, [*spans, *fenced, *indented])))
    return list(dict.fromkeys(re.sub(r"\s+", " ", plain(one[1])) for one in found))


def plain(command: str) -> str:
    """Without what is said of it beside: a comment, or how often it failed."""
    return re.sub(r"( +#| {2,}\().*$", "", command).strip()
