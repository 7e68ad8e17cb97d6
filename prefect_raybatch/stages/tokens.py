"""Chat messages to tokens: chat template, tokenizer, and the cutting of what is too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from prefect_raybatch.stages.block import Failure, Messages, Tokenizer
from prefect_raybatch.stages.messages import ChatRequest

TokenIds = list[int]
Given = TypeVar("Given")
Made = TypeVar("Made")
CUTS = 4  # tries to cut a message: what is left may take other tokens than it did in the whole


def render(tokenizer: Tokenizer, requests: Sequence[ChatRequest | Failure]) -> list[str | Failure]:
    """Requests to prompt texts through the chat template; failures stay where they are."""
    if not getattr(tokenizer, "chat_template", None):
        return [
            r if isinstance(r, Failure) else "\n\n".join(str(m["content"]) for m in r.messages)
            for r in requests
        ]

    def texts_of(conversations: list[Messages]) -> list[str]:
        return tokenizer.apply_chat_template(
            conversations, tokenize=False, add_generation_prompt=True
        )

    good = [r.messages for r in requests if isinstance(r, ChatRequest)]
    texts: Iterator[str | Failure]
    try:
        texts = iter(texts_of(good) if good else ())
    except Exception:  # one of them: find out which, row by row
        texts = iter([_try(lambda one: texts_of([one])[0], messages) for messages in good])
    return [r if isinstance(r, Failure) else next(texts) for r in requests]


def tokenize(tokenizer: Tokenizer, texts: Sequence[str | Failure]) -> list[TokenIds | Failure]:
    """Prompt texts to token lists; failures stay where they are."""
    good = [t for t in texts if not isinstance(t, Failure)]

    def tokens(batch: list[str]) -> list[TokenIds]:
        special = not tokenizer.chat_template
        batch_ids: list[TokenIds] = tokenizer(batch, add_special_tokens=special)["input_ids"]
        return batch_ids

    ids: Iterator[TokenIds | Failure]
    try:
        ids = iter(tokens(good) if good else ())
    except Exception:
        ids = iter([_try(lambda text: tokens([text])[0], text) for text in good])
    return [t if isinstance(t, Failure) else next(ids) for t in texts]


def shortened(
    tokenizer: Tokenizer, request: ChatRequest, size: int, room: int, left: bool
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
        asked = ChatRequest([*before, {**message, "content": text}, *after], request.sampling)
        (tokens,) = tokenize(tokenizer, render(tokenizer, [asked]))
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


def fitting(tokens: TokenIds, limit: int | None) -> TokenIds | Failure:
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
