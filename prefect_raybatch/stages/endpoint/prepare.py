"""Turns rows into chat messages for a hosted model; the server tokenizes them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace

import pyarrow as pa

from prefect_raybatch.stages.block import Failure, Messages, timed, with_failures
from prefect_raybatch.stages.columns import CHAT, DIGESTS, FORMED, KEY, PARAMS, TOKENS
from prefect_raybatch.stages.messages import ChatRequest
from prefect_raybatch.stages.prepare import (
    Prepare,
    messages_for_images,
    with_images,
    with_own_forms,
)
from prefect_raybatch.stages.row_sampling import has_form


@dataclass(frozen=True)
class PrepareHosted(Prepare):
    """The prepare stage for a hosted model: rows get chat messages as JSON, and no tokens."""

    def _prepare(self, table: pa.Table) -> pa.Table:
        began = time.time()
        asked = self._requests(table)
        shown: list[Messages | Failure] = []
        if self.images is not None:
            shown, digests = self.images.fetched(table, list(map(messages_for_images, asked)))
            if self.keying is not None:
                asked = with_images(asked, shown, digests)
            if self.images.digests:
                table = DIGESTS.add_to(table, digests)
        if self.keying is not None:
            asked = self.keying.checked(asked, table, table[KEY].to_pylist())
        if shown:
            asked = [_showing(*pair) for pair in zip(asked, shown, strict=True)]
        made = [_encoded(request) for request in asked]
        requests = [pair[0] for pair in made]
        own = [r.sampling if isinstance(r, ChatRequest) else None for r in requests]
        table = CHAT.add_to(table, [pair[1] for pair in made])
        table = TOKENS.add_to(table, [[] for _ in made])
        table = PARAMS.add_to(table, [json.dumps(fields) if fields else None for fields in own])
        if self.prompt.function or has_form(self.sampling.fields):
            table = FORMED.add_to(table, [has_form(self.sampling.fields, f) for f in own])
        if self.prompt.function:
            table = with_own_forms(table, requests)
        table = with_failures(table, [r if isinstance(r, Failure) else None for r in requests])
        return timed(table, "prepare", began)


def _showing(request: ChatRequest | Failure, shown: Messages | Failure) -> ChatRequest | Failure:
    """Return the request with the messages `shown`, which have the row's images.

    If `request` or `shown` is a failure, return that.
    """
    if isinstance(request, Failure):
        return request
    return shown if isinstance(shown, Failure) else replace(request, messages=shown)


def _encoded(request: ChatRequest | Failure) -> tuple[ChatRequest | Failure, str | None]:
    """Return (request, its messages as JSON), or (failure, None) if they cannot be sent."""
    if isinstance(request, Failure):
        return request, None
    if request.raw:
        reason = "a hosted model takes raw prompts by engine.endpoint.api: completions. Return text"
        return Failure("prepare", "ValueError", reason), None
    try:
        text = json.dumps(request.messages, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        return Failure.of("prepare", error), None
    return request, text
