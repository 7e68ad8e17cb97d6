"""Keeps control tokens out of row text: a row's `<|im_end|>` is text and ends no turn.

A tokenizer turns the texts of its control tokens into single tokens wherever they occur. The job
and the chat template may use these texts, a row may not. Two steps tell them apart. Before the chat
template runs, each such text in a row is replaced by unguessable digits. Every control token in the
rendered prompt then comes from the template or the job and gets a mark. After that the row's texts
are restored, and a copy of the tokenizer that knows only marked control tokens encodes the prompt.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from prefect_raybatch.stages.block import Failure, Message, Messages, Tokenizer
from prefect_raybatch.stages.messages import ChatRequest

log = logging.getLogger(__name__)


def _digits(first: str) -> str:
    """Return 24 random digits as text that every normalizer and template filter leaves unchanged.

    They begin with the digit `first`, which occurs nowhere else in them, so that two occurrences
    cannot overlap.
    """
    others = "0123456789".replace(first, "")
    return first + "".join(secrets.choice(others) for _ in range(23))


HIDDEN_TEXT = _digits("7")  # stands in front of the number of a hidden text
MARK = _digits("3")  # stands in front of a control token that the template or the job wrote
SHOWN_TOKEN = _digits("5")  # stands in front of a row's control token that the template is shown
_HIDDEN = re.compile(HIDDEN_TEXT + r"(\d{8})")
# HTML that some tokenizers (Gemma) have as added tokens: ordinary text, which opens no turn.
HTML = re.compile(
    "</?(a|b|blockquote|body|br|caption|center|code|div|em|h[1-6r]|head|html|i|li|ol|p|pre|span"
    "|strong|sub|sup|table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)
THINKING = re.compile("think|reason", re.IGNORECASE)
ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function", "model"))
# Keys of a message's part that hold an image and no text.
IMAGE_KEYS = ("image", "image_url", "image_pil")


@dataclass(frozen=True)
class RowText:
    """Finds control tokens in the text of rows, so that they can be sent as ordinary text.

    `controls` are the texts of the tokenizer's control tokens. `fragments` are parts of these texts
    that the chat template around a row's text would complete. `normalize` is the tokenizer's
    normalizer, if it may turn other characters into a control token; `normalized` are the control
    tokens' texts after normalization.
    """

    tokenizer: Tokenizer
    controls: tuple[str, ...]
    fragments: tuple[str, ...] = ()
    normalize: Callable[[str], str] | None = None
    normalized: tuple[str, ...] = ()
    _patterns: dict[str, re.Pattern[str]] = field(default_factory=dict, compare=False, repr=False)

    def with_fragments(self, before: str, after: str) -> RowText:
        """Return a copy that also finds row text that a chat template completes to a control token.

        The template writes `before` in front of row text and `after` behind it.
        """
        parts = {part for text in self.controls for part in _completed(text, before, after)}
        return replace(self, fragments=tuple({*self.fragments, *parts}), _patterns={})

    def control_in(self, request: ChatRequest) -> str | None:
        """Return the first control token in the row's text of a request; None if there is none.

        Text of the job in the request does not count.
        """
        for i, message in enumerate(request.messages):
            if i < request.job_messages:
                continue
            spans = request.job_text if i == len(request.messages) - 1 else ()
            content = message["content"]
            control = (
                self.first_in(content, spans)
                if isinstance(content, str)
                else self._first_of(content)
            )
            if control is None and len(message) > 2:
                others = {k: v for k, v in message.items() if k not in ("role", "content")}
                control = self._first_of(others)
            if control is not None:
                return control
        return self._first_of(request.documents) if request.documents else None

    def bad_role(self, request: ChatRequest) -> str | None:
        """Return the first message role that contains or becomes a control token, or None.

        A role becomes a control token if the chat template writes it as `<|ROLE|>`. Such a role
        must fail its row. In other text, a control token can be hidden from the chat template (see
        `hidden`), but the template must see a role unchanged, because it compares roles with names.
        """
        for message in request.messages[request.job_messages :]:
            role = str(message["role"])
            if role not in ROLES and (self.first_in(role) or role in self._inner):
                return role
        return None

    def first_in(self, text: str, job_spans: Sequence[tuple[int, int]] = ()) -> str | None:
        """Return the first control token, or one of `fragments`, in `text`; None if it has none.

        Matches inside `job_spans`, (start, end) of text that comes from the job, do not count.
        """
        for match in self._pattern.finditer(text):
            if not _is_within(match.span(), job_spans):
                return match.group()
        if self.normalize is None:
            return None
        matches = self._normalized_in(text)
        own = sum(len(self._normalized_in(text[start:stop])) for start, stop in job_spans)
        return matches[0] if len(matches) > own else None

    def hidden(self, request: ChatRequest, keep: re.Pattern[str] | None = None) -> Hidden:
        """Return the request with random digits in place of the control tokens in its row text.

        In the assistant's messages, a control token that matches `keep` stays. The digits
        SHOWN_TOKEN are put in front of it, so that `hide_kept_tokens` finds it.
        """
        texts: list[str] = []

        def hide(match: re.Match[str]) -> str:
            texts.append(match.group())
            return f"{HIDDEN_TEXT}{len(texts) - 1:08d}"

        def hide_others(match: re.Match[str]) -> str:
            shown = keep is not None and keep.search(match.group())
            return SHOWN_TOKEN + match.group() if shown else hide(match)

        def text_of(role: str) -> Callable[[str], str]:
            how = hide_others if role == "assistant" else hide
            return lambda text: self._pattern.sub(how, text)

        return Hidden(self._changed(request, text_of), texts)

    def hide_kept_tokens(self, prompt: str, hidden: list[str]) -> str:
        """Return a rendered prompt with random digits in place of the control tokens left in it.

        The method `hidden` left these tokens of the row in the messages so that the chat template
        sees them. The template may have dropped some. The text of each remaining token is appended
        to the list `hidden`; the digits in its place contain its index in the list.
        """

        def hide(match: re.Match[str]) -> str:
            hidden.append(match[1])
            return f"{HIDDEN_TEXT}{len(hidden) - 1:08d}"

        prompt = re.sub(f"{SHOWN_TOKEN}({self._exact.pattern})", hide, prompt)
        return re.sub(
            rf"\s*{SHOWN_TOKEN}", "", prompt
        )  # a template trims spaces in front of the token

    def neutral(self, request: ChatRequest) -> ChatRequest:
        """Return the request with random digits in place of all row text in its messages.

        All control tokens in its rendered prompt then come from the chat template or the job (see
        `token_from_row`).
        """
        messages: Messages = []
        for i, message in enumerate(request.messages):
            content = message["content"]
            if i >= request.job_messages and isinstance(content, str):
                spans = request.job_text if i == len(request.messages) - 1 else ()
                pieces = self._pieces(content, spans)
                shown = (text if own or not text.strip() else HIDDEN_TEXT for text, own in pieces)
                message = {**message, "content": "".join(shown)}
            messages.append(message)
        return replace(request, messages=messages, job_text=())

    def token_from_row(self, prompt: str, neutral: str) -> str | None:
        """Return a control token that the chat template made from row text; None if it made none.

        Such a token occurs more often in `prompt` than in `neutral`, the rendered prompt of the
        request that the method `neutral` returns. Thinking tokens do not count.
        """
        more = Counter(self._exact.findall(prompt)) - Counter(self._exact.findall(neutral))
        return next((text for text in more if not THINKING.search(text)), None)

    def spaced(self, request: ChatRequest) -> ChatRequest:
        """Return the request with a space after the first character of each control token in rows.

        The tokenizer then sees ordinary text. Used if the tokenizer cannot be copied (`plain`);
        with a copy, the text stays unchanged.
        """

        def spaced(text: str) -> str:
            if self._normalized_in(text) and self.normalize is not None:
                text = self.normalize(text)
            return self._pattern.sub(lambda m: f"{m.group()[:1]} {m.group()[1:]}", text)

        return self._changed(request, lambda role: spaced)

    def marked(self, prompt: str, hidden: Sequence[str]) -> str:
        """Return a rendered prompt in the form that the tokenizer copy `plain` takes.

        Each control token in it gets the prefix MARK. Then the digits are replaced by the row's
        texts, which `hidden` lists.
        """
        marked = self._exact.sub(lambda m: MARK + m.group(), prompt)
        return _HIDDEN.sub(lambda m: hidden[int(m[1])], marked)

    def unhidden(self, prompt: str, hidden: Sequence[str]) -> str:
        """Return a prompt with the digits replaced by the row's texts, which `hidden` lists."""
        return _HIDDEN.sub(lambda m: hidden[int(m[1])], prompt)

    @cached_property
    def plain(self) -> Plain | None:
        """Return a copy of the tokenizer for marked prompts (`Plain`); None if impossible."""
        try:
            return _plain(self.tokenizer, self.controls)
        except Exception as error:  # a tokenizer of another class, or with custom parts
            log.info(
                "cannot copy the tokenizer (%s); control tokens in rows are split with a "
                "space instead",
                error,
            )
            return None

    def _changed(
        self, request: ChatRequest, text_of: Callable[[str], Callable[[str], str]]
    ) -> ChatRequest:
        """Return the request with each row text changed by the function that `text_of` returns.

        `text_of` is called with the role of the text's message, or with "" for a document.
        """
        messages: Messages = []
        for i, message in enumerate(request.messages):
            if i < request.job_messages:
                messages.append(message)
                continue
            change = text_of(str(message["role"]))
            spans = request.job_text if i == len(request.messages) - 1 else ()
            made: Message = {}
            for name, value in message.items():
                if name == "role":
                    made[name] = value
                elif name == "content" and isinstance(value, str):
                    pieces = self._pieces(value, spans)
                    made[name] = "".join(text if own else change(text) for text, own in pieces)
                else:
                    made[change(str(name))] = _each_text(value, change)
            messages.append(made)
        documents = _each_text(request.documents, text_of("")) if request.documents else None
        return replace(request, messages=messages, documents=documents, job_text=())

    def _pieces(
        self, text: str, job_spans: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[str, bool]]:
        """Yield (part of `text`, whether it is a control token that the job wrote), in text order.

        A control token with at least one character from the row is row text.
        """
        at = 0
        if job_spans:
            for match in self._pattern.finditer(text):
                if _is_within(match.span(), job_spans):
                    yield text[at : match.start()], False
                    yield match.group(), True
                    at = match.end()
        yield text[at:], False

    def _first_of(self, value: object) -> str | None:
        return next(filter(None, map(self.first_in, _texts(value))), None)

    def _normalized_in(self, text: str) -> list[str]:
        if self.normalize is None:
            return []
        found: list[str] = self._compiled("normalized", self.normalized).findall(
            self.normalize(text)
        )
        return found

    @property
    def _pattern(self) -> re.Pattern[str]:
        return self._compiled("all", (*self.controls, *self.fragments))

    @property
    def _exact(self) -> re.Pattern[str]:
        return self._compiled("exact", self.controls)

    @cached_property
    def _inner(self) -> frozenset[str]:
        return frozenset(re.sub(r"^\W+|\W+$", "", text) for text in self.controls)

    def _compiled(self, name: str, texts: Sequence[str]) -> re.Pattern[str]:
        if name not in self._patterns:
            longest_first = sorted(texts, key=len, reverse=True)
            self._patterns[name] = re.compile("|".join(map(re.escape, longest_first)))
        return self._patterns[name]


