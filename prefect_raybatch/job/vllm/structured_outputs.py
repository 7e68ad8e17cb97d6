"""Checks whether vLLM accepts `sampling.structured_outputs` (a form), without importing it.

vLLM checks the form request by request, so a wrong one would fail every row once the engines are
up. `check_form_shape` checks the types; `check_form_parses` asks the two libraries with which vLLM
parses regular expressions, grammars and JSON Schemas, if they are installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from prefect_raybatch.bounded import within
from prefect_raybatch.job.checks import refuse_unknown
from prefect_raybatch.job.schema_limits import check_schema_limits
from prefect_raybatch.job.vllm import fields as vllm_fields
from prefect_raybatch.job.vllm.sampling_ranges import QUOTED

# A form has exactly one of these fields, and any of the FORM_OPTIONS.
FORM_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FORM_OPTIONS = {
    "disable_any_whitespace": bool,
    "disable_additional_properties": bool,
    "whitespace_pattern": str,
}
FORM = "structured_outputs"
GRAMMAR_SECONDS = 30.0  # limit for compiling a grammar; usual ones take 0.1 s


def with_schema_text(sampling: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of sampling fields with a JSON Schema in `structured_outputs` as JSON text.

    A model writes properties in the order of the schema, which text keeps; a mapping would lose it
    in records, keys and Prefect's database. A schema that is no valid JSON stays as it is.
    """
    form = sampling.get(FORM)
    if not isinstance(form, Mapping) or not isinstance(form.get("json"), Mapping):
        return dict(sampling)
    try:
        text = json.dumps(form["json"], ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):  # no JSON: `check_form_parses` says so
        return dict(sampling)
    return {**sampling, FORM: {**form, "json": text}}


def check_form_shape(form: object) -> None:
    """Raise ValueError for `sampling.structured_outputs` that vLLM would reject with any backend.

    The message has the field and the remedy. `form` is the field's plain value, None if it is not
    set. Entries that are None count as not set.
    """
    if form is None:
        return
    if not isinstance(form, Mapping):
        raise ValueError(
            f"{FORM} must be a mapping such as {{regex: '[0-9]+'}}, and is {str(form)[:80]!r}"
        )
    refuse_unknown(form, vllm_fields.form_fields(), {*FORM_KINDS, *FORM_OPTIONS}, f"{FORM}: ", "; ")
    given = {name: value for name, value in form.items() if value is not None}
    kinds = [name for name in FORM_KINDS if name in given]
    if len(kinds) != 1:
        has = " and ".join(kinds) or "none of them"
        raise ValueError(f"{FORM} has {has}; set exactly one of {', '.join(FORM_KINDS)}")
    _check_value(kinds[0], given[kinds[0]])
    for name, kind in FORM_OPTIONS.items():
        if name in given and not isinstance(given[name], kind):
            what = "true or false" if kind is bool else "text"
            raise ValueError(f"{FORM}.{name} must be {what}, and is {str(given[name])[:80]!r}")


def _check_value(kind: str, value: Any) -> None:
    where = f"{FORM}.{kind}"
    if kind == "json_object":
        if value is not True:
            raise ValueError(f"{where} must be true; remove {FORM} to allow any answer")
    elif kind == "choice":
        if not (isinstance(value, (list, tuple)) and value and all(map(_text, value))):
            raise ValueError(
                f"{where} must be a list of text labels ({QUOTED}), and is {str(value)[:80]!r}"
            )
        check_label_texts(value, f"{where}: ")
    elif kind == "json" and isinstance(value, Mapping):
        _check_limits(where, value)
    elif not _text(value):
        or_mapping = " or a mapping" if kind == "json" else ""
        raise ValueError(f"{where} must be text{or_mapping}, and is {str(value)[:80]!r}")
    elif not value.strip():
        raise ValueError(f"{where} is empty; set it, or remove {FORM}")
    elif kind == "regex" and "\0" in value:
        raise ValueError(f"{where} contains a NUL character; remove it")
    elif kind == "json":
        _check_limits(where, _parsed(where, value))
    elif kind == "structural_tag":
        for schema in _schemas_in(_parsed(where, value)):
            _check_limits(where, schema)


def _schemas_in(tag: object) -> Iterator[Mapping[str, Any]]:
    """Yield all JSON Schemas in `tag`, a structural tag as parsed JSON, at any depth."""
    waiting = [tag]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            for name, inner in part.items():
                if name in ("schema", "json_schema") and isinstance(inner, Mapping):
                    yield inner
                else:
                    waiting.append(inner)
        elif isinstance(part, list):
            waiting += part


def _text(value: object) -> bool:
    return isinstance(value, str)


def check_label_texts(labels: Sequence[str], where: str = "") -> None:
    """Raise ValueError for a label that is empty, is not valid Unicode, or appears twice.

    `where` begins the message, such as "structured_outputs.choice: ".
    """
    for number, label in enumerate(labels, 1):
        if not label.strip():
            raise ValueError(
                f"{where}label {number} of {len(labels)} is empty; remove it, or write a label"
            )
        try:
            label.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{where}label {number} of {len(labels)} contains half a surrogate pair, which is "
                "not valid text; remove it"
            ) from None
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        raise ValueError(f"{where}duplicate label {repeated[0]!r}; remove one")


