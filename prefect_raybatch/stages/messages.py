"""Makes chat messages from a row, by a template or a user's function."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prefect_raybatch.job.vllm.structured_outputs import with_schema_text
from prefect_raybatch.spec.request import PromptSpec, SamplingFields
from prefect_raybatch.stages.block import Failure, Messages, Row, copied
from prefect_raybatch.stages.calls.isolated import NoChild

Document = Row  # a document for a chat template: texts by name, such as title and text


@dataclass(frozen=True)
class ChatRequest:
    """Chat messages of one row, the sampling fields that it sets, and documents for its template.

    `images`: the SHA-256 of each of its images in the order of fetching, None for text alone or if
    not yet known.

    `raw`: the text of the messages is the whole prompt, without a chat template.

    `job_messages` and `job_text` mark text that comes from the job and not from the row: the first
    `job_messages` messages, and spans (start, end; in characters) of the last message.
    """

    messages: Messages
    sampling: SamplingFields | None = None
    documents: list[Document] | None = None
    images: tuple[str, ...] | None = None
    raw: bool = False
    job_messages: int = field(default=0, compare=False, repr=False)
    job_text: tuple[tuple[int, int], ...] = field(default=(), compare=False, repr=False)

    def under(self, system: str) -> ChatRequest:
        """Return the request with a system message prepended, unless it begins with one."""
        if self.messages[0]["role"] == "system":
            return self
        messages = [{"role": "system", "content": system}, *self.messages]
        return replace(self, messages=messages, job_messages=1)

    def with_content(self, index: int, start: int, stop: int) -> ChatRequest:
        """Return the request with message `index` cut to its characters [start, stop)."""
        messages = list(self.messages)
        content = messages[index]["content"][start:stop]
        messages[index] = {**messages[index], "content": content}
        spans = self.job_text
        if index == len(messages) - 1:
            moved = ((max(a, start) - start, min(b, stop) - start) for a, b in spans)
            spans = tuple((a, b) for a, b in moved if a < b)
        return replace(self, messages=messages, job_text=spans)

    def continued(self) -> ChatRequest:
        """Return the request itself; raise ValueError if its last message is not the assistant's.

        With `prompt.continue_final_message`, the answer continues that message.
        """
        role = self.messages[-1]["role"]
        if role != "assistant":
            raise ValueError(
                f"the last message has role {role!r}, but prompt.continue_final_message continues "
                "a message of the assistant. End the messages with one"
            )
        return self

    def answer(self, most: int) -> int:
        """Return the request's limit of output tokens: its own max_tokens, or `most`, the job's."""
        own = (self.sampling or {}).get("max_tokens")
        return own if isinstance(own, int) else most


class Filler:
    """Fills the prompt template: called with {column: text} of a row, it returns the request.

    A call raises ValueError for a null (None), unless `prompt.on_null` is "empty". Values are
    texts, as from `cell_texts`, so that a template cannot reach attributes of Python objects.
    """

    def __init__(self, template: str, prompt: PromptSpec):
        self.parts = _joined(string.Formatter().parse(template))
        self.system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        self.empty = prompt.on_null == "empty"

    def __call__(self, row: dict[str, str | None]) -> ChatRequest:
        text: list[str] = []
        spans, at = [], 0
        for literal, name in self.parts:
            if literal:
                text.append(literal)
                spans.append((at, at := at + len(literal)))
            if name is not None:
                value = row[name]
                if value is None and not self.empty:
                    raise ValueError(
                        f"column {name} is null; clean the input or set prompt.on_null: empty"
                    )
                text.append(value or "")
                at += len(text[-1])
        messages = [*self.system, {"role": "user", "content": "".join(text)}]
        return ChatRequest(messages, job_messages=len(self.system), job_text=tuple(spans))


def _joined(
    parts: Iterable[tuple[str, str | None, str | None, str | None]],
) -> list[tuple[str, str | None]]:
    """Return the pairs (literal text, name of the column inserted after it) of a template.

    The name is None after the last text. `parts` come from `string.Formatter.parse`. Adjacent
    literals are joined.
    """
    joined: list[tuple[str, str | None]] = []
    literal = ""
    for text, name, _, _ in parts:
        literal += text
        if name is not None:
            joined.append((literal, name))
            literal = ""
    return [*joined, (literal, None)] if literal else joined


def from_function(
    function: Callable[[Row], object],
    check: Callable[[SamplingFields], None],
    row: Row,
    *,
    raw: bool = False,
) -> ChatRequest:
    """Call a prompt function with a row and return the request that it makes.

    The function returns a text, a list of messages or {messages, sampling}. Only with `raw` may it
    return {prompt, sampling}, because nothing protects such a prompt from control tokens in the
    row. Raises TypeError for any other result. `check` is called with the row's sampling fields and
    raises for those that a row must not set.
    """
    made = function(row)
    if isinstance(made, str):
        return ChatRequest([{"role": "user", "content": made}])
    if raw and isinstance(made, dict) and isinstance(text := made.get("prompt"), str):
        message = {"role": "user", "content": text}
        return ChatRequest([message], _sampling(made.get("sampling"), check), raw=True)
    if isinstance(made, dict) and "messages" in made:
        unknown = sorted(set(made) - {"messages", "sampling"})
        if unknown:
            raise TypeError(
                f"prompt.function returned unknown keys {', '.join(unknown)}; return messages "
                "and sampling only"
            )
        messages = _messages(made["messages"], "its 'messages' are")
        return ChatRequest(messages, _sampling(made.get("sampling"), check))
    return ChatRequest(_messages(made, "it returned"))


def _sampling(value: object, check: Callable[[SamplingFields], None]) -> SamplingFields | None:
    if value is not None and not isinstance(value, dict):
        raise TypeError(
            f"prompt.function must return sampling as a dict, not {type(value).__name__}"
        )
    # The fields travel as JSON, so values that JSON cannot hold fail their row here. The copy also
    # protects against a function that changes its dict later.
    made: SamplingFields | None = json.loads(json.dumps(value))
    if made:
        check(made)
        made = with_schema_text(made)
    return made


def _messages(value: object, what: str) -> Messages:
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or not value
        or not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value)
    ):
        raise TypeError(
            "prompt.function must return text, a list of {'role', 'content'} messages, or "
            f"{{'messages': ..., 'sampling': ...}}; {what} {_kind(value)}"
        )
    for message in value:
        # a chat template would print a value of any type
        if not isinstance(message["content"], (str, list)):
            kind = type(message["content"]).__name__
            raise TypeError(
                f"prompt.function returned a message with content of type {kind}; return text"
            )
    return [copied(m) for m in value]


def plain_prompt(messages: Messages) -> str:
    """Return the texts of all messages as one prompt, for a model or an API without a chat.

    Text parts of a message are joined by newlines, as in vLLM. Raises ValueError if a message has
    other parts.
    """
    return "\n\n".join(_plain_text(message["content"]) for message in messages)


def _plain_text(content: object) -> str:
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        for part in (content if isinstance(content, list) else [content])
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            "a message has content parts that are not text, which only a chat takes. Return text"
        )
    return "\n".join(map(str, texts))


def _kind(value: object) -> str:
    """Return the type of a value for an error message; for a dict, with its first keys."""
    if isinstance(value, dict):
        keys = ", ".join(repr(str(key))[:40] for key in list(value)[:5]) or "none"
        return f"a dict with the keys {keys}"
    return "an empty list" if isinstance(value, list) and not value else type(value).__name__


def guarded(make: Callable[..., ChatRequest], *args: Any) -> ChatRequest | Failure:
    """Return `make(*args)`, or a `Failure` if it raises an error other than `NoChild`.

    If the last argument is a `Failure`, return that.
    """
    if isinstance(args[-1], Failure):
        return args[-1]
    try:
        return make(*args)
    except NoChild:  # the function's process did not start, which is no fault of the row
        raise
    except Exception as error:
        return Failure.of("prepare", error)