@dataclass(frozen=True)
class Hidden:
    """A request in which random digits replace each control token of its row text.

    `texts` are the replaced control tokens. The digits are HIDDEN_TEXT, then the token's index in
    `texts`.
    """

    request: ChatRequest
    texts: list[str]


@dataclass(frozen=True)
class Plain:
    """A copy of a tokenizer in which the text of each control token begins with MARK.

    Without MARK, a control token's text is encoded as ordinary text. `ids` maps token ids of the
    copy to those of the original tokenizer, where they differ.
    """

    tokenizer: Tokenizer
    ids: Mapping[int, int]

    def tokens(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Encode marked texts; return token ids of the original tokenizer."""
        made = self.tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
        return [self.original(ids) for ids in made]

    def original(self, ids: list[int]) -> list[int]:
        """Convert token ids of this copy to those of the original tokenizer."""
        return [self.ids.get(i, i) for i in ids] if self.ids else list(ids)


@lru_cache(maxsize=8)
def row_text(tokenizer: Tokenizer) -> RowText | None:
    """Return the `RowText` for a tokenizer; None if the tokenizer has no control tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    named = set(getattr(tokenizer, "all_special_tokens", None) or ())
    tokens = [t for t in added.values() if _is_control(t.content, t.special or t.content in named)]
    known = {t.content for t in tokens}
    controls = [t.content for t in tokens]
    controls += [text for text in sorted(named - known) if _is_control(text, True)]
    if not controls:
        return None
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    found = tuple(controls)
    if normalizer is None or not any(t.normalized for t in tokens):
        return RowText(tokenizer, found)
    after = {normalizer.normalize_str(t.content).strip("\u2581 ") for t in tokens if t.normalized}
    return RowText(tokenizer, found, (), normalizer.normalize_str, tuple(filter(None, after)))


def refused(control: str) -> Failure:
    """Return the failure of a row whose text has a control token, which the job refuses."""
    return Failure(
        "prepare",
        "ControlTokenInRow",
        f"the row's text contains {control!r}, a control token of the model's tokenizer. Remove "
        "it from the row, or set prompt.special_tokens_in_rows: split to send it as plain text",
    )


def refused_template(control: str) -> Failure:
    """Return the failure of a row whose text the chat template turns into a control token."""
    return Failure(
        "prepare",
        "ControlTokenInRow",
        f"the chat template turns the row's text into the control token {control!r}. Set a "
        "prompt.chat_template that inserts the text unchanged, without lower or replace",
    )


def refused_role(role: str) -> Failure:
    """Return the failure of a row with a message role that becomes a control token."""
    return Failure(
        "prepare",
        "ControlTokenInRow",
        f"the message role {role!r} becomes a control token in the chat template. Use system, "
        "user, assistant or tool",
    )


def _is_control(text: str, special: bool) -> bool:
    """Return whether an added token is a control token, which steers the model.

    A token with fewer than two characters is not one. Otherwise, a token that the tokenizer calls
    `special` is one. So is any other added token, unless it consists of spaces and words or is an
    HTML tag: tokenizers add such tokens to encode text with fewer tokens.
    """
    bare = text.strip("\u2581 \t\r\n")
    if len(bare) < 2:
        return False
    if special:
        return True
    return not (re.fullmatch(r"[\w\s.,'\u2581-]+", bare) or HTML.fullmatch(bare.lower()))


def _completed(control: str, before: str, after: str) -> Iterator[str]:
    """Yield the parts of a control token that `before` and `after` complete to the whole token.

    For example, `im_end` is such a part of `<|im_end|>` if the template writes `<|` and `|>` around
    it.
    """
    size = len(control)
    starts = [i for i in range(size) if before.endswith(control[:i])]
    stops = [i for i in range(1, size + 1) if after.startswith(control[i:])]
    for start in starts:
        for stop in stops:
            if start < stop and (start, stop) != (0, size):
                yield control[start:stop]


def _is_within(span: tuple[int, int], spans: Sequence[tuple[int, int]]) -> bool:
    return any(start <= span[0] and span[1] <= stop for start, stop in spans)


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in a value that a chat template may print, including names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            if name not in IMAGE_KEYS:
                yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)
    elif not isinstance(value, (bool, int, float, type(None))):
        yield str(value)


