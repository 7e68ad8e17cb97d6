"""Nights of a cascade whose larger model checks every answer of the first one, with golden rows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from prefect_raybatch.api import finalize_run, plan_run
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import render_placeholders
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.run import Run

from .nights import Nights, words

ROWS = 100
FORM = {
    "type": "object",
    "properties": {"label": {"type": "string"}},
    "required": ["label"],
    "additionalProperties": False,
}


@dataclass
class CheckedNights(Nights):
    """The first model answers `label` to all rows, the larger one `bank` to the first `different`.

    The larger one answers `car` to the others, which is right for all. `only_larger`: the first
    model has answered already.
    """

    different: int = 0
    label: str = "car"
    only_larger: bool = False
    calls: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.write(*(f"t{i}" for i in range(ROWS)))
        (self.folder / "form.json").write_text(json.dumps(FORM))
        lines = (json.dumps({"text": f"t{i}", "label": "car"}) for i in range(ROWS))
        (self.folder / "golden.jsonl").write_text("\n".join(lines))

    def checked(self, out: str = "out", **output: Any) -> BatchJob:
        escalate = {"to": {"model": "demo"}, "when": {"fails_schema": True}, "check": ROWS}
        return self.job(
            source={"uri": str(self.folder / "in.parquet"), "rows_per_shard": 50},
            output={
                "uri": str(self.folder / out),
                "columns": ["text"],
                "schema_model": str(self.folder / "form.json"),
                "escalate": escalate,
                **output,
            },
            reuse=None,
        )

    def measured(self) -> BatchJob:
        """The job with golden rows."""
        golden = {"golden": str(self.folder / "golden.jsonl"), "key": ["text"], "answer": "label"}
        value = self.checked().to_dict()
        return BatchJob.from_dict({**value, "quality": golden})

    def answer(self, prompt: str) -> str:
        """The larger model is asked second."""
        if not words(prompt):  # a row that keeps its first answer
            return ""
        self.calls[prompt] += 1
        number = int(words(prompt).removeprefix("t"))
        is_larger = self.only_larger or self.calls[prompt] == 2
        label = "bank" if number < self.different else "car"
        label = label if is_larger else self.label
        return json.dumps({"label": label})

    def infer(self, job: BatchJob, run: Run, observe: Any = None) -> Progress:
        self.calls.clear()
        return super().infer(job, run, observe)

    def dated(self, key: str, job: BatchJob) -> RunReport:
        """A night of a job with {run_date} in output.uri."""
        filled = render_placeholders(job, key)
        run = plan_run(filled, key)
        return finalize_run(filled, run, self.infer(filled, run), job.output.uri)
