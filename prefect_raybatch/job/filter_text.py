"""Parses source.filter: a small part of SQL's WHERE, the same for all formats.

NOT is moved inwards while parsing, so the result is AND and OR over conditions on one column, each
of which can be passed to any format's own reader.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

LONGEST = 20_000  # characters
DEEPEST = 50  # parentheses and NOTs within each other

Literal = bool | int | Decimal | str


@dataclass(frozen=True)
class Compare:
    """`column op value`; op is =, !=, <, <=, > or >=."""

    column: str
    op: str
    value: Literal


@dataclass(frozen=True)
class OneOf:
    """`column IN (values)`, or NOT IN."""

    column: str
    values: tuple[Literal, ...]
    negated: bool = False


@dataclass(frozen=True)
class IsNull:
    """`column IS NULL`, or IS NOT NULL."""

    column: str
    negated: bool = False


@dataclass(frozen=True)
class Like:
    """`column LIKE pattern`, or NOT LIKE: % is any text, _ one character."""

    column: str
    pattern: str
    negated: bool = False


@dataclass(frozen=True)
class AllOf:
    """`part AND part ...`."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class AnyOf:
    """`part OR part ...`."""

    parts: tuple[Condition, ...]


Condition = Compare | OneOf | IsNull | Like | AllOf | AnyOf

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])
    | '(?P<text>(?:[^']|'')*)'
    | "(?P<quoted>(?:[^"]|"")+)"
    | (?P<word>[^\W\d]\w*)
    | (?P<sign><=|>=|<>|!=|==|[=<>(),])
    )""",
    re.VERBOSE,
)
_WORDS = frozenset(  # never the name of a column, unless quoted
    ("AND", "OR", "NOT", "IN", "IS", "NULL", "LIKE", "BETWEEN", "TRUE", "FALSE")
)
_SAME = {"==": "=", "<>": "!="}
_OPPOSITE = {"=": "!=", "!=": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


def parse_filter(text: str) -> Condition:
    """Parse the text of a filter and return its condition.

    Raises ValueError that says what is wrong; for a syntax error, with position and what is
    expected.
    """
    if not text.strip():
        raise ValueError("is empty; write a condition such as amount > 10, or remove it")
    if len(text) > LONGEST:
        raise ValueError(f"has over {LONGEST} characters; shorten it")
    return _Reader(text).whole()


def columns_in(condition: Condition) -> tuple[str, ...]:
    """Return the columns that a condition uses, in order of first use."""
    if isinstance(condition, AllOf | AnyOf):
        return tuple(dict.fromkeys(name for part in condition.parts for name in columns_in(part)))
    return (condition.column,)


def negate(condition: Condition) -> Condition:
    """Return NOT `condition`, with the NOT moved inwards to the comparisons.

    As in SQL, null satisfies neither a condition nor its negation.
    """
    if isinstance(condition, AllOf | AnyOf):
        parts = tuple(map(negate, condition.parts))
        return AnyOf(parts) if isinstance(condition, AllOf) else AllOf(parts)
    if isinstance(condition, Compare):
        return Compare(condition.column, _OPPOSITE[condition.op], condition.value)
    if isinstance(condition, OneOf):
        return OneOf(condition.column, condition.values, not condition.negated)
    if isinstance(condition, IsNull):
        return IsNull(condition.column, not condition.negated)
    return Like(condition.column, condition.pattern, not condition.negated)


@dataclass(frozen=True)
class _Token:
    kind: str  # number, text, quoted, word, sign, end
    value: str
    at: int

    @property
    def keyword(self) -> str:
        """Return the token in capitals if it is a word or sign, otherwise ""."""
        return self.value.upper() if self.kind in ("word", "sign") else ""


class _Reader:
    """A recursive-descent parser of a filter; OR binds weaker than AND, AND weaker than NOT."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._next = 0
        self._depth = 0

    def whole(self) -> Condition:
        found = self._any()
        if self._seen.kind != "end":
            raise self._wrong("AND, OR or the end")
        return found

    @property
    def _seen(self) -> _Token:
        return self._tokens[self._next]

    def _take(self, *keywords: str) -> _Token | None:
        """Consume and return the next token if it is one of `keywords`; else return None."""
        token = self._seen
        if token.keyword not in keywords or not keywords:
            return None
        self._next += 1
        return token

    def _need(self, keyword: str) -> None:
        if self._take(keyword) is None:
            raise self._wrong(keyword)

    def _wrong(self, wanted: str) -> ValueError:
        token = self._seen
        found = "the end" if token.kind == "end" else repr(token.value)
        return ValueError(f"character {token.at + 1}: expected {wanted}, found {found}")

    def _any(self) -> Condition:
        parts = [self._all()]
        while self._take("OR"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def _all(self) -> Condition:
        parts = [self._one()]
        while self._take("AND"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _one(self) -> Condition:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError(f"has over {DEEPEST} nested parentheses; remove some")
        try:
            if self._take("NOT"):
                return negate(self._one())
            if self._take("("):
                inner = self._any()
                self._need(")")
                return inner
            return self._condition()
        finally:
            self._depth -= 1

    def _condition(self) -> Condition:
        token = self._seen
        if token.kind not in ("word", "quoted") or token.keyword in _WORDS:
            raise self._wrong('a column (quote names with other characters: "Customer Id")')
        self._next += 1
        column = token.value
        if sign := self._take("=", "==", "!=", "<>", "<", "<=", ">", ">="):
            return Compare(column, _SAME.get(sign.value, sign.value), self._literal())
        if self._take("IS"):
            negated = self._take("NOT") is not None
            self._need("NULL")
            return IsNull(column, negated)
        negated = self._take("NOT") is not None
        if self._take("IN"):
            return OneOf(column, self._list(), negated)
        if self._take("LIKE"):
            return Like(column, self._text(), negated)
        if self._take("BETWEEN"):
            low = self._literal()
            self._need("AND")
            both = AllOf((Compare(column, ">=", low), Compare(column, "<=", self._literal())))
            return negate(both) if negated else both
        if negated:
            raise self._wrong("IN, LIKE or BETWEEN")
        return Compare(column, "=", True)  # a column of true and false by itself

    def _list(self) -> tuple[Literal, ...]:
        self._need("(")
        values = [self._literal()]
        while self._take(","):
            values.append(self._literal())
        self._need(")")
        return tuple(values)

    def _literal(self) -> Literal:
        if found := self._take("TRUE", "FALSE"):
            return found.keyword == "TRUE"
        if self._seen.keyword in ("DATE", "TIMESTAMP"):  # the column's type decides which
            self._next += 1
            return self._text()
        if self._seen.keyword == "NULL":
            raise ValueError(
                f"character {self._seen.at + 1}: a comparison with NULL is never true; write IS "
                "NULL"
            )
        if self._seen.kind == "number":
            self._next += 1
            text = self._tokens[self._next - 1].value
            return int(text) if re.fullmatch(r"[-+]?\d{1,38}", text) else Decimal(text)
        return self._text()

    def _text(self) -> str:
        token = self._seen
        if token.kind != "text":
            raise self._wrong("a number, TRUE, FALSE or a text in single quotes")
        self._next += 1
        return token.value


def _tokens(text: str) -> list[_Token]:
    found, at = [], 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            raise ValueError(
                f"character {at + 1}: {text[at : at + 20]!r} is not valid here; remove or quote it"
            )
        kind = str(match.lastgroup)
        quote = {"text": "'", "quoted": '"'}.get(kind, "")
        value = match[kind].replace(quote * 2, quote) if quote else match[kind]
        found.append(_Token(kind, value, match.start(kind) - bool(quote)))
        at = match.end()
    return [*found, _Token("end", "", len(text))]
