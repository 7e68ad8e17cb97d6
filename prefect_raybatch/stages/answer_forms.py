"""Checks that each answer has its required form: a choice, JSON, a pattern or a grammar.

The engine should guarantee the form, but a backend that could not build a grammar may end each
answer at once and report `stop`. So each answer is checked here as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import pyarrow as pa

from prefect_raybatch.job.early_stop import choice_of
from prefect_raybatch.spec.request import SamplingFields
from prefect_raybatch.spec.result import ParsingSpec
from prefect_raybatch.stages.block import Failure, Tokenizer
from prefect_raybatch.stages.columns import ANSWERS, REASONING_OPEN, TEXTS
from prefect_raybatch.stages.label_cutoff import grammar_bytes
from prefect_raybatch.stages.schema_check import AnswerMisfit, SchemaCheck
from prefect_raybatch.stages.typed_answers import MAX_ANSWER, MAX_REASON, NOT_VALID

XGRAMMAR_SECONDS = 2.0  # most CPU seconds that xgrammar may take to check one answer
FORM_FIELDS = ("choice", "structured_outputs")
FormCheck = Callable[[str], str | None]
"""Type of functions that return why a text does not have a form, or None if it does."""


@dataclass(frozen=True)
class AnswerForm:
    """The form that a row's answers must have, such as a choice or JSON.

    `name` is the sampling field that sets the form. `misfit` takes a text and returns why it does
    not have the form, or None if it has the form. `labels` are the allowed answers of a choice;
    empty for any other form.
    """

    name: str
    misfit: FormCheck
    labels: frozenset[str] = frozenset()


def own_form(sampling: SamplingFields | None) -> str | None:
    """Return a row's own `choice` and `structured_outputs` as JSON; None if it sets neither."""
    fields = {name: sampling[name] for name in FORM_FIELDS if sampling and name in sampling}
    return json.dumps(fields, sort_keys=True) if fields else None


@lru_cache(maxsize=256)
def form_of(job: str | None, own: str | None) -> AnswerForm | None:
    """Return the form that a row's answers must have; None if any text is valid.

    `job` and `own` are the form fields of the job and of the row, as JSON; the row's fields win.
    """
    fields = {**json.loads(job or "{}"), **json.loads(own or "{}")}
    if labels := choice_of(fields):
        return _choice(frozenset(labels))
    form = fields.get("structured_outputs") or {}
    for kind, value in form.items():
        if value is not None and kind in _MAKERS:
            return AnswerForm(f"structured_outputs.{kind}", _MAKERS[kind](value))
    return None


def not_of_form(form: AnswerForm, why: str, text: str) -> Failure:
    """Return the failure of a row whose answer `text` lacks the form, for the reason `why`."""
    # The answer comes last: only the first COUNTED_CHARACTERS tell reasons apart in failure counts.
    reason = why[:MAX_REASON].encode("utf-8", "replace").decode()
    return Failure(
        "engine",
        NOT_VALID,
        f"the answer does not fit sampling.{form.name}: {reason}. Retry the row. If rows set "
        "forms of their own, choose a backend that supports all of them, e.g. "
        f"engine.structured_outputs_config: {{backend: guidance}}. Answer: {text[:MAX_ANSWER]}",
    )


class Spelling:
    """Checks whether the answers of a block have the required form.

    An answer that does not fit as decoded is checked again as the exact text of its tokens:
    decoding drops leading blanks, and special tokens that may be part of a grammar.
    """

    def __init__(
        self, table: pa.Table, parsing: ParsingSpec | None, tokenizer: Callable[[], Tokenizer]
    ) -> None:
        self._table, self._parsing, self._tokenizer = table, parsing, tokenizer

    def fitted(
        self, form: AnswerForm, shown: str | None, row: int, number: int
    ) -> tuple[str | None, str | None]:
        """Return (the text of an answer, why it does not have the form).

        The answer is number `number` (from 0) of the row with index `row`; `shown` is its decoded
        text. The reason is None if the answer has the form. A label is then returned as it is
        written in the choice. Any other text is returned as `shown`.
        """
        why = form.misfit(shown or "")
        if why is None:
            return shown or "", None
        if self._thinks(row):  # the text begins after the thinking, and blanks there were dropped
            alike = [label for label in form.labels if label.strip() == (shown or "").strip()]
            return (alike[0], None) if shown and len(alike) == 1 else (shown, why)
        # An end token may follow a label (sampling.skip_special_tokens: false).
        if not any(_bare(label) in _bare(shown or "") for label in form.labels or ("",)):
            return shown, why
        for text in self._spelled(row, number):
            if form.misfit(text) is None:
                return (text if form.labels and _bare(text) == _bare(shown or "") else shown), None
        return shown, why

    def _thinks(self, row: int) -> bool:
        if self._parsing is None or not self._parsing.reasoning:
            return False
        if REASONING_OPEN not in self._table.column_names:
            return True
        return bool(self._table[REASONING_OPEN][row].as_py())

    def _spelled(self, row: int, number: int) -> Iterator[str]:
        """Yield up to two texts made from the token ids of answer `number` of row `row`.

        The first text is decoded with special tokens. The second joins the bytes that the engine's
        grammar assigns to each token; it is left out if these bytes are unknown or not UTF-8.
        Neither text has a special token at the end. Yields nothing if vLLM itself detokenized the
        answer.
        """
        if self._table[TEXTS][row].as_py() is not None:
            return
        tokenizer = self._tokenizer()
        ids = self._table[ANSWERS][row][number].as_py()
        ids = ids[:-1] if ids and ids[-1] in tokenizer.all_special_ids else ids
        yield tokenizer.batch_decode([ids], skip_special_tokens=False)[0]
        of_tokens = _bytes_of_tokens(tokenizer)
        if of_tokens is not None:
            with suppress(UnicodeDecodeError, IndexError):
                yield b"".join(of_tokens[token] for token in ids).decode()


