"""The notebooks of docs/tutorials: executed with the bundled model, and their stored outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from notebooks import NOTEBOOKS, executed, results


@pytest.mark.whole
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] * bool(number))
        for number, path in enumerate(NOTEBOOKS)
    ],
)
def test_a_notebook_runs_and_gives_its_stored_outputs(path: Path, tmp_path: Path) -> None:
    book = executed(path, tmp_path)
    assert results(book) == results(nbformat.read(path, as_version=4))
    shown = [
        output.data.get("text/html", "")
        for cell in book.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "display_data"
    ]
    assert any("<progress" in page and " steps" in page for page in shown), shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_outputs_and_no_error(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert len(outputs) >= len(code) // 2
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("Figures" in output.get("data", {}).get("text/html", "") for output in outputs)
