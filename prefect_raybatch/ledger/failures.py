"""Reasons why rows failed, or were lost with an engine or node, as objects and as record text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from prefect_raybatch.errors import EngineStartError, RayBatchError, error_class, is_transient
from prefect_raybatch.ledger.strict import Count

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_LOSS = re.compile(r"([A-Za-z_]\w*): (.*)\Z", re.DOTALL)

COUNTED_CHARACTERS = 120  # characters of a message by which failed rows are counted
SURE = 100  # of these, the first characters, which stay even if numbers in the message grow longer
ENGINE_DIED = "EngineDied"
ENGINES_DIED = "EnginesDied"  # no single unit is to blame: engines died until the pass was given up
STARTED_AND_DIED = "EngineStartDied"  # likewise: an engine died as it started, again and again
BLOCK_HUNG = "BlockHung"
IMAGE_UNAVAILABLE = "ImageUnavailable"  # the class of a failed row whose image may come later
FEW_ALONE = 16  # units that a pass surely tries one at a time before engines are given up


@dataclass(frozen=True)
class Loss:
    """The reason why rows were lost in a stage, with neither an answer nor an error of their own.

    `kind` is the name of an error class, or "" if unknown. `fatal`: it would happen again, so the
    run stops. `counted`: the engine death that caused it was counted elsewhere (with another lost
    block, or when an actor's process ended), so it must not be counted again.
    """

    kind: str
    message: str
    fatal: bool = False
    counted: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Loss:
        """Return the loss that an error causes; it is fatal unless the error is transient."""
        return cls(type(error).__name__, str(error), not is_transient(error))

    @classmethod
    def parse(cls, text: str, fatal: bool = False) -> Loss:
        """Return the loss whose `str` is `text`, which is `KIND: message` or only a message."""
        match = _LOSS.match(text)
        return cls(match[1], match[2], fatal) if match else cls("", text, fatal)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.kind else self.message

    def to_error(self) -> RayBatchError:
        """Return the error that ends a run if the loss is fatal.

        Its class is kept if it is an error of this package; any other becomes `EngineStartError`.
        """
        kind = error_class(self.kind)
        return kind(self.message) if kind else EngineStartError(f"the engine cannot work: {self}")

    @property
    def is_death(self) -> bool:
        """Return whether the rows were lost because an engine died."""
        return self.kind == ENGINE_DIED

    @property
    def may_be_caused_by_row(self) -> bool:
        """Return whether one of the rows may have killed the engine or made the stage hang."""
        return self.kind in (ENGINE_DIED, BLOCK_HUNG)


NODE_LOST = Loss("NodeLost", "a cluster node was lost, with the tasks and objects on it")


@dataclass(frozen=True)
class FailureKey:
    """The key by which failed rows are counted: stage, error class and message."""

    stage: str
    error: str = ""
    message: str = ""

    @classmethod
    def parse(cls, text: str) -> FailureKey:
        """Return the key whose `str` is `text`; text without "|" becomes the stage."""
        return cls(*text.split("|", 2))

    def __str__(self) -> str:
        return f"{self.stage}|{self.error}|{self.message}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls.parse, handler.generate_schema(str))


def counted_message(message: str) -> str:
    """Return a message cut to COUNTED_CHARACTERS characters, as the message of a `FailureKey`."""
    return (
        message if len(message) <= COUNTED_CHARACTERS else f"{message[: COUNTED_CHARACTERS - 3]}..."
    )


Failures = Mapping[FailureKey, Count]
"""Numbers of failed rows by reason."""


def add_failures(parts: Iterable[Failures]) -> Counter[FailureKey]:
    """Return the sum of failure counts by key."""
    total: Counter[FailureKey] = Counter()
    for part in parts:
        total.update(part)
    return total


def alike(failures: Failures) -> Counter[FailureKey]:
    """Merge failure counts whose keys differ only in the numbers in their messages.

    If a message may have been cut, only its first SURE characters are compared. `_in_common` makes
    the message of the merged key.
    """
    groups: dict[tuple[str, str, str], list[FailureKey]] = {}
    for key in failures:
        pattern = _NUMBER.sub("N", key.message)
        if len(key.message) >= COUNTED_CHARACTERS:  # cut off; where depends on numbers' lengths
            pattern = pattern[:SURE]
        groups.setdefault((key.stage, key.error, pattern), []).append(key)
    total: Counter[FailureKey] = Counter()
    for keys in groups.values():
        message = _in_common([key.message for key in keys])
        total[replace(keys[0], message=message)] += sum(failures[key] for key in keys)
    return total


def _in_common(messages: Sequence[str]) -> str:
    """Return one message for several that differ only in numbers or in where they were cut.

    Each number that differs becomes `N`. If the messages were cut at different places, every number
    becomes `N` and only the first SURE characters stay.
    """
    if len(messages) == 1:
        return messages[0]
    words = [_NUMBER.split(message) for message in messages]
    if any(one != words[0] for one in words):
        return _NUMBER.sub("N", messages[0])[:SURE] + "..."
    numbers = zip(*map(_NUMBER.findall, messages), strict=True)
    kept = [column[0] if len(set(column)) == 1 else "N" for column in numbers]
    return "".join(word + number for word, number in zip(words[0], [*kept, ""], strict=True))


def failure_texts(failures: Failures) -> dict[str, int]:
    """Return failure counts as records hold them: {"stage|class|message": rows}."""
    texts: dict[str, int] = {}
    for key, rows in failures.items():
        text = str(key)
        texts[text] = texts.get(text, 0) + rows
    return texts
