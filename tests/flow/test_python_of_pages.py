"""Runs the Python that pages show, in a folder with a finished run, page by page from the top."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.industries import finished_night
from helpers.pages import PAGES, ROOT, Block, blocks, page_name
from tour import TOUR_PAGE

from prefect_raybatch.errors import RayBatchError

pytestmark = pytest.mark.usefixtures("prefect_api")

# What is rightly refused of a finished run, what is said then, and where it is run on another.
ELSEWHERE = {"finalize_partial": ("is complete", "tests/runs/test_partial.py")}


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_night(tmp_path_factory.mktemp("night"))


def python_of(page: Path) -> list[Block]:
    return [one for one in blocks(page.read_text("utf-8")) if one.language == "python"]


# tests/test_tour.py runs that of the first tutorial. The Python of dataframe.md starts engines.
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.whole] if page.name == "dataframe.md" else [])
        for page in PAGES
        if python_of(page) and page != TOUR_PAGE
    ],
    ids=page_name,
)
def test_the_python_of_a_page_runs(
    page: Path, night: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(night)
    known: dict[str, Any] = {}
    for block in python_of(page):
        code = compile(block.text, page_name(page), "exec")
        refusal = next((why for word, why in ELSEWHERE.items() if word in block.text), None)
        if refusal is None:
            exec(code, known)
            continue
        said, where = refusal
        assert (ROOT / where).exists()
        with pytest.raises(RayBatchError, match=said):
            exec(code, known)
    told = capsys.readouterr().out
    if page_name(page) == "README.md":  # report.good, report.failed, report.run
        assert told.split()[:2] == ["40", "1"] and told.split()[2].endswith("out/monday")
