"""The files of the corpus: one for each job, with the job and its outcome."""

from __future__ import annotations

import difflib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .jobs import GoldenJob, golden_jobs
from .record import record
from .world import world

CASES = Path(__file__).parent / "cases"
WIDTH = 100
REWRITE = "PYTHONPATH=tests .venv/bin/python -m golden --write"
MOST_LINES = 60  # of a difference that is shown


@contextmanager
def recorder() -> Iterator[Callable[[GoldenJob], str]]:
    """A function from a job of the corpus to the text of its file."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder, _quiet():
        place = Path(folder).resolve()
        with world(place):
            yield lambda golden: case_text(golden, record(golden, place))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that planning a job logs."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def path_of(golden: GoldenJob) -> Path:
    return CASES / f"{golden.name}.json"


def case_text(golden: GoldenJob, outcome: dict[str, Any]) -> str:
    return formatted({"about": golden.about, "job": golden.job, **outcome}) + "\n"


def texts_now() -> dict[Path, str]:
    """Return what the file of each job would be, made now."""
    with recorder() as text_of:
        return {path_of(golden): text_of(golden) for golden in golden_jobs()}


def write_corpus(texts: Mapping[Path, str], folder: Path = CASES) -> list[str]:
    """Write the files of all jobs and remove those of none; return the names of what changed."""
    folder.mkdir(exist_ok=True)
    changed = []
    for path in sorted({*folder.iterdir(), *texts}):
        before = path.read_text(encoding="utf-8") if path.exists() else None
        if path not in texts:
            path.unlink()
        elif texts[path] != before:
            path.write_text(texts[path], encoding="utf-8")
        if texts.get(path) != before:
            changed.append(path.name)
    return changed


def differences(texts: Mapping[Path, str]) -> list[Path]:
    """Return the files that are not what they would be, made now."""
    return [p for p, text in texts.items() if not p.exists() or p.read_text("utf-8") != text]


def difference(path: Path, text: str) -> str:
    """Return how a file would change, as a unified diff of a bounded length."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    old, new = before.splitlines(), text.splitlines()
    lines = list(difflib.unified_diff(old, new, path.name, "now", lineterm="", n=2))
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"... and {len(lines) - MOST_LINES} more lines"]
    return "\n".join(lines)


def report(texts: Mapping[Path, str]) -> str:
    """Return the first difference, which other files differ, and the command that makes them anew;
    "" where all files are as they would be."""
    changed = differences(texts)
    if not changed:
        return ""
    first, *others = changed
    more = f"\n\nThese differ, too: {', '.join(p.stem for p in others)}" if others else ""
    return f"{difference(first, texts[first])}{more}\n\nIf that is as meant, run\n  {REWRITE}"


def formatted(value: Any, indent: str = "") -> str:
    """Return JSON with sorted keys, in which what fits on a line stands on one."""
    line = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, (dict, list)) or not value:
        return line
    inner = indent + " "
    if isinstance(value, dict):
        parts = [
            f"{json.dumps(name, ensure_ascii=False)}: {formatted(value[name], inner)}"
            for name in sorted(value)
        ]
    else:
        parts = [formatted(one, inner) for one in value]
    opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
    body = ",\n".join(inner + part for part in parts)
    return f"{opening}\n{body}\n{indent}{closing}"