def check_backend(config: object) -> None:
    """Raise ValueError if vLLM cannot load the backend in `engine.structured_outputs_config`.

    lm-format-enforcer 0.11 imports `vllm.transformers_utils.tokenizer`, which vLLM 0.29 lacks.
    """
    if _backend_of(config) == "lm-format-enforcer":
        raise ValueError(
            "structured_outputs_config: vLLM 0.29 cannot load the backend lm-format-enforcer; "
            "remove backend, or choose xgrammar, guidance or outlines"
        )


def check_labels_enforced(labels: Sequence[str], where: str, config: object) -> None:
    """Raise ValueError if the engine's backend would accept an answer that is none of the labels.

    The backend outlines does so if a label is a prefix of another: after it, outlines constrains
    the answer no further. `where` is the field of the labels, `config` is
    `engine.structured_outputs_config`.
    """
    if _backend_of(config) != "outlines":
        return
    for one, other in pairwise(sorted(labels)):
        if other.startswith(one):
            raise ValueError(
                f"{where}: label {other!r} begins with label {one!r}, which the backend outlines "
                "does not support; choose another backend in engine.structured_outputs_config, or "
                "rename a label"
            )


def label_form(labels: Sequence[str]) -> dict[str, Any]:
    """Return the `structured_outputs` that make an answer one of the labels, for any backend.

    That is {"choice": [...]} if all characters are printable and below U+10000, otherwise an
    equivalent {"regex": ...} with escapes. In a choice, other characters fail with some backend.
    vLLM writes them unescaped into a grammar for xgrammar, which rejects a line break; guidance
    fails for such a grammar with a tab; and outlines cannot read emoji or no-break spaces.
    """
    if all(map(_is_plain, "".join(labels))):
        return {"choice": list(labels)}
    longest_first = sorted((label for label in labels if label), key=len, reverse=True)
    branches = "|".join("".join(map(_escaped, label)) for label in longest_first)
    return {"regex": f"({branches})" + ("?" if "" in labels else "")}


def _is_plain(character: str) -> bool:
    return character.isprintable() and character <= "\uffff"


def _escaped(character: str) -> str:
    if character < " " or character == "\x7f":
        return f"\\u{ord(character):04x}"
    return f"\\{character}" if character in '.^$*+?()[]{}|\\/-"' else character


def _check_limits(where: str, schema: object) -> None:
    try:
        check_schema_limits(schema)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _backend_of(config: object) -> str:
    return str(config.get("backend", "auto")) if isinstance(config, Mapping) else "auto"


def _parsed(where: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} must be a JSON object, and begins with {text[:20]!r}")
    return found


def check_form_parses(form: Mapping[str, object] | None, config: object) -> None:
    """Raise ValueError if vLLM's parsers reject a form that `check_form_shape` accepts.

    Checks json, regex and grammar. `config` is `engine.structured_outputs_config`. For the default
    backend (auto), both xgrammar and guidance must reject the form, because vLLM uses the one that
    accepts it. Forms for backends other than these are not checked.
    """
    given = {name: value for name, value in (form or {}).items() if value is not None}
    kind = next((name for name in ("json", "regex", "grammar") if name in given), None)
    if kind is None:
        return
    backend = _backend_of(config)
    said = None
    if backend in ("auto", "guidance"):
        said = guidance_error(kind, given[kind])
    if backend == "xgrammar" or (said and backend == "auto"):
        said = _xgrammar_error(kind, given[kind])
    if said:
        raise ValueError(
            f"{FORM}.{kind}: vLLM cannot compile it to a grammar: {' '.join(said.split())[:400]}"
        )


def guidance_error(kind: str, value: Any, blanks: bool = True) -> str | None:
    """Return why llguidance rejects a form; None if it accepts the form or is not installed.

    `kind` is the field of the form that is set, such as json or regex, and `value` its value. If
    `blanks` is true, JSON answers may have blanks between their parts. Follows the steps of vLLM's
    own check, but takes a hundredth of a second and does not import torch. A form that takes over
    30 s counts as rejected.
    """
    try:
        import llguidance  # noqa: F401
    except ImportError:
        return None
    try:
        return within(GRAMMAR_SECONDS, lambda: _guidance_error(kind, value, blanks))
    except TimeoutError:
        return f"compiling it takes longer than {GRAMMAR_SECONDS:g} s"


def _guidance_error(kind: str, value: Any, blanks: bool) -> str | None:
    from llguidance import LLMatcher, grammar_from

    try:
        if kind == "json":
            grammar = LLMatcher.grammar_from_json_schema(
                value, defaults={"whitespace_flexible": blanks}
            )
        else:
            grammar = grammar_from("regex" if kind == "regex" else "grammar", value)
        return LLMatcher.validate_grammar(grammar, None) or None
    except (ValueError, KeyError, TypeError) as error:
        return str(error)


def _xgrammar_error(kind: str, value: Any) -> str | None:
    """Return why xgrammar rejects a form; None if it accepts the form or is not installed.

    Also None for a grammar in Lark's syntax, which vLLM would convert first. xgrammar imports
    torch, which takes seconds, so callers ask llguidance first.
    """
    if kind == "grammar" and "::=" not in value:
        return None
    try:
        import xgrammar
    except ImportError:
        return None
    try:
        if kind == "json":
            xgrammar.Grammar.from_json_schema(value)
        elif kind == "regex":
            xgrammar.Grammar.from_regex(value)
        else:
            xgrammar.Grammar.from_ebnf(value)
    except Exception as error:  # of its C++, of several classes
        return re.sub(r"^\[[\d:]+\] \S+: ", "", str(error))
    return None
