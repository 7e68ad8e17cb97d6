"""Validates values with a JSON Schema in bounded time.

Schema and answer are both untrusted: a pattern may backtrack forever, and unions that refer to
themselves take exponential time. A value whose check takes more than `SECONDS` of CPU time is
rejected; on a busy node, the check may last longer.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prefect_raybatch.job.schema_limits import parts_of

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

SchemaPart = Mapping[str, Any]  # a part of a JSON Schema
Errors = Iterator["ValidationError"]
# A rule of jsonschema, for one keyword.
Rule = Callable[["Validator", Any, Any, SchemaPart], Errors | None]
SECONDS = 10.0  # CPU time limit for one value; usual schemas take less than a millisecond


class AnswerMisfit(ValueError):
    """Why an answer does not fit a schema: where in the answer (`place`), and by which `rule`.

    A place is a path such as `.items[0]`. A rule is a keyword of JSON Schema, or a word such as
    "JSON", "time" or "check" for another fault.
    """

    def __init__(self, place: str, rule: str, message: str):
        super().__init__(message)
        self.place, self.rule = place or "its root", rule


class SchemaCheck:
    """Validates values against a JSON Schema (as text), one at a time."""

    def __init__(self, schema: str):
        from jsonschema.validators import Draft202012Validator, extend, validator_for
        from referencing import Registry

        self.schema = json.loads(schema)
        self._limit = threading.local()  # each thread has its own CPU time
        kind = validator_for(self.schema, default=Draft202012Validator)
        for _, part in parts_of(self.schema):
            part.pop("$schema", None)  # with it, jsonschema would use its own class for the part
        timed = {name: self._timed(rule) for name, rule in kind.VALIDATORS.items()}
        timed["pattern"] = self._pattern
        timed["uniqueItems"] = self._unique_items
        timed["patternProperties"] = self._pattern_properties
        if "additionalProperties" in timed:
            timed["additionalProperties"] = self._additional(timed["additionalProperties"])
        # An empty registry: references are never fetched.
        self._validator = extend(kind, timed)(self.schema, registry=Registry())

    def __call__(self, value: object) -> None:
        """Raise `AnswerMisfit` if the value does not fit the schema.

        Also raise it if the check takes too long, or if the schema refers to a definition that it
        lacks.
        """
        from jsonschema.exceptions import best_match
        from referencing.exceptions import Unresolvable

        self._limit.until = time.thread_time() + SECONDS
        try:
            if self._validator.is_valid(value):
                return
            error = best_match(self._validator.iter_errors(value))
        except Unresolvable as missing:
            raise AnswerMisfit(
                "", "$ref", f"the schema refers to {missing.ref!r}, which it does not define"
            ) from None
        except (AnswerMisfit, RecursionError, MemoryError):
            raise
        except Exception as failure:  # jsonschema cannot check this value, e.g. 10 ** 309
            raise AnswerMisfit(
                "", "check", f"it cannot be checked: {type(failure).__name__}: {failure}"
            ) from None
        place = "".join(f"[{n}]" if isinstance(n, int) else f".{n}" for n in error.absolute_path)
        raise AnswerMisfit(place, str(error.validator), error.message)

    def _left(self, rule: str) -> float:
        """Return the CPU seconds left to check the value.

        Raise `AnswerMisfit` if none are left; `rule` names the rule under check.
        """
        left: float = self._limit.until - time.thread_time()
        if left <= 0:
            raise self._late(rule)
        return left

    def _late(self, rule: str) -> AnswerMisfit:
        return AnswerMisfit(
            "",
            rule,
            f"the check against the schema took over {SECONDS:g} s. Simplify the schema",
        )

    def _timed(self, rule: Rule) -> Rule:
        def checked(validator: Validator, value: Any, instance: Any, schema: SchemaPart) -> Errors:
            self._left("time")
            yield from rule(validator, value, instance, schema) or ()

        return checked

    def _matches(self, pattern: str, text: str) -> bool:
        """Return whether a pattern occurs in a text; True if `regex` cannot compile the pattern.

        Raises `AnswerMisfit` if the search takes too long.
        """
        import regex

        try:
            found = regex.search(pattern, text, timeout=self._left("pattern"))
        except TimeoutError:
            raise self._late("pattern") from None
        except regex.error:
            return True
        return found is not None

    def _pattern(self, validator: Validator, pattern: str, instance: Any, _: object) -> Errors:
        from jsonschema.exceptions import ValidationError

        if validator.is_type(instance, "string") and not self._matches(pattern, instance):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")

    def _unique_items(self, validator: Validator, unique: bool, instance: Any, _: object) -> Errors:
        """Compare items by their JSON text: the time of jsonschema's rule is quadratic in items."""
        from jsonschema.exceptions import ValidationError

        self._left("time")
        if not unique or not validator.is_type(instance, "array"):
            return
        texts = {json.dumps(_whole_as_int(item), sort_keys=True) for item in instance}
        if len(texts) < len(instance):
            yield ValidationError(f"{instance!r} has non-unique elements")

    def _pattern_properties(
        self, validator: Validator, patterns: SchemaPart, instance: Any, _: object
    ) -> Errors:
        if not validator.is_type(instance, "object"):
            return
        for pattern, part in patterns.items():
            for name, value in instance.items():
                if self._matches(pattern, name):
                    yield from validator.descend(value, part, path=name, schema_path=pattern)

    def _additional(self, rule: Rule) -> Rule:
        """Return a version of `rule`, the check of additionalProperties, that takes bounded time.

        It leaves out properties that match patternProperties, before `rule` is called.
        """

        def checked(validator: Validator, value: Any, instance: Any, schema: SchemaPart) -> Errors:
            patterns = schema.get("patternProperties")
            if patterns and validator.is_type(instance, "object"):
                instance = {
                    name: inner
                    for name, inner in instance.items()
                    if not any(self._matches(pattern, name) for pattern in patterns)
                }
                schema = {k: v for k, v in schema.items() if k != "patternProperties"}
            yield from rule(validator, value, instance, schema) or ()

        return checked


def _whole_as_int(value: Any) -> Any:
    """Return a JSON value with each whole float as an integer: 1.0 equals 1 in JSON."""
    if isinstance(value, dict):
        return {name: _whole_as_int(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_whole_as_int(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
