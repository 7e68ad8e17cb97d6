"""Estimates before a run what its hosted judge would cost at most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import judging_job
from prefect_raybatch.job.judge import judge_fields
from prefect_raybatch.model.pinned import pin
from prefect_raybatch.plan import hosted_rows
from prefect_raybatch.plan import prompt_lengths as counting
from prefect_raybatch.runs.quality import golden_of
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.stages.endpoint.body import CAREFUL_CHARACTERS
from prefect_raybatch.stages.result_columns import result_columns
from prefect_raybatch.words import money

if TYPE_CHECKING:
    from prefect_raybatch.plan.prompt_lengths import Block
    from prefect_raybatch.source import Inventory


class UnknownCost(Exception):
    """The cost of the judge cannot be estimated; the message says why."""


def most_judge_cost(
    job: BatchJob, spec: RunSpec, found: Inventory, copied: bool, rows: int
) -> float | None:
    """Return what the hosted judge of the job costs at most; None without one.

    The judge's requests are made of sampled input rows, with an answer in each column of the result
    that is as long as an answer may be. Raises `UnknownCost`.
    """
    if not job.quality.judge.endpoint:
        return None
    judging = compile_job(judging_job(job, "rows.parquet", "runs"))
    endpoint = judging.engine.model.endpoint
    assert endpoint is not None
    if endpoint.price_in is None and endpoint.price_out is None:
        raise UnknownCost("quality.judge.endpoint has no price_in and price_out")
    if spec.sampling.fills_context:
        raise UnknownCost("an answer may fill the context (sampling.max_tokens: null)")
    given = set(found.schema.names)
    given -= {
        name for name, _ in result_columns(spec.finish, spec.sampling, spec.engine.model.task)
    }
    columns = {name: of for name, of in judging.prompt.columns.items() if name in given}
    sample = hosted_rows.HOSTED_SAMPLE
    if copied:
        blocks: Iterable[Block] = counting.blocks_of_heads(spec.read, sample)
    else:
        read = replace(judging.prompt, columns=columns)
        blocks = counting.spread_blocks(read, spec.read, found, None, sample)
    answers = [name for name in judging.prompt.columns if name not in given]
    try:
        looked = hosted_rows.look_at(
            *(endpoint, judging.prompt, judging.sampling, judging.limits),
            pin(judging.engine.model),
            _with_answers(blocks, answers, _longest_answer(spec)),
        )
    except ConfigError as error:
        raise UnknownCost(judge_fields(str(error))) from None
    cost = looked.cost(endpoint, judged_rows(job, rows))
    if cost is None:
        raise UnknownCost(judge_fields(looked.trouble) or "the input has no row to sample")
    return cost


def judged_rows(job: BatchJob, rows: int) -> int:
    """Return the most rows that the judge is asked about: the sample and the golden rows."""
    golden = golden_of(job.quality, job.output)
    return min(job.quality.judge.sample + (len(golden.answers) if golden else 0), rows)


def judge_cost_text(cost: float, currency: str) -> str:
    """Return the most that the judge costs, in words."""
    return f"at most {money(cost, currency)}, if each answer is as long as it may be"


def _longest_answer(spec: RunSpec) -> str:
    """Return a text that counts as many tokens as an answer may have."""
    if spec.sampling.choices:
        return max(spec.sampling.choices, key=len)
    return "x" * CAREFUL_CHARACTERS * spec.sampling.max_tokens * spec.sampling.answers


def _with_answers(blocks: Iterable[Block], names: list[str], answer: str) -> Iterator[Block]:
    """Yield blocks of input rows with that answer in each of the columns `names`."""
    import pyarrow as pa

    for file, start, table in blocks:
        stand_in = pa.repeat(answer, table.num_rows)
        kept = table.drop_columns([name for name in names if name in table.column_names])
        for name in names:
            kept = kept.append_column(name, stand_in)
        yield file, start, kept
