"""Explains what is wrong with a job, a line for each fault: field, what is wrong, what to write."""

from __future__ import annotations

import datetime
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from operator import itemgetter
from types import UnionType
from typing import Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from prefect_raybatch.job.checks import nearest
from prefect_raybatch.job.secrets import hide_users
from prefect_raybatch.yaml_text import NO_TEXT, YamlText

FieldPlace = tuple[int | str, ...]  # names of fields and numbers in lists, from the top
HIDDEN = {"options", "env", "hf_token", "key"}  # fields whose values are not shown
NO_GROUP = ("model_type", "model_attributes_type", "dataclass_type")
YES_OR_NO = {True: ("true", "yes, on and true", "yes"), False: ("false", "no, off and false", "no")}

# What a value must be, by the type of pydantic's error; its context fills in the limits.
MUST_BE = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "enum": "{expected}",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number with fewer digits",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_long": "at most {max_length} characters long",
    "string_too_short": "at least {min_length} characters long",
    "too_long": "a list of at most {max_length} values",
    "too_short": "a list of at least {min_length} values",
    "tuple_type": "a list",
}
_MUST = "must be "


def explain(
    error: ValidationError | None,
    model: type[BaseModel],
    where: str,
    text: YamlText = NO_TEXT,
    more: Mapping[FieldPlace, str] | None = None,
) -> str:
    """Return the errors in a job as lines that name the field, what is wrong, and the value.

    `error` is pydantic's, about the class `model`; `more` maps paths of fields to further errors.
    `where` begins each line. `text` is the job file, for line numbers and for values as written.
    """
    found = [] if error is None else error.errors(include_url=False)
    items = [(item, *_place(model, item["loc"])) for item in found]
    told: dict[FieldPlace, list[str]] = {place: [fault] for place, fault in (more or {}).items()}
    misspelt = {
        (*place[:-1], near)
        for item, place, kind, _ in items
        if item["type"] == "extra_forbidden" and (near := _nearest_name(place, kind)) is not None
    }
    for item, place, kind, branch in items:
        if item["type"] == "missing" and place in misspelt:
            continue  # the line about the misspelt field says it
        deeper = any(len(p) > len(place) and p[: len(place)] == place for _, p, _, _ in items)
        if branch and deeper:  # another type fits better, and has an error inside
            continue
        told.setdefault(place, []).append(_message(item, place, kind, text))
    lines: list[tuple[int, str]] = []
    for place, messages in told.items():
        quote = [message for message in messages if "; quote it" in message]
        for message in quote[0].splitlines() if quote else _joined(messages):
            number = _line_of(message, place, text)
            line = None if number is None else f"line {number}"
            told_of = ".".join(map(str, place))
            lines.append((number or 0, ": ".join(filter(None, (where, line, told_of, message)))))
    return "\n".join(dict.fromkeys(line for _, line in sorted(lines, key=itemgetter(0))))


def _line_of(message: str, place: FieldPlace, text: YamlText) -> int | None:
    """Return the number of the line in `text` that a message about `place` refers to.

    If the message begins with the name of a field inside `place`, this is the line of that field.
    None if unknown.
    """
    first = re.match(r"\w+(\.\w+)*", message)
    inner = (*place, *first[0].split(".")) if first else place
    around, named = text.line(place), text.line(inner)
    return around if named is None else named


def _joined(messages: list[str]) -> Iterator[str]:
    """Yield the lines of the messages about one field, joined with "or", the value quoted once.

    For example "must be a number or a list (value: ...)" for a union.
    """
    value = messages[-1][messages[-1].find(" (value: ") :] if " (value: " in messages[-1] else ""
    plain = [message.removesuffix(value) for message in messages]
    first, *others = dict.fromkeys(plain)
    if first.startswith(_MUST) and not any(";" in message for message in plain):
        others = [other.removeprefix(_MUST) for other in others]
    yield from (" or ".join([first, *others]) + value).splitlines()


def _message(item: ErrorDetails, place: FieldPlace, kind: object, text: YamlText) -> str:
    last = str(place[-1]) if place else ""
    given, told = item.get("input"), item["type"]
    hidden = bool({*item["loc"]} & HIDDEN)
    message: str = hide_users(_fault(item))
    if told == "extra_forbidden":
        return f"unknown field{nearest(last, _names(kind))}"
    if told == "missing":
        return "is required"
    if told in NO_GROUP and isinstance(kind, type):
        return _no_group(last, kind, given)
    if told == "string_type":
        return _no_text(given, None if hidden else text.words(place), hidden)
    is_single = isinstance(given, (str, int, float)) and not isinstance(given, bool)
    if told == "list_type" and is_single and not hidden:
        if isinstance(given, str):
            return f"must be a list and is text; write {last}: [{_short(given)!r}]"
        return f"must be a list and is a single value; write {last}: [{_short(given)}]"
    if hidden or isinstance(given, (dict, BaseModel)):
        return message
    if told in ("less_than", "less_than_equal") and _is_percentage(item, given):
        message += f"; for {given:g} %, write {last}: {float(given) / 100:g}"
    shown = hide_users(_short(given))
    shown = repr(shown) if isinstance(given, str) else " ".join(shown.split())
    return f"{message} (value: {shown})"


