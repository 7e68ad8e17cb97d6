"""The notebooks of docs/tutorials: run by a real kernel, engine and cluster.

`python -m notebooks` runs them and writes their outputs anew."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from helpers.environ import clean
from helpers.pages import DOCS
from nbclient import NotebookClient

NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))
VARIES = "varies"  # tag of a cell whose output has times and rates
LIMIT = 900  # seconds for a cell: the first one that asks starts Ray and an engine


@contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """Set what the kernel inherits: answers in `folder`, no settings of Ray and Prefect."""
    before, made = dict(os.environ), {**clean(), "RAYBATCH_ANSWERS": str(folder / "answers")}
    os.environ.clear()
    os.environ.update(made)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def executed(path: Path, folder: Path) -> Any:
    """Run all cells of a notebook in a new kernel, in `folder`; return it with its outputs."""
    book = nbformat.read(path, as_version=4)
    client = NotebookClient(book, timeout=LIMIT, resources={"metadata": {"path": str(folder)}})
    with _environment(folder):
        client.execute()
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # times
    return book


def results(book: Any) -> list[list[str]]:
    """Return what each code cell prints and returns; nothing for a cell that varies."""
    return [
        []
        if VARIES in cell.metadata.get("tags", ())
        else [
            output.text if output.output_type == "stream" else output.data["text/plain"]
            for output in cell.outputs
            if output.output_type == "execute_result"
            or (output.output_type == "stream" and output.name == "stdout")
        ]
        for cell in book.cells
        if cell.cell_type == "code"
    ]


def without_noise(book: Any) -> Any:
    """Drop the outputs that are not for a reader: log lines of Ray and a finished bar."""
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = [
                output
                for output in cell.outputs
                if output.get("name") != "stderr"
                and not re.match("<progress", output.get("data", {}).get("text/html", ""))
            ]
    return book
