"""Estimates before a run what its hosted judge would cost."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.judge import SAYS_RIGHT, SAYS_WRONG, judge_fields
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.model.pinned import pin
from prefect_raybatch.plan import hosted_rows
from prefect_raybatch.plan import prompt_lengths as counting
from prefect_raybatch.spec.endpoint import EndpointSpec
from prefect_raybatch.spec.engine import ModelRequest
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.spec.request import PromptSpec, SamplingSpec
from prefect_raybatch.stages.endpoint.body import CAREFUL_CHARACTERS, LABEL_FIELD
from prefect_raybatch.words import money

if TYPE_CHECKING:
    from prefect_raybatch.plan.prompt_lengths import Block
    from prefect_raybatch.source import Inventory


# A verdict is a label in a JSON object; sampling.max_tokens of the judge leaves room for more.
VERDICT_TOKENS = math.ceil(
    max(len(json.dumps({LABEL_FIELD: label})) for label in (SAYS_RIGHT, SAYS_WRONG))
    / CAREFUL_CHARACTERS
)


class UnknownCost(Exception):
    """The cost of the judge cannot be estimated; the message says why."""


@dataclass(frozen=True)
class HostedJudge:
    """A hosted judge: parts of its job, and the most rows that it may have to judge."""

    endpoint: EndpointSpec
    model: ModelRequest
    prompt: PromptSpec
    sampling: SamplingSpec
    limits: Limits
    rows: int

    def cost(
        self,
        answers: SamplingSpec,
        added: Collection[str],
        read: ReadSpec,
        inventory: Inventory,
        copied: bool,
    ) -> float:
        """Estimate the most that judging can cost, in the job's currency. Sends no request.

        The judge's requests are built for a sample of input rows. Each has an answer in every
        column of `added`, the columns that the judged job adds. The answer is as long as `answers`,
        the sampling of the judged job, allows. Rows outside the sample cost as much as the sampled
        ones on average. A verdict counts as many tokens as a label in JSON. `read` and `inventory`
        say how the input is read and what it consists of. If the run will copy the input
        (`copied`), the sample is the input's beginning. Raises `UnknownCost` if the endpoint has no
        price, if answers have no limit, or if no request can be built.
        """
        if self.endpoint.price_in is None and self.endpoint.price_out is None:
            raise UnknownCost("quality.judge.endpoint has no price_in and price_out")
        if answers.fills_context:
            raise UnknownCost("an answer may fill the context (sampling.max_tokens: null)")
        given = set(inventory.schema.names) - set(added)
        sample = hosted_rows.HOSTED_SAMPLE
        if copied:
            blocks: Iterable[Block] = counting.blocks_of_heads(read, sample)
        else:
            columns = {name: of for name, of in self.prompt.columns.items() if name in given}
            prompt = replace(self.prompt, columns=columns)
            blocks = counting.spread_blocks(prompt, read, inventory, None, sample)
        names = [name for name in self.prompt.columns if name not in given]
        try:
            looked = hosted_rows.look_at(
                *(self.endpoint, self.prompt, self.sampling, self.limits, pin(self.model)),
                _with_answers(blocks, names, _longest_answer(answers)),
            )
        except ConfigError as error:
            raise UnknownCost(judge_fields(str(error))) from None
        looked = replace(
            looked, tokens=tuple((prompt, VERDICT_TOKENS) for prompt, _ in looked.tokens)
        )
        cost = looked.cost(self.endpoint, self.rows)
        if cost is None:
            raise UnknownCost(judge_fields(looked.trouble) or "the input has no row to sample")
        return cost


def judge_cost_text(cost: float, currency: str) -> str:
    """Return the judge's cost as text, such as "about 1.20 USD if each judged answer is ..."."""
    return f"about {money(cost, currency)} if each judged answer is as long as it may be"


def _longest_answer(answers: SamplingSpec) -> str:
    """Return a stand-in for the longest answer that the sampling `answers` allows.

    It is the longest choice, or a text of about max_tokens tokens for each of a row's answers.
    """
    if answers.choices:
        return max(answers.choices, key=len)
    return "x" * CAREFUL_CHARACTERS * answers.max_tokens * answers.answers


def _with_answers(blocks: Iterable[Block], names: list[str], answer: str) -> Iterator[Block]:
    """Yield blocks of input rows with `answer` in each of the added columns `names`."""
    import pyarrow as pa

    for file, start, table in blocks:
        stand_in = pa.repeat(answer, table.num_rows)
        kept = table.drop_columns([name for name in names if name in table.column_names])
        for name in names:
            kept = kept.append_column(name, stand_in)
        yield file, start, kept
