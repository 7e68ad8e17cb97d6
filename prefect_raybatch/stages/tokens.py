"""Turns chat messages into tokens: chat template, tokenizer, and truncation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import compress, pairwise
from typing import TypeVar

from prefect_raybatch.bounded import within
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.model import chat_template
from prefect_raybatch.spec.request import PromptSpec
from prefect_raybatch.stages.block import Failure, Messages, Tokenizer
from prefect_raybatch.stages.messages import ChatRequest, Document, plain_prompt
from prefect_raybatch.stages.row_text import (
    HIDDEN_TEXT,
    THINKING,
    RowText,
    refused,
    refused_role,
    refused_template,
    row_text,
)

TokenIds = list[int]
Given = TypeVar("Given")
Made = TypeVar("Made")
LATE_ROWS = 3  # rows for which a chat template may hang before the other rows of the call fail
CUTS = 4  # tries to cut a message: a part may get other tokens than it has in the whole text
# Bounds of what is tokenized. English has 4 to 5 characters a token; the longest tokens, runs of
# spaces or dashes, have up to 128 in the vocabularies of Llama 3, Qwen and gpt-oss.
CHARACTERS_A_TOKEN, CHARACTERS_A_TOKEN_AT_MOST = 8, 128
CHARACTERS_AT_ONCE = 1 << 20
# Filters and methods of Jinja that change a text.
_CHANGING = re.compile(
    r"(\||\.)\s*(lower|upper|title|capitalize|swapcase|casefold|replace|reverse|join|format"
    r"|translate)\b"
)
BORDER = 64  # tokens that a part may have more if tokenized alone than within the whole text


@dataclass(frozen=True)
class Chat:
    """The settings that turn messages into a prompt.

    `template` replaces the tokenizer's chat template, unless it is None. The template in use gets
    `arguments` and `tools`. The answer continues the text `prefill`, or the last message if
    `continued`. `fields` are the job fields that need a chat template. `rows`: how control tokens
    in row text are treated (`prompt.special_tokens_in_rows`). `asked`: the prompt ends with the
    beginning of an answer (`add_generation_prompt`). `raw`: no template is applied, as if the model
    had none.
    """

    template: str | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)
    tools: Sequence[Mapping[str, object]] | None = None
    prefill: str = ""
    continued: bool = False
    fields: tuple[str, ...] = ()
    rows: str = "split"
    asked: bool = True
    raw: bool = False

    @classmethod
    def of(cls, prompt: PromptSpec) -> Chat:
        return cls(
            prompt.chat_template,
            prompt.chat_template_kwargs,
            prompt.tools,
            prompt.prefill or "",
            prompt.continue_final_message,
            chat_template.needing(prompt),
            prompt.special_tokens_in_rows,
        )

    def templated(self, tokenizer: Tokenizer) -> bool:
        """Return whether there is a chat template; raise `ConfigError` if one is required."""
        if self.raw:
            return False
        if self.template or getattr(tokenizer, "chat_template", None):
            return True
        if self.fields:
            raise ConfigError(chat_template.no_template(self.fields, "the model's tokenizer"))
        return False


PLAIN = Chat()


class TemplateTooSlow(Exception):
    """A chat template took too long for a row; this is the row's error class in quarantine."""


