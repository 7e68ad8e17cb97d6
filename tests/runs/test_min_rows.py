"""limits.min_rows: an input with too few rows fails before an engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.small import make_job

from prefect_raybatch.api import plan_run
from prefect_raybatch.errors import SourceError
from prefect_raybatch.runs.run import Run


def test_too_few_rows_fail_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("Company\n" + "Acme\n" * 60)

    def planned(key: str, least: int, **source: Any) -> Run:
        job = make_job(
            source={"uri": str(path), **source},
            engine={"model": "demo"},
            output={"uri": str(tmp_path / "out")},
            limits={"min_rows": least},
        )
        return plan_run(job, key)

    with pytest.raises(SourceError, match=r"the input has 60 rows, but limits\.min_rows is 500"):
        planned("few", 500)
    assert planned("enough", 60).rows == 60
    assert planned("trial", 500, limit=20).rows == 20, "whoever sets a limit wants few rows"
