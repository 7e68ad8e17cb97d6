"""The stages of a run in this process, without Ray: units in, receipts out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prefect_raybatch.driver.driver import Driver, Progress
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import Shards, decode_schema
from prefect_raybatch.ledger.records import Plan, Receipt, Unit
from prefect_raybatch.model import pinned as models
from prefect_raybatch.runs.run import Run, load_run
from prefect_raybatch.stages.block import ERROR, Failure, passes_by
from prefect_raybatch.stages.finish import Finish
from prefect_raybatch.stages.prepare import Prepare
from prefect_raybatch.stages.read import ShardReader
from prefect_raybatch.storage import open_store

from .engines import with_answers
from .small import receipts


@dataclass
class InProcess:
    """A pass for the driver over a run whose input is a snapshot. The engine answers `industry ID`
    and refuses the rows of these ids."""

    job: BatchJob
    plan: Plan
    shards: Shards
    ledger: Ledger
    attempt: str = "b" * 32
    refused: frozenset[int] = frozenset()
    asked: list[Unit] = field(default_factory=list)

    def __call__(self, units: Sequence[Unit], isolated: bool) -> Iterator[Receipt]:
        model = models.with_tokenizer(self.plan.model, self.job.engine)
        store, schema = self.ledger.store, decode_schema(self.plan.input_schema)
        reader = ShardReader(self.ledger.files(self.plan), schema, store)
        prepare = Prepare(self.job.prompt, model, self.job.engine.context)
        finish = Finish(self.job.output, model, store, self.attempt)
        starts = [(unit, self.shards[unit.shard].start + unit.offset) for unit in units]
        self.asked += units
        for task in reader.tasks(starts):
            for table in map(prepare, reader.read(task)):
                if not passes_by(table):
                    errors, ids = table[ERROR].to_pylist(), table["id"].to_pylist()
                    for i, number in enumerate(ids):
                        if number in self.refused and errors[i] is None:
                            errors[i] = Failure("engine", "ValueError", "refused").to_dict()
                    table = with_answers(table, errors, [f"industry {number}" for number in ids])
                yield from receipts(finish(table))


def infer(job: BatchJob, run: Run, refused: frozenset[int] = frozenset()) -> tuple[Progress, int]:
    """What `infer_run` does, without Ray; returns its progress and how many units were asked."""
    ledger = Ledger(open_store(run.uri))
    plan, shards = load_run(ledger, run)
    run_pass = InProcess(job, plan, shards, ledger, refused=refused)

    def quarantine(unit: Unit, why: Loss) -> Receipt:
        raise AssertionError(f"no engine dies here: {unit} {why}")

    driver = Driver(plan, shards, ledger, job.limits)
    driver.resume()
    return driver.run(run_pass, quarantine), len(run_pass.asked)