class TemplateLimit:
    """Limits the time that a chat template takes for a row to `seconds`.

    After LATE_ROWS rows that took longer, the template is not applied to any further row.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._late_rows = 0

    def __call__(self, apply: Callable[[], Made], rows: int = 1) -> Made:
        """Call `apply`, which renders `rows` rows, and return its result.

        Raise `TemplateTooSlow` if the call takes over `seconds`. Raise it at once if LATE_ROWS
        earlier calls took over `seconds`. Only calls for a single row count: after a slow call for
        several rows, the caller tries these rows one by one.
        """
        if self._late_rows >= LATE_ROWS:
            raise TemplateTooSlow(
                f"the chat template took over {self.seconds:g} s for earlier rows, so it is not "
                "tried for this one"
            )
        try:
            return within(self.seconds, apply, stop=True)
        except TimeoutError:
            self._late_rows += rows == 1
            raise TemplateTooSlow(
                f"the chat template took over {self.seconds:g} s for this row. Simplify its "
                "loops, or shorten the row"
            ) from None


def render(
    tokenizer: Tokenizer,
    requests: Sequence[ChatRequest | Failure],
    chat: Chat = PLAIN,
    seconds: float = chat_template.TEMPLATE_SECONDS,
) -> list[str | Failure]:
    """Render requests to prompt texts through the chat template; failures stay in place.

    A row for which the template takes over `seconds` fails; after LATE_ROWS such rows, all later
    rows fail too. Without a chat template, the texts of the messages are joined.
    """
    if not chat.templated(tokenizer):
        return [
            r
            if isinstance(r, Failure)
            else _try(lambda one: plain_prompt(one.messages) + chat.prefill, r)
            for r in requests
        ]

    limit = TemplateLimit(seconds)

    def texts_of(asked: list[ChatRequest]) -> list[str]:
        made = limit(
            lambda: tokenizer.apply_chat_template(
                [r.messages for r in asked],
                tokenize=False,
                add_generation_prompt=chat.asked and not chat.continued,
                **_given(chat, asked[0].documents),
            ),
            len(asked),
        )
        return [text + chat.prefill for text in made]

    good = [r for r in requests if isinstance(r, ChatRequest)]
    made: list[str] | None = None
    if good and all(r.documents == good[0].documents for r in good):  # one list for the whole call
        with suppress(Exception):  # one prompt fails: it is found below, row by row
            made = texts_of(good)
    texts: Iterator[str | Failure]
    if made is None:
        texts = iter([_try(lambda one: texts_of([one])[0], request) for request in good])
    else:
        texts = iter(made)
    return [r if isinstance(r, Failure) else next(texts) for r in requests]


def _given(chat: Chat, documents: list[Document] | None) -> dict[str, object]:
    """Return the keyword arguments for `apply_chat_template`.

    Arguments that are not set are left out, because an unusual tokenizer may not accept them.
    """
    given: dict[str, object] = {
        "chat_template": chat.template,
        "tools": chat.tools,
        "documents": documents,
        "continue_final_message": chat.continued,
    }
    return {**{name: value for name, value in given.items() if value}, **chat.arguments}


def prompt_tokens(
    tokenizer: Tokenizer,
    requests: Sequence[ChatRequest | Failure],
    chat: Chat = PLAIN,
    most: int | None = None,
) -> list[TokenIds | Failure]:
    """Convert requests to prompt tokens; failures stay in place.

    Control tokens in row text are treated as `chat.rows` says. A prompt of far more than `most`
    tokens is a `LongPrompt`: only its beginning was tokenized. The text of a raw request is
    tokenized as it is.
    """
    raw = [isinstance(r, ChatRequest) and r.raw for r in requests]
    if not any(raw):
        return _chat_tokens(tokenizer, requests, chat, most)
    texts, plain = list(compress(requests, raw)), replace(chat, raw=True)
    made = iter(tokenize(tokenizer, render(tokenizer, texts, plain), plain, most))
    chats = [r for r, is_raw in zip(requests, raw, strict=True) if not is_raw]
    others = iter(_chat_tokens(tokenizer, chats, chat, most))
    return [next(made) if is_raw else next(others) for is_raw in raw]


def _chat_tokens(
    tokenizer: Tokenizer,
    requests: Sequence[ChatRequest | Failure],
    chat: Chat,
    most: int | None,
) -> list[TokenIds | Failure]:
    guard = None if chat.rows == "allow" else guard_of(tokenizer, chat)
    if guard is None:
        return tokenize(tokenizer, render(tokenizer, requests, chat), chat, most)
    ordinary: list[ChatRequest | Failure] = []
    careful: dict[int, ChatRequest] = {}
    waiting = Failure("prepare", "Waiting", "")  # holds the place of a row in `careful`
    for i, request in enumerate(requests):
        checked = guarded_request(guard, request, chat.rows)
        if checked is None and isinstance(request, ChatRequest):
            careful[i] = request
        ordinary.append(waiting if checked is None else checked)
    texts = render(tokenizer, ordinary, chat)
    if _changes_text(tokenizer, chat.template):
        texts = _unforged(tokenizer, guard, ordinary, texts, chat)
    tokens = tokenize(tokenizer, texts, chat, most)
    for i, request in careful.items():
        (tokens[i],) = [_try(lambda one: _plain_tokens(tokenizer, guard, one, chat, most), request)]
    return tokens


def guarded_request(
    guard: RowText, request: ChatRequest | Failure, rows: str
) -> ChatRequest | Failure | None:
    """Return the request if its row text and roles have no control token.

    Return the row's failure if a role has one, or if row text has one and the job refuses it.
    Return None if row text has one that must be encoded as plain text. `rows` is the job's
    `prompt.special_tokens_in_rows`. A failure is returned unchanged.
    """
    if isinstance(request, Failure):
        return request
    role = guard.bad_role(request)
    if role is not None:
        return refused_role(role)
    control = guard.control_in(request)
    if control is None:
        return request
    return refused(control) if rows == "refuse" else None


@lru_cache(maxsize=8)
def _guard_of(tokenizer: Tokenizer, template: str | None) -> RowText | None:
    """Return the `RowText` for a tokenizer; None if the tokenizer has no control tokens.

    It also finds parts of control tokens in row text that the chat template `template` (None: the
    tokenizer's) would complete to whole ones.
    """
    guard = row_text(tokenizer)
    if guard is None:
        return None
    turns: Messages = [
        {"role": role, "content": f"{HIDDEN_TEXT}{i:08d}"}
        for i, role in enumerate(("user", "assistant", "user"))
    ]
    for messages in (turns, turns[:1]):
        with suppress(Exception):  # a template may reject these messages
            (text,) = render(tokenizer, [ChatRequest(messages)], Chat(template))
            if isinstance(text, str):
                pieces = re.split(HIDDEN_TEXT + r"\d{8}", text)
                for before, after in pairwise(pieces):
                    guard = guard.with_fragments(before, after)
    return guard


def guard_of(tokenizer: Tokenizer, chat: Chat | None = None) -> RowText | None:
    """Return the `RowText` that finds control tokens of `tokenizer` in rows.

    With `chat`, it also finds the parts that the chat template would complete to control tokens.
    Return None if the tokenizer has no control tokens.
    """
    return row_text(tokenizer) if chat is None else _guard_of(tokenizer, chat.template)


def _changes_text(tokenizer: Tokenizer, template: str | None) -> bool:
    """Return whether a chat template changes text, so that it may create control tokens."""
    return _CHANGING.search(str(template or getattr(tokenizer, "chat_template", None))) is not None


def _unforged(
    tokenizer: Tokenizer,
    guard: RowText,
    requests: Sequence[ChatRequest | Failure],
    texts: Sequence[str | Failure],
    chat: Chat,
) -> list[str | Failure]:
    """Return the prompts `texts`, with a failure in place of each that has a forged control token.

    A forged token is one that the chat template made from row text, e.g. by changing it to lower
    case. `requests` are the prompts' requests.
    """
    neutral = [r if isinstance(r, Failure) else guard.neutral(r) for r in requests]
    made: list[str | Failure] = []
    for text, other in zip(texts, render(tokenizer, neutral, chat), strict=True):
        control = None
        if isinstance(text, str) and isinstance(other, str):
            control = guard.token_from_row(text, other)
        made.append(text if control is None else refused_template(control))
    return made


def _plain_tokens(
    tokenizer: Tokenizer, guard: RowText, request: ChatRequest, chat: Chat, most: int | None
) -> TokenIds | Failure:
    """Return a request's prompt tokens; control tokens in its row text are encoded as plain text.

    `most` is as in `prompt_tokens`.
    """
    special = not chat.templated(tokenizer)
    if most is not None:  # hiding the control tokens of millions of characters takes long
        (text,) = render(tokenizer, [request], chat)
        if isinstance(text, Failure) or len(text) > most * CHARACTERS_A_TOKEN:
            (ids,) = tokenize(tokenizer, [text], chat, most)
            if isinstance(ids, (Failure, LongPrompt)):
                return ids
    plain = guard.plain
    if plain is None:
        (text,) = render(tokenizer, [guard.spaced(request)], chat)
        return tokenize(tokenizer, [text], chat, most)[0]
    hidden = guard.hidden(request)
    (text,) = render(tokenizer, [hidden.request], chat)
    if _changes_text(tokenizer, chat.template):
        (text,) = _unforged(tokenizer, guard, [request], [text], chat)
    if isinstance(text, Failure):
        return text
    if any(message["role"] == "assistant" for message in request.messages):
        # A template may look for the thinking in an answer of the assistant, and leave it out.
        kept = guard.hidden(request, THINKING)
        (shown,) = render(tokenizer, [kept.request], chat)
        if isinstance(shown, str):
            shown = guard.hide_kept_tokens(shown, kept.texts)
            if guard.unhidden(shown, kept.texts) != guard.unhidden(text, hidden.texts):
                text, hidden = shown, kept
    marked = guard.marked(text, hidden.texts)

    def tokens(batch: list[str]) -> list[TokenIds]:
        return plain.tokens(batch, add_special_tokens=special)

    return _bounded(tokens, [marked], most)[0]


def tokenize(
    tokenizer: Tokenizer,
    texts: Sequence[str | Failure],
    chat: Chat = PLAIN,
    most: int | None = None,
) -> list[TokenIds | Failure]:
    """Convert prompt texts to token lists; failures stay in place. `most` as in `prompt_tokens`."""
    good = [t for t in texts if not isinstance(t, Failure)]
    special = not chat.templated(tokenizer)

    def tokens(batch: list[str]) -> list[TokenIds]:
        batch_ids: list[TokenIds] = tokenizer(batch, add_special_tokens=special)["input_ids"]
        return batch_ids

    ids = iter(_bounded(tokens, good, most))
    return [t if isinstance(t, Failure) else next(ids) for t in texts]


class LongPrompt(list[int]):
    """Tokens of a part of a prompt that is far too long.

    The part is the first or last `characters` characters. `estimate` is the approximate number of
    tokens of the whole prompt.
    """

    def __init__(self, ids: TokenIds, estimate: int, characters: int) -> None:
        super().__init__(ids)
        self.estimate = estimate
        self.characters = characters


def batches_of(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield slices of texts to tokenize together, of at most CHARACTERS_AT_ONCE characters in all.

    A longer text has a slice of its own. `sizes` has the number of characters of each text.
    """
    start = total = 0
    for i, size in enumerate(sizes):
        if total and total + size > CHARACTERS_AT_ONCE:
            yield slice(start, i)
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def _bounded(
    tokens: Callable[[list[str]], list[TokenIds]], texts: Sequence[str], most: int | None
) -> list[TokenIds | Failure]:
    """Return the tokens of each text, or a failure; `tokens` calls the tokenizer.

    A tokenizer needs some 200 bytes of memory per character, so texts are passed in batches of
    `CHARACTERS_AT_ONCE` characters. A text that may have more than `most` tokens is passed in parts
    of growing length (see `long_tokens`).
    """
    made: dict[int, TokenIds | Failure] = {}
    short: list[int] = []
    for i, text in enumerate(texts):
        if most is not None and len(text) > most * CHARACTERS_A_TOKEN:
            made[i] = _try(partial(long_tokens, tokens, most=most), text)
        else:
            short.append(i)
    for batch in batches_of([len(texts[i]) for i in short]):
        rows = short[batch]
        made.update(zip(rows, _tokens_of(tokens, [texts[i] for i in rows]), strict=True))
    return [made[i] for i in range(len(texts))]


def _tokens_of(
    tokens: Callable[[list[str]], list[TokenIds]], texts: list[str]
) -> Sequence[TokenIds | Failure]:
    try:
        return tokens(texts)
    except Exception:  # one text fails: find out which
        return [_try(lambda text: tokens([text])[0], text) for text in texts]


def long_tokens(
    tokens: Callable[[list[str]], list[TokenIds]], text: str, most: int, end: bool = False
) -> TokenIds:
    """Return the tokens of a text; if it is far too long, those of a part of it as a `LongPrompt`.

    `tokens` tokenizes a list of texts. The part is the beginning of the text, or its end if `end`
    is true. Ever longer parts are tokenized, until one has clearly more than `most` tokens, or has
    CHARACTERS_A_TOKEN_AT_MOST characters for each of `most` tokens. If the part would be the whole
    text before that, all its tokens are returned. They may be more than `most`.
    """
    size = most * CHARACTERS_A_TOKEN
    bound = most * CHARACTERS_A_TOKEN_AT_MOST
    while size < len(text):
        (ids,) = tokens([text[-size:] if end else text[:size]])
        if len(ids) > most + BORDER or size >= bound:
            return LongPrompt(ids, max(most + 1, len(ids) * len(text) // size), size)
        size = min(4 * size, bound)
    (ids,) = tokens([text])
    return ids


def messages_text(messages: Messages) -> str:
    """Return the text of all messages, text parts included, joined by newlines."""
    parts = (m["content"] if isinstance(m["content"], list) else [m["content"]] for m in messages)
    texts = (p.get("text") if isinstance(p, dict) else p for part in parts for p in part)
    return "\n".join(text for text in texts if isinstance(text, str))


def longest_text(tokenizer: Tokenizer, text: str, most: int) -> TokenIds | LongPrompt:
    """Return the tokens of a text that may be far too long; a `LongPrompt` if it is.

    It is far too long if it has clearly more than `most` tokens. A text with at most
    CHARACTERS_A_TOKEN characters for each of `most` tokens is taken to be short enough: for such a
    text, [] is returned without tokenizing it.
    """
    if len(text) <= most * CHARACTERS_A_TOKEN:
        return []
    return long_tokens(
        lambda batch: list(tokenizer(batch, add_special_tokens=False)["input_ids"]), text, most
    )


def last_tokens(
    tokenizer: Tokenizer,
    requests: Sequence[ChatRequest | Failure],
    whole: Sequence[TokenIds | Failure],
    chat: Chat,
) -> list[TokenIds | None]:
    """Return the tokens that follow the last message in each of the prompts `whole`.

    With `chat.continued`, the tokens of that message are included. An entry is None if the row
    failed, the message is not text, the template omits the message, or there is no chat template.
    """
    if not chat.templated(tokenizer):
        return [None for _ in requests]
    if chat.continued:
        return [
            None
            if isinstance(r, Failure) or isinstance(ids, Failure)
            else _continued_tokens(tokenizer, r, ids, chat)
            for r, ids in zip(requests, whole, strict=True)
        ]
    shown = [
        _NO_MESSAGE if isinstance(r, Failure) or isinstance(ids, Failure) else _with_end(r)
        for r, ids in zip(requests, whole, strict=True)
    ]
    return [
        None
        if isinstance(text, Failure) or HIDDEN_TEXT not in text
        else _tail_tokens(tokenizer, text.rpartition(HIDDEN_TEXT)[2])
        for text in render(tokenizer, shown, chat)
    ]


_NO_MESSAGE = Failure("prepare", "NoMessage", "")


def _with_end(request: ChatRequest) -> ChatRequest | Failure:
    """Return the request with the digits HIDDEN_TEXT appended to its last message.

    They show in the rendered prompt where that message ends. A raw request, or one whose last
    message is not text, gives a failure.
    """
    last = request.messages[-1]
    if request.raw or not isinstance(last["content"], str):
        return _NO_MESSAGE
    ended = {**last, "content": last["content"] + HIDDEN_TEXT}
    return replace(request, messages=[*request.messages[:-1], ended])


def _continued_tokens(
    tokenizer: Tokenizer, request: ChatRequest, whole: TokenIds, chat: Chat
) -> TokenIds | None:
    before = replace(request, messages=request.messages[:-1], job_text=())
    (tokens,) = prompt_tokens(tokenizer, [before], replace(chat, continued=False, asked=False))
    if isinstance(tokens, Failure):
        return None
    pairs = zip(whole, tokens, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))
    return list(whole[same:])


@lru_cache(maxsize=64)
def _tail_tokens(tokenizer: Tokenizer, text: str) -> TokenIds:
    return list(tokenizer([text], add_special_tokens=False)["input_ids"][0])


def shortened(
    tokenizer: Tokenizer,
    request: ChatRequest,
    whole: TokenIds,
    room: int,
    left: bool,
    chat: Chat = PLAIN,
) -> list[int] | None:
    """Return at most `room` prompt tokens of a request, with its last user message cut.

    The message's beginning (`left`) or its end is cut off until the prompt fits. `whole` has the
    tokens of the uncut prompt. The text is cut, not the tokens, so that the chat template around it
    stays whole. None if that is impossible, as for a message that is too short.
    """
    users = [i for i, m in enumerate(request.messages) if m["role"] == "user"]
    if not users or not isinstance(request.messages[users[-1]]["content"], str):
        return None
    at = users[-1]

    def cut(request: ChatRequest, start: int, stop: int) -> tuple[ChatRequest, TokenIds | Failure]:
        asked = request.with_content(at, start, stop)
        return asked, prompt_tokens(tokenizer, [asked], chat)[0]

    size = len(whole)
    if isinstance(whole, LongPrompt):
        (rest,) = prompt_tokens(tokenizer, [request.with_content(at, 0, 0)], chat, room)
        if isinstance(rest, Failure) or len(rest) >= room:
            return None
        length, kept = len(request.messages[at]["content"]), room * CHARACTERS_A_TOKEN
        while True:  # keep a few more characters than fit, so that the others are not tokenized
            kept = min(kept, length)
            asked, tokens = cut(request, length - kept if left else 0, length if left else kept)
            if isinstance(tokens, Failure):
                return None
            if len(tokens) > room or kept == length:
                break
            if kept >= room * CHARACTERS_A_TOKEN_AT_MOST:
                return list(tokens)
            kept = 4 * kept
        request, size = asked, len(tokens)
        if size <= room:
            return list(tokens)
    content = request.messages[at]["content"]
    spans = _spans(_reader_of(tokenizer, request, chat), content)
    over = size - room
    for _ in range(CUTS):
        keep = len(spans) - over
        if keep < 1:
            return None
        start, stop = (spans[-keep][0], len(content)) if left else (0, spans[keep - 1][1])
        _, tokens = cut(request, start, stop)
        if isinstance(tokens, Failure):
            return None
        if len(tokens) <= room:
            return list(tokens)
        over += len(tokens) - room
    return None


def _reader_of(tokenizer: Tokenizer, request: ChatRequest, chat: Chat) -> Tokenizer:
    """Return the tokenizer that encodes a request's row text.

    It is the copy in `RowText.plain`, if there is one and the row text has a control token; else
    the model's own.
    """
    guard = None if request.raw or chat.rows == "allow" else guard_of(tokenizer, chat)
    if guard is None or guard.control_in(request) is None or guard.plain is None:
        return tokenizer
    return guard.plain.tokenizer


def _spans(tokenizer: Tokenizer, text: str) -> list[tuple[int, int]]:
    """Return (start, end) in characters of each token of a text; a guess for a slow tokenizer."""
    if tokenizer.is_fast:
        made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(made["offset_mapping"])
    # A slow tokenizer returns no offsets: assume tokens of equal length.
    count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    return [(i * len(text) // count, (i + 1) * len(text) // count) for i in range(count)]


def fitting_tokens(tokens: TokenIds, limit: int | None) -> TokenIds | Failure:
    """Return the tokens of a prompt, or a failure if it is empty or too long.

    A prompt is too long if it has `limit` tokens or more (None: no limit) or is a `LongPrompt`.
    """
    if not tokens:
        return Failure("prepare", "EmptyPrompt", "the prompt has no tokens")
    if isinstance(tokens, LongPrompt):
        return prompt_too_long(f"about {tokens.estimate:,}", limit)
    if limit and len(tokens) >= limit:
        return prompt_too_long(str(len(tokens)), limit)
    return tokens


def prompt_too_long(count: str, limit: int | None) -> Failure:
    """Return the failure for a prompt of `count` tokens (as text).

    `limit` is the limit of tokens that the job sets; None: only the model's context limits them.
    """
    room = "the model's context" if limit is None else f"engine.max_model_len {limit}"
    return Failure(
        "prepare",
        "PromptTooLong",
        f"a prompt of {count} tokens leaves no room in {room}. Shorten the row, or set "
        "prompt.on_too_long",
    )


def _try(make: Callable[[Given], Made], value: Given) -> Made | Failure:
    try:
        return make(value)
    except Exception as error:
        return Failure.of("prepare", error)
