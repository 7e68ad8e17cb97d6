"""Turns rows into requests: by template or user function, then chat template and tokenizer.

Runs on CPUs, one block at a time. A row that fails here gets an error and skips the engine; the
other rows of its block go on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from prefect_raybatch.job.checks import template_fields
from prefect_raybatch.job.openai_batch import TEXT_REQUEST
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.model import pinned as models
from prefect_raybatch.spec.request import PromptSpec, SamplingFields, SamplingSpec
from prefect_raybatch.spec.result import ParsingSpec
from prefect_raybatch.stages.answer_forms import own_form
from prefect_raybatch.stages.block import (
    Failure,
    Messages,
    Row,
    Tokenizer,
    input_columns,
    is_passthrough,
    load_tokenizer,
    lost_block_like,
    rows_of,
    timed,
    with_failures,
)
from prefect_raybatch.stages.calls.calling import CALLS_IN_PROCESS, Calls
from prefect_raybatch.stages.cell_text import cell_texts
from prefect_raybatch.stages.columns import (
    DIGESTS,
    FORMED,
    KEY,
    MM,
    OWN_FORM,
    PARAMS,
    REASONING_OPEN,
    TOKENS,
    TRUNCATED,
)
from prefect_raybatch.stages.conversations import Conversation, documents_of
from prefect_raybatch.stages.images.rows import Digests, RowImages
from prefect_raybatch.stages.messages import ChatRequest, Filler, from_function, guarded
from prefect_raybatch.stages.parsing import reasoning_parser_for
from prefect_raybatch.stages.request_key import Keying
from prefect_raybatch.stages.row_sampling import check_own, has_form
from prefect_raybatch.stages.tokens import (
    Chat,
    LongPrompt,
    TokenIds,
    fitting_tokens,
    guard_of,
    guarded_request,
    last_tokens,
    longest_text,
    messages_text,
    prompt_tokens,
    shortened,
)
from prefect_raybatch.stages.vllm.multimodal import RowFeatures

UNKNOWN_CONTEXT = 1 << 20  # tokens: more than any model of unknown context length takes


@dataclass(frozen=True)
class Prepare:
    """The prepare stage: a function that prepares a block. The driver creates it, workers run it.

    `model` is the pinned model from `with_arguments`. `max_model_len` is in tokens (None: its own).
    `sampling` has the job's sampling fields; the fields that a row sets itself are checked against
    them. If a prompt is cut, it leaves room for an answer of `max_tokens`.

    `calls` says in which process the user's function is called. If `parsing` names a reasoning
    parser, a column says which answers may begin with thinking. `images` fetches a row's images;
    None for text alone. With `keying`, the input block has a column of the planned request keys,
    and a row fails if the key of its request differs.
    """

    prompt: PromptSpec
    sampling: SamplingSpec
    model: models.PinnedModel
    max_model_len: int | None
    calls: Calls = CALLS_IN_PROCESS
    parsing: ParsingSpec | None = None
    images: RowImages | None = None
    keying: Keying | None = None

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the block with columns of tokens, sampling fields, errors and seconds.

        Returns a lost or empty block unchanged, and a lost block if the model or the user's
        function cannot be loaded.
        """
        if is_passthrough(table):
            return table
        try:
            return self._prepare(table)
        except Exception as error:  # no row's fault: the model or the function is not on this node
            return lost_block_like(table, Loss.of(error))

    def _prepare(self, table: pa.Table) -> pa.Table:
        began = time.time()
        limit = self.max_model_len or models.context_length(self.model)
        requests, whole, features, digests = self._rendered(table, limit)
        tokens = [self._fitted(r, t, limit) for r, t in zip(requests, whole, strict=True)]
        if self.prompt.on_too_long != "quarantine":
            cut = [
                t is not w and not isinstance(t, Failure)
                for t, w in zip(tokens, whole, strict=True)
            ]
            table = TRUNCATED.add_to(table, cut)
        params = [
            json.dumps(r.sampling) if isinstance(r, ChatRequest) and r.sampling else None
            for r in requests
        ]
        table = TOKENS.add_to(table, [[] if isinstance(t, Failure) else t for t in tokens])
        table = PARAMS.add_to(table, params)
        if self.images is not None:
            sent = [
                None if isinstance(t, Failure) else f for t, f in zip(tokens, features, strict=True)
            ]
            table = MM.add_to(table, sent)
            if self.images.digests:
                table = DIGESTS.add_to(table, digests)
        if self.prompt.function or has_form(self.sampling.fields):
            own = [r.sampling if isinstance(r, ChatRequest) else None for r in requests]
            form = [has_form(self.sampling.fields, given) for given in own]
            table = FORMED.add_to(table, form)
        if self.prompt.function:
            table = with_own_forms(table, requests)
        if self.parsing is not None and self.parsing.reasoning:
            opened = self._reasoning_open(self.parsing, requests, tokens, FORMED.values(table))
            table = REASONING_OPEN.add_to(table, opened)
        table = with_failures(table, [t if isinstance(t, Failure) else None for t in tokens])
        return timed(table, "prepare", began)

    def requests(self, table: pa.Table) -> list[ChatRequest | Failure]:
        """Return the request of each row, or its failure, before chat template and tokenizer."""
        return self._requests(table)

    def keyed_requests(self, table: pa.Table) -> tuple[list[ChatRequest | Failure], list[Digests]]:
        """Return each row's request, or its failure, and for each row the digests of its images.

        Fetches the images to compute the digests (SHA-256 and size). The requests include the
        SHA-256 of their images, which `Keying.keys` needs. The second list is empty if the job has
        no images.
        """
        requests = self.requests(table)
        if self.images is None:
            return requests, []
        shown, digests = self.images.fetched(table, list(map(messages_for_images, requests)))
        return with_images(requests, shown, digests), digests

    def prompts(
        self, table: pa.Table
    ) -> tuple[list[ChatRequest | Failure], list[TokenIds | Failure]]:
        """Return (each row's request, each row's prompt tokens); no prompt is cut.

        If a row's request cannot be made, the row has a `Failure` in both lists. If only its prompt
        cannot be made, it has a `Failure` in the second list. A prompt of far more tokens than the
        model takes is a `LongPrompt`.
        """
        most = self.max_model_len or models.context_length(self.model)
        requests, tokens, *_ = self._rendered(table, most)
        return requests, tokens

    def _rendered(
        self, table: pa.Table, most: int | None
    ) -> tuple[
        list[ChatRequest | Failure],
        list[TokenIds | Failure],
        Sequence[RowFeatures | None],
        list[Digests],
    ]:
        """Return each row's request, tokens (as `prompts` does), image features and image digests.

        The features are for the engine (`MM_TYPE`), None for a row of text alone; the last list is
        empty for a job without images. `most` is the most tokens that the model takes, None if
        unknown.
        """
        most = most or UNKNOWN_CONTEXT
        requests = self._requests(table)
        shown: list[Messages | Failure] = []
        digests: list[Digests] = []
        if self.images is not None:
            shown, digests = self.images.fetched(table, list(map(messages_for_images, requests)))
            requests = with_images(requests, shown, digests) if self.keying else requests
        if self.keying is not None:
            requests = self.keying.checked(requests, table, table[KEY].to_pylist())
        if self.images is not None:
            pairs = zip(requests, shown, strict=True)
            asked = [r if self.keying and isinstance(r, Failure) else s for r, s in pairs]
            asked = [self._safe(*one, most) for one in zip(requests, asked, strict=True)]
            return (requests, *self.images.rendered(asked, self.model), digests)
        tokens = prompt_tokens(self._tokenizer(), requests, Chat.of(self.prompt), most)
        return requests, tokens, [None] * table.num_rows, []

    def _safe(
        self, request: ChatRequest | Failure, messages: Messages | Failure, most: int
    ) -> Messages | Failure:
        """Return a row's messages made safe for vLLM's image renderer, or the row's failure.

        `messages` are the request's messages with the fetched images. The row fails if their text
        has far more than `most` tokens. A control token in row text fails the row or is split by a
        space, as `prompt.special_tokens_in_rows` says.
        """
        if isinstance(messages, Failure) or isinstance(request, Failure):
            return messages
        tokenizer, chat = self._tokenizer(), Chat.of(self.prompt)
        whole = longest_text(tokenizer, messages_text(messages), most)
        if isinstance(whole, LongPrompt):
            return fitting_tokens(whole, self.max_model_len)  # type: ignore[return-value]  # a Failure
        guard = None if chat.rows == "allow" else guard_of(tokenizer, chat)
        if guard is None:
            return messages
        checked = guarded_request(guard, replace(request, messages=messages), chat.rows)
        if checked is None:
            return guard.spaced(replace(request, messages=messages)).messages
        return checked if isinstance(checked, Failure) else messages

    def _reasoning_open(
        self,
        parsing: ParsingSpec,
        requests: Sequence[ChatRequest | Failure],
        tokens: Sequence[TokenIds | Failure],
        form: Sequence[bool | None],
    ) -> list[bool | None]:
        """Return whether each row's answer may begin with thinking; None for a failed row.

        It may, unless the thinking has ended in the text that the chat template puts after the last
        message. In two cases, the whole prompt is checked instead of that text:
        - that text is not known, as for rows with images;
        - the row's answer must be a choice, JSON or the like (`form`): vLLM applies such a
          constraint at once if the whole prompt contains the end of thinking.
        """
        tokenizer = self._tokenizer()
        parser = reasoning_parser_for(parsing, tokenizer)
        chat = Chat.of(self.prompt)
        tails: Sequence[TokenIds | None] = [None for _ in tokens]
        if self.images is None:
            tails = last_tokens(tokenizer, requests, tokens, chat)
        opened: list[bool | None] = []
        for i, (ids, tail) in enumerate(zip(tokens, tails, strict=True)):
            if isinstance(ids, Failure):
                opened.append(None)
                continue
            by_whole = tail is None or form[i]
            opened.append(not parser.is_reasoning_end(ids if by_whole else tail or []))
        return opened

    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(*models.tokenizer_place(self.model))

    def _fitted(
        self, request: ChatRequest | Failure, tokens: TokenIds | Failure, limit: int | None
    ) -> TokenIds | Failure:
        """Return a row's prompt tokens, cut if the job allows it, or a failure.

        A prompt of `limit` tokens or more fails; None is no limit. If the job cuts long prompts,
        one that leaves no room for the row's `max_tokens` is cut, if possible.
        """
        if isinstance(tokens, Failure) or isinstance(request, Failure):
            return tokens
        if not limit or self.prompt.on_too_long == "quarantine":
            return fitting_tokens(tokens, limit)
        room = limit - request.answer(self.sampling.max_tokens)
        room = room if room > 0 else limit - 1
        if len(tokens) <= room:
            return fitting_tokens(tokens, limit)
        left = self.prompt.on_too_long == "truncate_left"
        try:
            chat = Chat.of(self.prompt)
            cut = shortened(self._tokenizer(), request, tokens, room, left, chat)
        except Exception as error:
            return Failure.of("prepare", error)
        return fitting_tokens(tokens, limit) if cut is None else cut

    def _own(self, fields: SamplingFields) -> None:
        check_own(fields, self.sampling.fields, self.sampling.fixed_form)

    def _requests(self, table: pa.Table) -> list[ChatRequest | Failure]:
        made = self._asked(table)
        if self.prompt.continue_final_message:
            made = [
                r if isinstance(r, Failure) else guarded(ChatRequest.continued, r) for r in made
            ]
        name = self.prompt.documents
        if name is None:
            return made
        cells = rows_of(table, [name])

        def with_documents(request: ChatRequest, row: Row) -> ChatRequest:
            return replace(request, documents=documents_of(row[name], name))

        return [
            r if isinstance(r, Failure) else guarded(with_documents, r, row)
            for r, row in zip(made, cells, strict=True)
        ]

    def _asked(self, table: pa.Table) -> list[ChatRequest | Failure]:
        if self.prompt.messages:
            converse = Conversation(self.prompt)
            rows = rows_of(table, [self.prompt.messages])
            return [guarded(converse, row) for row in rows]
        if self.prompt.function:
            rows = rows_of(table, input_columns(table))
            with self.calls.function(self.prompt.function, "prompt.function") as function:
                asked = partial(from_function, raw=self.prompt.function == TEXT_REQUEST)
                made = [guarded(asked, function, self._own, row) for row in rows]
            system = self.prompt.system
            return [r if isinstance(r, Failure) or not system else r.under(system) for r in made]
        template = self.prompt.template or ""
        fields = template_fields(template)
        fill = Filler(template, self.prompt)
        return [guarded(fill, row) for row in _text_rows(table, list(fields))]


