"""Splits raw answers into thinking, text and tool calls with vLLM's own parsers.

vLLM is imported only if a job names a parser, because the import takes twelve seconds and half a
GiB in each process that prepares or finishes rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.spec.result import ParsingSpec
from prefect_raybatch.stages.block import Failure, Tokenizer
from prefect_raybatch.stages.columns import ANSWERS, POSITION, REASONING_OPEN, SHARD
from prefect_raybatch.stages.row_outcomes import ColumnValues
from prefect_raybatch.stages.vllm import internals

if TYPE_CHECKING:
    from prefect_raybatch.stages.vllm.internals import Parser, ReasoningParser, ToolCall

AnswerText = str | list[str | None] | None  # a row's text; a list if rows have several answers
CALL_TYPE = pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", pa.string())])


def each_text(text: AnswerText) -> list[str | None]:
    """Return `text` as a list: the texts of all answers to a row, or its only one."""
    return [*text] if isinstance(text, list) else [text]


def parsed_types(parsing: ParsingSpec) -> list[tuple[str, pa.DataType]]:
    """Return the names and types of the columns that parsers fill."""
    columns: list[tuple[str, pa.DataType]] = []
    if parsing.reasoning:
        columns.append((parsing.reasoning_column, pa.string()))
    if parsing.tool:
        columns.append((parsing.tool_calls_column, pa.list_(CALL_TYPE)))
    return columns


def reasoning_parser_for(parsing: ParsingSpec, tokenizer: Tokenizer) -> ReasoningParser:
    """Return vLLM's reasoning parser, which tells whether the thinking in a prompt has ended.

    Raises `ConfigError` if the job names no parser, or one that does not work with the tokenizer.
    """
    if parsing.reasoning is None:
        raise ConfigError("output.reasoning_parser is not set")
    quick = internals.quick_tokenizer(tokenizer)
    try:
        return internals.reasoning_parser(parsing.reasoning, quick, parsing.arguments)
    except (RuntimeError, ValueError) as error:  # the tokenizer lacks the parser's marker tokens
        raise ConfigError(
            f"output.reasoning_parser: {parsing.reasoning} does not work with the model's "
            f"tokenizer: {error}"
        ) from None


class Parsers:
    """The vLLM parsers that a job names; they split answers into thinking, text and tool calls.

    The parsers get answers with special tokens in the text. These tokens are then removed from the
    result columns, unless `keep_special` is true.
    """

    def __init__(self, parsing: ParsingSpec, tokenizer: Tokenizer, keep_special: bool = False):
        self.parsing = parsing
        self.tokenizer = tokenizer
        self.special = set(tokenizer.all_special_ids)
        words = sorted(filter(None, tokenizer.all_special_tokens), key=len, reverse=True)
        known = "|".join(map(re.escape, words))
        self._words = re.compile(known) if known and not keep_special else None

    def visible(self, ids: Sequence[int]) -> Sequence[int]:
        """Return an answer's token ids without a special token at the end."""
        return ids[:-1] if len(ids) and ids[-1] in self.special else ids

    def split_answers(
        self,
        table: pa.Table,
        texts: list[AnswerText],
        failures: list[Failure | None],
    ) -> tuple[list[AnswerText], list[ColumnValues]]:
        """Return each row's text without thinking and tool calls, and its other parsed columns.

        Rows with an entry in `failures` are not parsed: their text is unchanged, and they get no
        columns. If a text cannot be parsed, the row's entry in `failures` is set. If a parser
        cannot be imported, the error of the import is raised.
        """
        _ = self._open, self._closed  # raises here, not in a row, if a parser cannot be imported
        ids = table[ANSWERS].to_pylist()
        opened = (
            table[REASONING_OPEN].to_pylist()
            if REASONING_OPEN in table.column_names
            else [True] * len(ids)
        )
        places = zip(table[SHARD].to_pylist(), table[POSITION].to_pylist(), strict=True)
        names = [f"{shard:x}-{position:x}" for shard, position in places]

        def made(i: int) -> ColumnValues:
            text = texts[i]
            if not isinstance(text, list):
                return self.parse(text or "", ids[i][0], opened[i], names[i])
            found = [
                self.parse(one or "", own, opened[i], f"{names[i]}-{number}")
                for number, (one, own) in enumerate(zip(text, ids[i], strict=True))
            ]
            return {name: [one[name] for one in found] for name in found[0]}

        left, beside = list(texts), [ColumnValues() for _ in texts]
        for i, failure in enumerate(failures):
            if failure is None:
                try:
                    beside[i] = made(i)
                    left[i] = beside[i].pop("")
                except Exception as why:
                    failures[i] = Failure.of("postprocess", why)
        return left, beside

    def parse(self, text: str, ids: Sequence[int], opened: bool, name: str) -> ColumnValues:
        """Return an answer's parsed columns by name; the remaining text has the name "".

        `ids` are the answer's token ids. `opened`: the answer may begin with thinking. A tool call
        for which the model sets no id gets the id "call-{name}-{number}".
        """
        make = self._open if opened else self._closed
        reasoning: str | None = None
        content: str | None = text
        calls: Sequence[ToolCall] | None = None
        if make is not None:
            parser, request = make()
            reasoning, content, calls = parser.parse(text, request, True, list(ids))
        thinks = opened and self.parsing.reasoning is not None
        found: ColumnValues = {"": self._shown(content, thinks, answer=True)}
        if self.parsing.reasoning:
            found[self.parsing.reasoning_column] = self._shown(reasoning, thinks)
        if self.parsing.tool:
            found[self.parsing.tool_calls_column] = [
                {
                    # A random id would differ each time the shard is finished.
                    "id": call.id
                    if call.id and not call.id.startswith(internals.RANDOM_ID)
                    else f"call-{name}-{number}",
                    "name": call.name,
                    "arguments": call.arguments,
                }
                for number, call in enumerate(calls or ())
            ]
        return found

    def _shown(self, text: str | None, thinks: bool, answer: bool = False) -> str | None:
        """Return the text without special tokens, unless `keep_special` is set; None for None.

        `thinks`: the model thinks before it answers. Whitespace around the text is then removed
        too. If the text is the `answer`, only the whitespace before it is removed.
        """
        if text is None:
            return None
        if self._words is not None:
            text = self._words.sub("", text)
        if thinks:
            text = text.lstrip() if answer else text.strip()
        return text

    @cached_property
    def _quick(self) -> Tokenizer:
        return internals.quick_tokenizer(self.tokenizer)

    @cached_property
    def _open(self) -> Callable[[], tuple[Parser, object]] | None:
        return self._maker(self.parsing.reasoning)

    @cached_property
    def _closed(self) -> Callable[[], tuple[Parser, object]] | None:
        # A reasoning parser would take all of an answer without thinking for thinking.
        return self._maker(None)

    def _maker(self, reasoning: str | None) -> Callable[[], tuple[Parser, object]] | None:
        given = self.parsing
        if reasoning is None and given.tool is None:
            return None
        return internals.parser_maker(
            reasoning, given.tool, self._quick, given.tools, given.arguments
        )
