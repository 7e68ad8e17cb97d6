"""The mutants of a room as mutmut generated them, and which of them are not worth a test."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

NO_TEST = 33  # mutmut's code for a function that no test calls
TIMED_OUT = {36, -24, 24, 152, 255, -9}  # mutmut's codes, and signals at its limits
SURVIVED = {0, 5, NO_TEST}  # pytest's codes for "all passed" and "no tests"
LOGS = {"debug", "info", "warning", "error", "exception", "log", "warn"}
PARTS_OF_BODIES = {"body", "orelse", "finalbody", "handlers", "cases"}


@dataclass(frozen=True)
class Mutant:
    """One changed place of one function."""

    name: str  # mutmut's
    path: Path
    line: int  # of the function in the project's file
    function: str
    change: Change
    exit_code: int | None  # pytest's, None before the tests have run

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What a mutant keeps when the lines of its file move."""
        return (str(self.path), self.function, *self.change.texts)

    @property
    def survived(self) -> bool:
        return self.exit_code in SURVIVED

    @property
    def killed(self) -> bool:
        return self.exit_code is not None and not self.survived


def mutants(copy: Path, room: str) -> list[Mutant]:
    """Return all mutants of a room, with the verdicts so far."""
    found: list[Mutant] = []
    for meta in sorted((copy / "mutants/prefect_raybatch" / room).rglob("*.py.meta")):
        path = meta.relative_to(copy / "mutants").with_suffix("")
        exit_codes = json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
        if exit_codes:
            found += _of_file(copy, path, exit_codes)
    return found


def _of_file(copy: Path, path: Path, exit_codes: dict[str, int | None]) -> Iterator[Mutant]:
    tree = ast.parse((copy / "mutants" / path).read_text(encoding="utf-8"))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)}
    lines = dict(_lines(ast.parse((copy / path).read_text(encoding="utf-8")), ""))
    for name, exit_code in exit_codes.items():
        short = name.rpartition(".")[2]
        base = short.rpartition("__mutmut_")[0]
        function = base.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
        change = Change(functions[f"{base}__mutmut_orig"], functions[short])
        yield Mutant(name, path, lines[function], function, change, exit_code)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _lines(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield prefix + child.name, child.lineno
        elif isinstance(child, ast.ClassDef):
            yield from _lines(child, f"{prefix}{child.name}.")


class Change:
    """The difference of two functions; looked for when it is asked about."""

    def __init__(self, before: ast.AST, after: ast.AST) -> None:
        self.functions = before, after

    @cached_property
    def road(self) -> list[tuple[ast.AST, ast.AST]]:
        """The nodes that differ, each within the one before."""
        road = [self.functions]
        while (step := _step(*road[-1])) is not None:
            road.append(step)
        return road

    @cached_property
    def texts(self) -> tuple[str, str]:
        """The innermost statement before and after, without the statements inside of it."""
        at = max(
            index
            for index, (node, _) in enumerate(self.road)
            if isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case))
        )
        before, after = self.road[at]
        return _head(before), _head(after)

    @cached_property
    def rule(self) -> str | None:
        """Why no test should notice the change, or None: what people read is free to change, and a
        type's or an encoding's name has no other value to fail with."""
        before, after = self.road[-1]
        nodes = [node for node, _ in self.road]
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        if any(_called(call) in LOGS for call in calls):
            return "log"
        if _is_text(_lost(before, after)):
            if any(isinstance(node, ast.Raise) for node in nodes):
                return "wording"
            if any(_called(call).endswith(("Error", "Warning")) for call in calls):
                return "wording"
        if {ast.Raise, ast.JoinedStr, ast.Slice} <= {type(node) for node in nodes}:
            return "wording"  # how much of a digest is shown
        if isinstance(before, ast.Constant) and " " in str(before.value):
            return "wording"
        if calls and _called(calls[-1]) == "cast":
            return "type"
        keyword = _lost_keyword(before, after) or next(
            (node.arg for node in reversed(nodes) if isinstance(node, ast.keyword)), None
        )
        if keyword in {"encoding", "errors"}:
            return "encoding"
        if keyword == "strict" and calls and _called(calls[-1]) == "zip":
            return "assertion"
        return None


def _step(before: ast.AST, after: ast.AST) -> tuple[ast.AST, ast.AST] | None:
    """Return the one pair of children that differs, or None if these two nodes themselves do."""
    if type(before) is not type(after):
        return None
    pairs: list[tuple[object, object]] = []
    for name, value in ast.iter_fields(before):
        other = getattr(after, name)
        if isinstance(before, FUNCTIONS) and name in {"name", "decorator_list"}:
            continue
        if isinstance(value, list) and isinstance(other, list):
            if len(value) != len(other):
                return None
            pairs += zip(value, other, strict=True)
        else:
            pairs.append((value, other))
    different = [(a, b) for a, b in pairs if _dump(a) != _dump(b)]
    if len(different) != 1:
        return None
    ((one, other),) = different
    return (one, other) if isinstance(one, ast.AST) and isinstance(other, ast.AST) else None


def _dump(node: object) -> str:
    return ast.dump(node) if isinstance(node, ast.AST) else repr(node)


def _head(node: ast.AST) -> str:
    """A statement's own text."""
    bare = type(node)(**dict(ast.iter_fields(node)))
    for name in PARTS_OF_BODIES:
        if isinstance(getattr(node, name, None), list):
            setattr(bare, name, [ast.Expr(ast.Constant(...))] if name == "body" else [])
    if isinstance(bare, ast.Try):
        bare.finalbody = [ast.Pass()]
    if isinstance(bare, ast.Match):
        bare.cases = node.cases  # type: ignore[attr-defined]
    return ast.unparse(ast.fix_missing_locations(bare)).replace("\n    ...", "").strip()


def _lost(before: ast.AST, after: ast.AST) -> ast.AST:
    """The argument that a changed call has no more, else the node itself."""
    if not isinstance(before, ast.Call) or not isinstance(after, ast.Call):
        return before
    there = {_dump(node) for node in [*after.args, *after.keywords]}
    gone = [node for node in [*before.args, *before.keywords] if _dump(node) not in there]
    if len(gone) != 1:
        return before
    return gone[0].value if isinstance(gone[0], ast.keyword) else gone[0]


def _lost_keyword(before: ast.AST, after: ast.AST) -> str | None:
    if not isinstance(before, ast.Call) or not isinstance(after, ast.Call):
        return None
    left = {keyword.arg for keyword in after.keywords}
    return next((k.arg for k in before.keywords if k.arg not in left), None)


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