def _bare(text: str) -> str:
    return "".join(text.split())


@lru_cache(maxsize=4)
def _bytes_of_tokens(tokenizer: Tokenizer) -> Sequence[bytes] | None:
    return grammar_bytes(tokenizer)


def _choice(labels: frozenset[str]) -> AnswerForm:
    def misfit(text: str) -> str | None:
        return None if text in labels else f"it is not one of the {len(labels)} labels"

    return AnswerForm("choice", misfit, labels)


def _json(schema: object) -> FormCheck:
    check = SchemaCheck(schema if isinstance(schema, str) else json.dumps(schema))

    def misfit(text: str) -> str | None:
        try:
            check(_loaded(text))
        except AnswerMisfit as error:
            return f"at {error.place} ({error.rule}): {error}"
        except RecursionError:
            return "it is nested too deeply"
        return None

    return misfit


def _json_object(_: object) -> FormCheck:
    def misfit(text: str) -> str | None:
        try:
            found = _loaded(text)
        except AnswerMisfit as error:
            return str(error)
        except RecursionError:
            return "it is nested too deeply"
        return None if isinstance(found, dict) else "it is JSON, but not an object"

    return misfit


def _loaded(text: str) -> object:
    try:
        return cast(object, json.loads(text))
    except ValueError as error:
        raise AnswerMisfit("", "JSON", f"it is not JSON: {error}") from None


def _parsed_by(kind: str) -> Callable[[str], FormCheck]:
    def make(value: str) -> FormCheck:
        def misfit(text: str) -> str | None:
            # xgrammar imports torch, so it is asked only if llguidance does not accept the text.
            # Both agree on the empty text.
            verdict = by_llguidance(kind, value)(text)
            if verdict is None or (text and not verdict):
                other = by_xgrammar(kind, value)(text)
                verdict = other if verdict is None else verdict or bool(other)
            return f"it does not match the {kind}" if verdict is False else None

        return misfit

    return make


_MAKERS: dict[str, Callable[[Any], FormCheck]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _parsed_by("regex"),
    "grammar": _parsed_by("grammar"),
    "structural_tag": _parsed_by("structural_tag"),
}
# vLLM enforces grammars with llguidance or xgrammar. They do not agree on every pattern, so a text
# that either accepts may come from the engine.

Matches = Callable[[str], bool | None]
"""Type of functions that return whether a text matches a grammar.

They return None if the grammar's library is not installed or cannot read the grammar.
"""


@lru_cache(maxsize=64)
def by_llguidance(kind: str, value: str) -> Matches:
    """Return a function that returns whether a text matches `value`, checked with llguidance.

    `kind` says what `value` is: "regex", "grammar" or "structural_tag". The function returns None
    for every text if llguidance is missing or cannot use `value`.
    """
    try:
        from llguidance import LLMatcher, LLTokenizer, grammar_from
    except ImportError:
        return _unknown
    if kind == "structural_tag":
        return _unknown
    try:
        matcher = LLMatcher(LLTokenizer("byte"), grammar_from(cast(Any, kind), value))
    except (ValueError, KeyError, TypeError):
        return _unknown
    if matcher.is_error():
        return _unknown

    def matches(text: str) -> bool:
        data = list(text.encode())
        matcher.reset()
        taken = not data or matcher.validate_tokens(data) == len(data)
        return bool(taken and (not data or matcher.consume_tokens(data)) and matcher.is_accepting())

    return matches


@lru_cache(maxsize=64)
def by_xgrammar(kind: str, value: str) -> Matches:
    """Return a function that returns whether a text matches `value`, checked with xgrammar.

    `kind` says what `value` is: "regex", "grammar" or "structural_tag". The function returns None
    if the check takes over XGRAMMAR_SECONDS of CPU time, and for every text if xgrammar is
    missing or cannot use `value`.
    """
    try:
        import xgrammar  # which imports torch, so only where the other library did not match
    except ImportError:
        return _unknown
    try:
        if kind == "regex":
            grammar = xgrammar.Grammar.from_regex(value)
        elif kind == "grammar":
            grammar = xgrammar.Grammar.from_ebnf(value)
        else:
            grammar = xgrammar.Grammar.from_structural_tag(value)
        compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([]))
        compiled = compiler.compile_grammar(grammar)
    except Exception:  # its C++ code raises several classes, for example for another dialect
        return _unknown

    def matches(text: str) -> bool | None:
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        until = time.thread_time() + XGRAMMAR_SECONDS
        for character in text:  # ambiguous patterns take the cube of the text's length
            if time.thread_time() > until:
                return None
            if not matcher.accept_string(character):
                return False
        return bool(matcher.is_terminated())

    return matches


def _unknown(_: str) -> None:
    return None
