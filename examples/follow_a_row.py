"""Follow one row of a small table through all stages of a run, from the file to the result.

    python examples/follow_a_row.py

Each step below calls the code that a real run calls, in this process and without Ray. Only vLLM is
replaced, by `Answers`. The steps are those of docs/architecture.md.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.api import finalize_run, plan_run
from prefect_raybatch.cluster.pipeline import Pipeline
from prefect_raybatch.cluster.sizes import for_attempt
from prefect_raybatch.compile.job import compile_planned
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.layout import commit_path, piece_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Receipt, Unit
from prefect_raybatch.model.pinned import tokenizer_place
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.run import load_run
from prefect_raybatch.sizing.sizes import Capacity
from prefect_raybatch.stages.block import input_columns, load_tokenizer
from prefect_raybatch.stages.columns import ANSWERS, TOKENS
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage
from prefect_raybatch.stages.finish import RECEIPT
from prefect_raybatch.stages.vllm.stepper import Completion, Request
from prefect_raybatch.storage import open_store

CUSTOMERS = {
    "Blue Harbor Shipping": "Transport",
    "Green Valley Farms": "Agriculture",
    "Northwind Bank": "Finance",
    "Old Town Bakery": "Food",
    "Summit Ski Lifts": "Tourism",
    "Westside Clinic": "Health",
}
ROW = 4  # the row that is followed; rows count from 0
ROWS_PER_SHARD = 3
HERE = Capacity(cpus=2.0, gpus=0.0, nodes=1, address="here")


class Answers:
    """Stands in for a vLLM engine: knows the industry of each company in `CUSTOMERS`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        return [self.answer(request.prompt_token_ids) for request in requests]

    def answer(self, prompt: Sequence[int]) -> Completion:
        text = self.tokenizer.decode(prompt)
        industry = next(answer for company, answer in CUSTOMERS.items() if company in text)
        tokens = self.tokenizer.encode(industry, add_special_tokens=False)
        return Completion([tokens], finish_reason="stop", prompt_tokens=len(prompt))

    def stats(self) -> dict[str, Any]:
        return {"rows": 0, "refused": 0, "died": None}


class EngineWithAnswers(EngineStage):
    """The engine stage of a run, with `Answers` in place of vLLM."""

    def __init__(self, launch: EngineLaunch) -> None:
        self.launch = launch
        self.answers: Any = Answers(load_tokenizer(*tokenizer_place(launch.model)))

    def ready(self) -> Any:
        return self.answers


def show(stage: str, where: str, gets: str, gives: str, *notes: str) -> None:
    print(f"\n{stage.upper()} ({where})")
    print(f"  gets   {gets}")
    print(f"  gives  {gives}")
    for note in notes:
        print(f"         {note}")


def as_text(row: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in row.items())