def _text_rows(table: pa.Table, names: Sequence[str]) -> Iterator[dict[str, str | None] | Failure]:
    """Yield rows as dicts of the named columns' texts, or a `Failure` for an unreadable row."""
    columns = [cell_texts(table[name], name) for name in names]
    for cells in zip(*columns, strict=True) if names else [()] * table.num_rows:
        failure = next((cell for cell in cells if isinstance(cell, Failure)), None)
        yield dict(zip(names, cells, strict=True)) if failure is None else failure


def with_own_forms(table: pa.Table, requests: Sequence[ChatRequest | Failure]) -> pa.Table:
    """Return the block with a column of each row's own `choice` and `structured_outputs`.

    These are sampling fields that the row itself sets; the column has them as JSON. It is null for
    a row that sets neither, or that failed.
    """
    own = [own_form(r.sampling) if isinstance(r, ChatRequest) else None for r in requests]
    return OWN_FORM.add_to(table, own)


def with_images(
    requests: Sequence[ChatRequest | Failure],
    shown: Sequence[Messages | Failure],
    digests: Sequence[Digests],
) -> list[ChatRequest | Failure]:
    """Return requests with the SHA-256 of their images, from `digests`.

    `shown` has each row's messages with the fetched images. If it has a failure for a row, the
    failure replaces the row's request.
    """
    made: list[ChatRequest | Failure] = []
    for request, seen, each in zip(requests, shown, digests, strict=True):
        if isinstance(request, ChatRequest) and not isinstance(seen, Failure):
            request = replace(request, images=tuple(one["sha256"] for one in each))
        made.append(seen if isinstance(seen, Failure) else request)
    return made


def messages_for_images(request: ChatRequest | Failure) -> Messages | Failure:
    """Return the messages of a request in a job with images; a failed row's failure is passed on.

    A request with a raw prompt or documents gets a failure, as they do not work with images.
    """
    if isinstance(request, ChatRequest) and (request.documents or request.raw):
        what = "a raw prompt" if request.raw else "prompt.documents"
        reason = f"{what} and prompt.images cannot be combined. Remove one"
        return Failure("prepare", "ValueError", reason)
    return request if isinstance(request, Failure) else request.messages
