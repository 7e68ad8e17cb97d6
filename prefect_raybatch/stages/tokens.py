"""Chat messages to tokens: chat template, tokenizer, and the cutting of what is too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.model import chat_template
from prefect_raybatch.stages.block import Failure, Tokenizer
from prefect_raybatch.stages.messages import ChatRequest

TokenIds = list[int]
Given = TypeVar("Given")
Made = TypeVar("Made")
CUTS = 4  # tries to cut a message: what is left may take other tokens than it did in the whole


@dataclass(frozen=True)
class Chat:
    """What makes a prompt of messages beside them: `template` in place of the tokenizer's own, its
    `arguments` and `tools`, a text that the answer goes on from (`prefill`), and whether it goes on
    from the last message (`continued`). `fields` of the job that need a chat template."""

    template: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[dict[str, Any]] | None = None
    prefill: str = ""
    continued: bool = False
    fields: tuple[str, ...] = ()

    @classmethod
    def of(cls, prompt: Prompt) -> Chat:
        return cls(
            prompt.chat_template,
            prompt.chat_template_kwargs,
            prompt.tools,
            prompt.prefill or "",
            prompt.continue_final_message,
            chat_template.needing(prompt),
        )

    def templated(self, tokenizer: Tokenizer) -> bool:
        """Whether there is a chat template; `ConfigError` where there must be one and is none."""
        if self.template or getattr(tokenizer, "chat_template", None):
            return True
        if self.fields:
            raise ConfigError(chat_template.no_template(self.fields, "the model's tokenizer"))
        return False


PLAIN = Chat()


def render(
    tokenizer: Tokenizer, requests: Sequence[ChatRequest | Failure], chat: Chat = PLAIN
) -> list[str | Failure]:
    """Requests to prompt texts through the chat template; failures stay where they are."""
    if not chat.templated(tokenizer):
        return [
            r
            if isinstance(r, Failure)
            else "\n\n".join(str(m["content"]) for m in r.messages) + chat.prefill
            for r in requests
        ]

    def texts_of(asked: list[ChatRequest]) -> list[str]:
        made = tokenizer.apply_chat_template(
            [r.messages for r in asked],
            tokenize=False,
            add_generation_prompt=not chat.continued,
            **_given(chat, asked[0].documents),
        )
        return [text + chat.prefill for text in made]

    good = [r for r in requests if isinstance(r, ChatRequest)]
    made: list[str] | None = None
    if good and all(r.documents == good[0].documents for r in good):  # a call takes one row's
        with suppress(Exception):  # one prompt fails: which one is found out below, row by row
            made = texts_of(good)
    texts: Iterator[str | Failure]
    if made is None:
        texts = iter([_try(lambda one: texts_of([one])[0], request) for request in good])
    else:
        texts = iter(made)
    return [r if isinstance(r, Failure) else next(texts) for r in requests]


def _given(chat: Chat, documents: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Arguments of the chat template, without those that are not set: a tokenizer of its own kind
    may not know them."""
    given: dict[str, Any] = {
        "chat_template": chat.template,
        "tools": chat.tools,
        "documents": documents,
        "continue_final_message": chat.continued,
    }
    return {**{name: value for name, value in given.items() if value}, **chat.arguments}


def tokenize(
    tokenizer: Tokenizer, texts: Sequence[str | Failure], chat: Chat = PLAIN
) -> list[TokenIds | Failure]:
    """Prompt texts to token lists; failures stay where they are."""
    good = [t for t in texts if not isinstance(t, Failure)]
    special = not chat.templated(tokenizer)

    def tokens(batch: list[str]) -> list[TokenIds]:
        batch_ids: list[TokenIds] = tokenizer(batch, add_special_tokens=special)["input_ids"]
        return batch_ids

    ids: Iterator[TokenIds | Failure]
    try:
        ids = iter(tokens(good) if good else ())
    except Exception:
        ids = iter([_try(lambda text: tokens([text])[0], text) for text in good])
    return [t if isinstance(t, Failure) else next(ids) for t in texts]


def shortened(
    tokenizer: Tokenizer,
    request: ChatRequest,
    size: int,
    room: int,
    left: bool,
    chat: Chat = PLAIN,
) -> list[int] | None:
    """Prompt tokens of a request of `size` tokens, at most `room`, with the beginning (`left`) or
    the end of its last user message cut off; None where that message is not long enough.

    The text is cut and not the tokens: the chat template around it must stay whole.
    """
    users = [i for i, m in enumerate(request.messages) if m["role"] == "user"]
    if not users or not isinstance(request.messages[users[-1]]["content"], str):
        return None
    before, message = request.messages[: users[-1]], request.messages[users[-1]]
    after = request.messages[users[-1] + 1 :]
    content = message["content"]
    spans = _spans(tokenizer, content)
    over = size - room
    for _ in range(CUTS):
        keep = len(spans) - over
        if keep < 1:
            return None
        text = content[spans[-keep][0] :] if left else content[: spans[keep - 1][1]]
        asked = replace(request, messages=[*before, {**message, "content": text}, *after])
        (tokens,) = tokenize(tokenizer, render(tokenizer, [asked], chat), chat)
        if isinstance(tokens, Failure):
            return None
        if len(tokens) <= room:
            return list(tokens)
        over += len(tokens) - room
    return None


def _spans(tokenizer: Tokenizer, text: str) -> list[tuple[int, int]]:
    """Where each token of a text begins and ends in it, in characters."""
    if tokenizer.is_fast:
        made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(made["offset_mapping"])
    count = len(tokenizer(text, add_special_tokens=False)["input_ids"])  # taken as of one length
    return [(i * len(text) // count, (i + 1) * len(text) // count) for i in range(count)]


def fitting_tokens(tokens: TokenIds, limit: int | None) -> TokenIds | Failure:
    if not tokens:
        return Failure("prepare", "EmptyPrompt", "the prompt has no tokens")
    if limit and len(tokens) >= limit:
        return Failure(
            "prepare",
            "PromptTooLong",
            f"the prompt has {len(tokens)} tokens and leaves no room in engine.max_model_len "
            f"{limit}",
        )
    return tokens


def _try(make: Callable[[Given], Made], value: Given) -> Made | Failure:
    try:
        return make(value)
    except Exception as error:
        return Failure.of("prepare", error)