def follow(folder: Path) -> None:
    with open(folder / "customers.csv", "w", newline="") as file:
        csv.writer(file).writerows([["company"], *([name] for name in CUSTOMERS)])
    company = list(CUSTOMERS)[ROW]
    print(f"We follow row {ROW} of customers.csv: company={company!r}.")

    job = BatchJob.from_dict(
        {
            "name": "industries",
            "source": {"uri": f"{folder}/customers.csv", "rows_per_shard": ROWS_PER_SHARD},
            "prompt": {"template": "In which industry is {company}?"},
            "output": {"uri": f"{folder}/out"},
        }
    )
    run = plan_run(job, "first")
    store = open_store(run.uri)
    ledger = Ledger(store)
    plan, shards = load_run(ledger, run)
    number, position = divmod(ROW, ROWS_PER_SHARD)
    show(
        "plan",
        "driver",
        "the job and the input file",
        f"plan.json: {plan.rows} rows in {plan.shards} shards of {plan.rows_per_shard} rows",
        f"Our row is at position {position} of shard {number}. Positions count from 0.",
        "The CSV file was copied to Parquet, so a retry reads exactly the same rows.",
    )

    spec = compile_planned(job, plan)
    size = for_attempt(spec.sizes, plan, HERE)
    pipeline = Pipeline(spec, plan, shards, store, "attempt-1", size, engine=EngineWithAnswers)
    prepare, launch, finish = pipeline.stages(False)
    assert launch is not None  # this run reuses no answers, so it has an engine
    engine = EngineWithAnswers(launch)

    for shard in range(plan.shards):
        unit = Unit(shard, 0, shards[shard].rows)
        (task,) = pipeline.read_tasks([unit], isolated=False)
        (block,) = pipeline.reader.read(task)
        prepared = prepare(block)
        answered = engine(prepared)
        (receipt,) = [Receipt.from_json(text) for text in finish(answered)[RECEIPT].to_pylist()]
        commit = ledger.commit(plan, unit.rows, [receipt])
        assert commit is not None
        if shard == number:
            decode = load_tokenizer(*tokenizer_place(launch.model)).decode
            show_read(unit, position, block)
            show_prepare(position, prepared, decode)
            show_engine(position, answered, decode)
            piece = receipt.pieces[0]
            show_finish(receipt, pq.read_table(store.open(piece_path(piece.path))), position)
            again = ledger.commit(plan, unit.rows, [receipt])
            show(
                "commit",
                "driver",
                "the receipts of the shard",
                f"the commit record {commit_path(shard)}",
                "It is written only if no record is there yet. A second commit of this shard",
                f"returns {again}: whoever comes second changes nothing.",
            )

    report = finalize_run(job, run)
    result = pq.read_table(f"{run.uri}/data")
    show(
        "finalize",
        "driver",
        f"{plan.shards} commit records and their pieces",
        "data/ in input order, the report, and _SUCCESS",
        f"{report.good} of {report.rows} rows are answered, {report.failed} are in quarantine.",
        f"Our row: {as_text(result.to_pylist()[ROW])}",
    )
    verdict = verify(store)
    show(
        "verify",
        "anywhere, at any time",
        "the run directory",
        f"ok={verdict.ok}",
        f"Each of the {verdict.rows} input rows is in the result exactly once.",
    )


def show_read(unit: Unit, position: int, block: pa.Table) -> None:
    row = block.select(input_columns(block)).to_pylist()[position]
    show(
        "read",
        "Ray task",
        f"a task: shard {unit.shard}, rows {unit.offset} to {unit.end - 1} of it",
        f"a block (an Arrow table) of {block.num_rows} rows",
        f"Our row: {as_text(row)}",
    )


def show_prepare(position: int, prepared: pa.Table, decode: Callable[[list[int]], str]) -> None:
    tokens = prepared[TOKENS][position].as_py()
    show(
        "prepare",
        "Ray task",
        "the block",
        f"the block with prompts as tokens in the column {TOKENS}",
        f"Our row: {len(tokens)} tokens, which read {decode(tokens)!r}",
    )


def show_engine(position: int, answered: pa.Table, decode: Callable[[list[int]], str]) -> None:
    answer = answered[ANSWERS][position].as_py()[0]
    show(
        "engine",
        "Ray actor",
        "the block with prompts",
        f"the block with answers as tokens in the column {ANSWERS}",
        f"Our row: {answer}, which reads {decode(answer)!r}",
    )


def show_finish(receipt: Receipt, piece: pa.Table, position: int) -> None:
    row = piece.select(input_columns(piece)).to_pylist()[position]
    show(
        "finish",
        "Ray task",
        "the block with answers",
        "a piece, which is a Parquet file with the answers as text, and a receipt",
        f"Our row in the piece: {as_text(row)}",
        f"The receipt names the piece, and accounts for {receipt.unit.rows} rows of "
        f"shard {receipt.shard}.",
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="follow-a-row-") as name:
        follow(Path(name))
