"""Whole runs in this process, of jobs that reuse answers too: the pipeline's own stages, without
Ray, and an engine whose answer follows from the prompt's text alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.cluster.pipeline import Pipeline
from prefect_raybatch.driver.driver import Driver, Progress
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.ledger.increments import begin_asks, increment_of, waiting_rows
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Receipt, Unit
from prefect_raybatch.model import pinned as models
from prefect_raybatch.plan import plan as planning
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.finalize_run import finalize_run
from prefect_raybatch.runs.increment import job_of_asks
from prefect_raybatch.runs.plan_run import plan_run
from prefect_raybatch.runs.run import Run, load_run, run_of
from prefect_raybatch.sizing import sizes
from prefect_raybatch.sizing.sizes import Capacity
from prefect_raybatch.stages.block import ERROR, TOKENS, Failure, load_tokenizer, passes_by
from prefect_raybatch.storage import open_store

from .engines import with_answers
from .small import receipts

CPU = Capacity(2.0, 0.0, 1, "local")


@dataclass
class Nights:
    """Drives runs of a job; `asked` are the prompts that the engine was asked, in order.

    `refuses` says of a prompt whether the engine fails it; `stop_after` ends a night after so many
    receipts, as a kill would.
    """

    folder: Path
    refuses: Callable[[str], bool] = lambda prompt: False
    asked: list[str] = field(default_factory=list)
    stop_after: int | None = None
    drawn: int = 0

    def write(self, *texts: str | None, **columns: list[Any]) -> None:
        """The table as it is tonight."""
        path = self.folder / "in.parquet"
        pq.write_table(pa.table({"text": pa.array(texts, pa.string()), **columns}), path)

    def job(self, **groups: Any) -> BatchJob:
        value = {
            "name": "nightly",
            "source": {"uri": str(self.folder / "in.parquet"), "rows_per_shard": 4},
            "prompt": {"template": "Say {text}"},
            "output": {"uri": str(self.folder / "out"), "columns": ["text"]},
            "limits": {"max_failed_fraction": 1.0},
            "reuse": "latest",
        }
        return BatchJob.from_dict({**value, **groups})

    def night(self, key: str, job: BatchJob | None = None) -> RunReport:
        job = job or self.job()
        return self.drive(job, plan_run(job, key))

    def drive(self, job: BatchJob, run: Run) -> RunReport:
        """What `infer_run` and `finalize_run` do."""
        store = open_store(run.uri)
        plan, _ = load_run(Ledger(store), run)
        increment = increment_of(plan)
        begun = None if increment is None else begin_asks(store, increment)
        if begun is not None and begun[0].finished(begun[1]) is None:
            ledger, asks = begun
            part = job_of_asks(job)
            of_asks = run_of(ledger.store, asks, ledger)
            finalize_run(part, of_asks, self.attempt(part, of_asks))
        return finalize_run(job, run, self.attempt(job, run))

    def attempt(self, job: BatchJob, run: Run) -> Progress:
        store = open_store(run.uri)
        ledger = Ledger(store)
        plan, shards = load_run(ledger, run)
        job = planning.as_planned(job, plan)
        size = sizes.sizes_of(job, plan.rows, 100.0, CPU, None, "")
        pipeline = Pipeline(job, plan, shards, store, "c" * 32, size, {})
        first, spec, finish = pipeline.stages(False)
        tokenizer = load_tokenizer(*models.tokenizer_place(plan.model))

        def engine(table: pa.Table) -> pa.Table:
            if passes_by(table):
                return table
            errors = table[ERROR].to_pylist()
            prompts = tokenizer.batch_decode(table[TOKENS].to_pylist(), skip_special_tokens=True)
            answers = []
            for i, prompt in enumerate(prompts):
                if errors[i] is None:
                    self.asked.append(prompt)
                    if self.refuses(prompt):
                        errors[i] = Failure("engine", "ValueError", "refused").to_dict()
                self.drawn += 1
                answers.append(self.answer(prompt))
            return with_answers(table, errors, answers)

        def run_pass(units: Sequence[Unit], isolated: bool) -> Iterator[Receipt]:
            for task in pipeline.reader.tasks(
                [(u, shards[u.shard].start + u.offset) for u in units]
            ):
                for table in pipeline.reader.read(task):
                    table = first(table)
                    for receipt in receipts(finish(table if spec is None else engine(table))):
                        if self.stop_after is not None:
                            self.stop_after -= 1
                            if self.stop_after < 0:
                                raise Killed
                        yield receipt

        def quarantine(unit: Unit, why: Loss) -> Receipt:
            raise AssertionError(f"no engine dies here: {unit} {why}")

        increment = increment_of(plan)
        waiting = None if increment is None else waiting_rows(ledger, increment, shards)
        driver = Driver(plan, shards, ledger, job.limits, waiting=waiting)
        driver.resume()
        return driver.run(run_pass, quarantine)

    def answer(self, prompt: str) -> str:
        return f"answer to {words(prompt)}"

    def result(self, key: str) -> list[dict[str, Any]]:
        return rows_in(self.folder / "out" / key / "data")

    def quarantined(self, key: str) -> list[dict[str, Any]]:
        return rows_in(self.folder / "out" / key / "_quarantine")


class Killed(Exception):
    """The process that drove a night is gone."""


def words(prompt: str) -> str:
    """What a prompt asks about: the words after `Say`."""
    return prompt.partition("Say ")[2].split("\n")[0].strip()


def rows_in(folder: Path) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.parquet")):
        made += pq.read_table(path, use_threads=False).to_pylist()
    return made