def _is_percentage(item: ErrorDetails, given: object) -> bool:
    """Return whether `given`, a value over its limit 1, may be a percentage."""
    limits = item.get("ctx", {})
    is_share = 1 in (limits.get("lt"), limits.get("le"))
    return is_share and isinstance(given, (int, float)) and 2 <= given <= 100


def _fault(item: ErrorDetails) -> str:
    """Return what is wrong with a value: the text in MUST_BE, or else the message of the check."""
    needed = MUST_BE.get(item["type"])
    if needed is None:
        text: str = item["msg"].removeprefix("Value error, ")
        return text
    if item["type"] in ("string_too_short", "too_short") and item["ctx"]["min_length"] == 1:
        return "is empty; set it, or remove it"
    limits = {
        name: f"{limit:,g}" if isinstance(limit, float) else limit
        for name, limit in item.get("ctx", {}).items()
    }
    return _MUST + needed.format(**limits)


def _nearest_name(place: FieldPlace, kind: object) -> str | None:
    """Return the field of the group `kind` whose name is most like the end of `place`, or None."""
    close = get_close_matches(str(place[-1]), sorted(_names(kind)), n=1)
    return close[0] if close else None


def _no_group(name: str, kind: type[BaseModel], given: object) -> str:
    """Return the message about a value `given` that is not a mapping of the fields of `kind`.

    `name` is the last part of the path of that group of fields.
    """
    first, field = next(iter(kind.model_fields.items()))
    kinds = (field.annotation, *get_args(field.annotation))
    taken = isinstance(given, str) and (str in kinds or given in kinds)
    shown = repr(hide_users(_short(given))) if taken else "..."
    label = f"- {{{first}: {shown}}}" if name.isdecimal() else f"{name}: {{{first}: {shown}}}"
    if given is None:
        return f"is empty; write its fields indented below it, such as {label}, or remove it"
    if hasattr(given, "columns"):
        return (
            f"must be a mapping and is a {type(given).__name__}; call ask(...) for data in memory"
        )
    what = "text" if isinstance(given, str) else "a list" if isinstance(given, list) else "a value"
    return f"must be a mapping and is {what}; write {label}"


def _no_text(given: object, written: str | None, hidden: bool) -> str:
    """Return the message about a value that must be text, but which YAML read as something else.

    `given` is what YAML read. `written` is the original text, or None if it is unknown. If `hidden`
    is true, the message does not quote the value.
    """
    if isinstance(given, dict):
        return "must be text and is a mapping; put quotes around text that begins with {"
    if isinstance(given, (list, tuple)):
        return "must be text and is a list; put quotes around text that begins with ["
    if given is None and not written:
        return "must be text and is empty; set it, or remove the field"
    if isinstance(given, bool):
        read, several, one = YES_OR_NO[given]
    elif isinstance(given, (int, float)):
        read, several, one = "a number", "digits", str(given)
    elif isinstance(given, datetime.date):
        read, several, one = "a date", "dates", str(given)
    else:
        read, several, one = ("no value", "null and ~", "null") if given is None else ("", "", "")
    if not read:
        return f"must be text and is of type {type(given).__name__}; write text"
    if hidden:
        return f"must be text and is {read}; quote it"
    if written is not None:
        return f"YAML reads {written} without quotes as {read}; quote it: '{written}'"
    return f"must be text and is {read}; quote it: '{one}' (YAML reads {several} as {read})"


def _place(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[FieldPlace, object, bool]:
    """Return (path, type, is_branch) for the location `loc` of a pydantic error.

    The path is as a user writes it, without pydantic's names for members of unions. The type is
    what is expected there; for an unknown field, the class of its group. `is_branch` is true if
    `loc` ends with the name of a union's member.
    """
    kind: object = model
    names: list[int | str] = []
    branch = False
    for part in loc:
        options = _options(kind)
        branch = len(options) > 1
        if branch:
            kind = next((one for one in options if _label(one) == _label_of(str(part))), None)
            continue
        kind = options[0] if options else None
        names.append(part)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            fields = {field.alias or name: field for name, field in kind.model_fields.items()}
            found = fields.get(str(part)) or kind.model_fields.get(str(part))
            kind = found.annotation if found else kind
        elif get_origin(kind) is list:
            kind = get_args(kind)[0]
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
    options = _options(kind)
    return tuple(names), options[0] if len(options) == 1 else kind, branch


def _options(kind: object) -> list[object]:
    """Return the members of a union except None; for any other type, return [`kind`]."""
    if get_origin(kind) in (Union, UnionType):
        return [one for one in get_args(kind) if one is not type(None)]
    return [kind]


def _label(kind: object) -> str:
    origin = get_origin(kind) or kind
    return "literal" if origin is Literal else str(getattr(origin, "__name__", ""))


def _label_of(part: str) -> str:
    return part.partition("[")[0].removeprefix("constrained-")


def _names(kind: object) -> set[str]:
    """Return the names of all fields of a group; empty if `kind` is no group."""
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return set()
    return {field.alias or name for name, field in kind.model_fields.items()}


def _short(value: object) -> str:
    """Return at most 80 characters of a value, which YAML aliases may expand to billions."""
    if isinstance(value, str):
        return value[:80]
    brief = reprlib.Repr()
    brief.maxlevel = 2
    return (brief.repr(value) if isinstance(value, (list, dict)) else str(value))[:80]
