"""The Python that the README, job.md and operations.md show is run, in a folder with a finished
run, page by page from the top."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.industries import finished_night
from helpers.pages import ROOT, blocks

from prefect_raybatch.errors import RayBatchError

pytestmark = pytest.mark.usefixtures("prefect_api")

# What is rightly refused of a finished run, what is said then, and where it is run on another.
ELSEWHERE = {"finalize_partial": ("is complete", "tests/runs/test_partial.py")}


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_night(tmp_path_factory.mktemp("night"), column="response")


@pytest.mark.parametrize("page", ["README.md", "docs/job.md", "docs/operations.md"])
def test_the_python_of_a_page_runs(
    page: str, night: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(night)
    known: dict[str, Any] = {}
    found = [b for b in blocks((ROOT / page).read_text("utf-8")) if b.language == "python"]
    assert found
    for block in found:
        code = compile(block.text, page, "exec")
        refusal = next((why for word, why in ELSEWHERE.items() if word in block.text), None)
        if refusal is None:
            exec(code, known)
            continue
        said, where = refusal
        assert (ROOT / where).exists()
        with pytest.raises(RayBatchError, match=said):
            exec(code, known)
    told = capsys.readouterr().out
    if page == "README.md":  # report.good, report.failed, report.run
        assert told.split()[:2] == ["40", "1"] and told.split()[2].endswith("out/monday")
