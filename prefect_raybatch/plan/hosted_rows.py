"""Estimates from a few rows the tokens that a hosted model counts, for rate limits and cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.model.pinned import PinnedModel
from prefect_raybatch.spec.endpoint import EndpointSpec
from prefect_raybatch.spec.request import PromptSpec, SamplingSpec
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.plan.prompt_lengths import Block
HOSTED_SAMPLE = 100  # rows sampled
HOSTED_BLOCKS = 4


@dataclass(frozen=True)
class HostedRows:
    """Token sizes of the requests of sampled rows, for a hosted model.

    `tokens` has a pair (prompt tokens, maximum answer tokens) for each row that makes a request.
    `trouble` says why none of the sampled rows makes a request. It is "" if one does, and if no row
    was sampled.
    """

    tokens: tuple[tuple[int, int], ...]
    trouble: str = ""

    def line(self) -> str:
        """Return the sizes as a line of text, e.g. for `raybatch plan`; "" if there are none."""
        if not self.tokens:
            return ""
        rows = sorted(self.tokens, key=sum)
        prompt, answer = rows[len(rows) // 2]
        sampled = counted(len(rows), "row")
        return (
            f"about {prompt + answer:,} reserved: prompt {prompt:,}, answer up to {answer:,}; most "
            f"{sum(rows[-1]):,} ({sampled} sampled)"
        )

    def problem(self, endpoint: EndpointSpec) -> str:
        """Return why no sampled request can be sent to the model; "" if one can.

        There are two reasons: no sampled row makes a request, or every request needs more tokens
        than `tokens_per_minute` of `endpoint` allows. This limit is ignored if requests are sent as
        batch files (`endpoint.batch`).
        """
        limit = endpoint.tokens_per_minute
        if self.trouble or not self.tokens or limit is None or endpoint.batch:
            return self.trouble
        prompt, answer = min(self.tokens, key=sum)
        if prompt + answer <= limit:
            return ""
        return (
            f"engine.endpoint.tokens_per_minute {limit:,} is less than any of "
            f"{counted(len(self.tokens), 'sampled row')} needs; the smallest has about {prompt:,} "
            f"tokens of prompt and up to {answer:,} of answer. Raise the limit, or lower "
            "sampling.max_tokens"
        )

    @property
    def longest_answer(self) -> int:
        """Return the most answer tokens that a sampled row may get; 0 if none makes a request."""
        return max((answer for _, answer in self.tokens), default=0)

    def cost(self, endpoint: EndpointSpec, rows: int) -> float | None:
        """Estimate the cost of `rows` rows like the sampled ones, with answers of full length.

        The cost is in cluster.currency. Returns None if the endpoint has no price, and if no
        sampled row makes a request.
        """
        prices = (endpoint.price_in, endpoint.price_out)
        if not self.tokens or prices == (None, None):
            return None
        price_in, price_out = (price or 0.0 for price in prices)
        each = [prompt * price_in + answer * price_out for prompt, answer in self.tokens]
        return math.fsum(each) / len(each) * rows / 1e6


def look_at(
    endpoint: EndpointSpec,
    prompt: PromptSpec,
    sampling: SamplingSpec,
    limits: Limits,
    model: PinnedModel,
    blocks: Iterable[Block],
) -> HostedRows:
    """Build the requests of a few rows of `blocks`, sending none, and return their token sizes.

    Each image column counts as one image. Raises `ConfigError` if a function cannot be started.
    """
    from prefect_raybatch.job.images import UNKNOWN
    from prefect_raybatch.job.openai_batch import REQUEST_FUNCTIONS
    from prefect_raybatch.stages.block import Failure
    from prefect_raybatch.stages.calls.calling import Calls
    from prefect_raybatch.stages.calls.isolated import NoChild
    from prefect_raybatch.stages.endpoint.body import body_of, image_tokens, reserved_tokens
    from prefect_raybatch.stages.texts import prepare_of

    # In a child process: a function that ends its process would otherwise end the driver.
    apart = prompt.function not in (None, *REQUEST_FUNCTIONS)
    calls = Calls(limits.function_seconds or None, in_child=apart, deaths=limits.engine_deaths)
    images, prompt = prompt.images, replace(prompt, images=None)
    # Images in columns are in no message here; one for each column is assumed.
    shown = 0 if images is None else image_tokens(images.pixels(UNKNOWN)) * len(images.columns)
    prepare = prepare_of(None, prompt, sampling, model, None, calls=calls, hosted=True)
    tokens: list[tuple[int, int]] = []
    failed: list[str] = []
    for _, _, table in islice(blocks, HOSTED_BLOCKS):
        try:
            requests = prepare.requests(table.slice(0, HOSTED_SAMPLE // HOSTED_BLOCKS))
        except NoChild as error:
            raise ConfigError(f"cannot make prompts of the sampled rows: {error}") from None
        for request in requests:
            if isinstance(request, Failure):
                failed.append(f"{request.kind}: {request.message}")
                continue
            try:
                params = {**sampling.fields, **(request.sampling or {})}
                body = body_of(endpoint, request.messages, params)
            except ValueError as error:
                failed.append(f"ValueError: {error}")
            else:
                prompt_tokens, answer = reserved_tokens(request.messages, body)
                tokens.append((prompt_tokens + shown, answer))
    if failed and not tokens:
        rows = counted(len(failed), "sampled row")
        return HostedRows((), f"none of {rows} makes a request: {failed[0]}")
    return HostedRows(tuple(tokens))