def _each_text(value: object, change: Callable[[str], str]) -> Any:
    """Return `value` with every text that `_texts` yields changed by `change`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change(str(name)): inner if name in IMAGE_KEYS else _each_text(inner, change)
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_each_text(inner, change) for inner in value]
    if isinstance(value, (bool, int, float, type(None))):
        return value
    text = str(value)
    changed = change(text)
    return value if changed == text else changed


def _plain(tokenizer: Any, controls: Sequence[str]) -> Plain:
    """Return a copy of the tokenizer in which the text of each control token begins with MARK.

    The control token's own text is then ordinary text. The token is renamed in the vocabulary too,
    and BPE merges with a control token are dropped, so that ordinary text cannot make one. Raises
    TypeError or ValueError if this tokenizer cannot be copied in this way.
    """
    from tokenizers import Tokenizer as Backend

    backend = tokenizer.backend_tokenizer
    value = json.loads(backend.to_str())
    names = {text: MARK + text for text in controls}
    for token in value["added_tokens"]:
        if token["content"] in names:
            token["content"] = names[token["content"]]
            token["single_word"] = False
    model = value["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): i for text, i in vocabulary.items()}
    else:  # Unigram: pieces with their scores
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary or ()]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _joins(pair, names)]
    copied = Backend.from_str(json.dumps(value))
    copied.no_truncation()
    copied.no_padding()
    made = copy.copy(tokenizer)
    made._tokenizer = copied
    if made.backend_tokenizer is not copied or tokenizer.backend_tokenizer is copied:
        raise TypeError("its backend cannot be replaced")
    ids = {copied.token_to_id(marked): backend.token_to_id(text) for text, marked in names.items()}
    if None in ids or None in ids.values():
        raise ValueError("a control token is not in its vocabulary")
    return Plain(made, {new: old for new, old in ids.items() if new != old})


def _joins(pair: str | Sequence[str], names: Mapping[str, str]) -> bool:
    """Return whether a part or the result of a BPE merge is a control token.

    The keys of `names` are the texts of the control tokens.
    """
    left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
    return left in names or right in names or left + right in names
