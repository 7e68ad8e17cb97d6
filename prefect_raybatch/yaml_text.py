"""Parses YAML and keeps the original text and line of each value, for exact error messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml

from prefect_raybatch.harmless import visible

MOST_VALUES = 100_000  # of a text; a few aliases of aliases can stand for billions


class _Loader(yaml.SafeLoader):
    """YAML's safe reader, not affected by libraries that change the global `yaml.SafeLoader`.

    Importing vLLM, for example, makes the global one read dates as text (lm-format-enforcer).
    """


def _timestamp(loader: _Loader, node: yaml.ScalarNode) -> Any:
    return loader.construct_yaml_timestamp(node)


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _timestamp)


class _Dumper(yaml.SafeDumper):
    """YAML's safe writer, with texts that contain hidden characters in double quotes."""


def _quoted_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = '"' if visible(text) != text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _quoted_text)


def visible_yaml(value: object, **options: Any) -> str:
    """Return the value as YAML, with hidden characters shown as escapes.

    `options` are passed to `yaml.dump`.
    """
    text: str = yaml.dump(value, Dumper=_Dumper, allow_unicode=True, sort_keys=False, **options)
    # The remaining ones are in double quotes, where YAML reads these escapes as the characters.
    return visible(text)


@dataclass(frozen=True)
class YamlText:
    """A parsed YAML text: its `value`, and the root of its syntax tree, None for an empty text."""

    value: Any
    root: yaml.Node | None = None

    def words(self, place: Sequence[int | str]) -> str | None:
        """Return the text of the unquoted scalar at `place`, as the author wrote it.

        `place` is a path of mapping keys and list indexes from the root. Returns None for quoted
        text, a mapping or list, or a value that is not in the text.
        """
        nodes = self._nodes(place)
        node = nodes[-1][0] if len(nodes) > len(place) else None
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        return str(node.value) if node is not None and plain else None

    def line(self, place: Sequence[int | str]) -> int | None:
        """Return the line, from 1, of the key or list item at `place`.

        `place` is a path of mapping keys and list indexes from the root. For a missing value,
        returns the line of the innermost group on the path that exists, or None if that is the
        whole text.
        """
        nodes = self._nodes(place)
        return nodes[-1][1] if len(nodes) > 1 else None

    def _nodes(self, place: Sequence[int | str]) -> list[tuple[yaml.Node, int]]:
        """Return the nodes on the path to `place` that exist, each with the line of its key."""
        if self.root is None:
            return []
        nodes = [(self.root, 1)]
        for part in place:
            node = nodes[-1][0]
            if isinstance(node, yaml.MappingNode):
                pairs = [pair for pair in node.value if _is_scalar(pair[0])]
                found = [(inner, key) for key, inner in pairs if key.value == str(part)]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
                found = [(inner, inner) for inner in node.value[part : part + 1]]
            else:
                break
            if not found:
                break
            inner, named = found[-1]
            nodes.append((inner, named.start_mark.line + 1))
        return nodes


NO_TEXT = YamlText(None)
"""The text of values that come from no file."""


def read_yaml(text: str) -> YamlText:
    """Parse a YAML text.

    Raises ValueError, with line numbers, for a syntax error and for a key that is repeated in a
    mapping (YAML readers silently take the last). Raises it for over 100,000 values, too.
    """
    with _loader_of(text) as loader:
        return _checked_text(loader, loader.get_single_node())


def read_yaml_documents(text: str) -> list[YamlText]:
    """Parse a text of YAML documents, which `---` separates; raise the errors of `read_yaml`."""
    documents = []
    with _loader_of(text) as loader:
        while loader.check_node():
            documents.append(_checked_text(loader, loader.get_node()))
    return documents


@contextmanager
def _loader_of(text: str) -> Iterator[_Loader]:
    """Yield a loader of a YAML text; the block's syntax errors become those of `read_yaml`."""
    loader = None
    try:
        loader = _Loader(text)
        yield loader
    except yaml.MarkedYAMLError as error:
        raise ValueError(_problem(error, text.splitlines())) from None
    except yaml.YAMLError as error:
        raise ValueError(f"is not valid YAML: {error}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _checked_text(loader: _Loader, root: yaml.Node | None) -> YamlText:
    """Return the text of a document with this syntax tree; raise the errors of `read_yaml`."""
    if root is None:
        return YamlText(None)
    if _size(root, {}) > MOST_VALUES:
        raise ValueError(
            f"contains over {MOST_VALUES:,} values (aliases count each time); make it smaller"
        )
    twice = sorted(_repeated(root, "", set()))
    if twice:
        raise ValueError("\n".join(text for _, text in twice))
    try:
        return YamlText(loader.construct_document(root), root)
    except ValueError as error:  # a date such as 2026-99-99
        raise ValueError(f"is not valid YAML: {error}") from None


def _size(node: yaml.Node, sizes: dict[int, int | None]) -> int:
    """Return how many values a node contains, itself included.

    The target of an alias or a merge key (<<) counts each time. `sizes` caches the results by node
    id; None marks a node that is being counted. Raises ValueError for an alias to an enclosing
    node.
    """
    if id(node) not in sizes:
        sizes[id(node)] = None
        inner = []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        sizes[id(node)] = 1 + sum(_size(one, sizes) for one in inner)
    size = sizes[id(node)]
    if size is None:
        raise ValueError(
            f"line {node.start_mark.line + 1}: an alias refers to a value that contains it; write "
            "the value out"
        )
    return size


def _repeated(node: yaml.Node, name: str, seen: set[int]) -> Iterator[tuple[int, str]]:
    """Yield (line, message) for each key below `node` that is repeated in its mapping.

    `name` is the dotted path of `node`, with a period at the end; `seen` holds the ids of visited
    nodes.
    """
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for number, inner in enumerate(node.value):
            yield from _repeated(inner, f"{name}{number}.", seen)
    elif isinstance(node, yaml.MappingNode):
        stand: dict[tuple[str, str], list[int]] = {}
        for key, inner in node.value:
            if _is_scalar(key) and key.tag != "tag:yaml.org,2002:merge":
                stand.setdefault((key.tag, key.value), []).append(key.start_mark.line + 1)
                yield from _repeated(inner, f"{name}{key.value}.", seen)
        for (_, key), found in stand.items():
            if len(found) > 1:
                numbers = f"{', '.join(map(str, found[:-1]))} and {found[-1]}"
                yield (
                    found[0],
                    f"{name}{key}: duplicate key in lines {numbers}; remove all but one",
                )


def _is_scalar(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode)


# (text in PyYAML's message, likely cause, whether the cause is at the error's own position)
_CAUSES = (
    (
        "found character '\\t' that cannot start",
        "there is a tab; indent with spaces, not with tabs",
        True,
    ),
    (
        "that cannot start any token",
        "text begins with a character that has a meaning in YAML; put quotes around it",
        True,
    ),
    (
        "could not find expected ':'",
        "a colon with a space behind it is missing; write NAME: VALUE",
        False,
    ),
    (
        "found unexpected end of stream",
        "a quote is opened and not closed; close it at the end of the text",
        False,
    ),
    (
        "expected ',' or",
        "a bracket or brace is not closed, a comma is missing, or text with braces has no quotes; "
        "complete it",
        False,
    ),
    (
        "expected the node content, but found",
        "a bracket or brace is not closed; complete it",
        False,
    ),
    (
        "but found '<scalar>'",
        "there is more text behind the end of a value; put quotes around the whole, and write a "
        "quote within single quotes twice",
        True,
    ),
    (
        "expected <block end>",
        "the indentation differs from that of the lines above; align the fields of a group",
        True,
    ),
    (
        "found undefined alias",
        "text that begins with * is an alias; put quotes around it",
        True,
    ),
    (
        "found unhashable key",
        "text begins with two braces; put quotes around it",
        True,
    ),
    (
        "found unknown escape character",
        "a backslash within double quotes has a meaning; use single quotes",
        True,
    ),
    (
        "expected escape sequence",
        "a backslash within double quotes has a meaning; use single quotes",
        True,
    ),
)


def _problem(error: yaml.MarkedYAMLError, lines: Sequence[str]) -> str:
    """Return an error message that says where a text is invalid YAML, and a likely remedy.

    `lines` are the lines of the text.
    """
    problem, mark = error.problem or "", error.problem_mark or error.context_mark
    cause = ", ".join(filter(None, (error.context, error.problem)))
    if problem == "mapping values are not allowed here" and mark is not None:
        before = lines[mark.line][: mark.column] if mark.line < len(lines) else ""
        cause = (
            "text contains a colon and a space; put quotes around it"
            if ":" in before
            else "the field is indented below a value; align it with the fields of its group"
        )
    for words, told, is_place in _CAUSES:
        if words in problem:
            cause = told
            mark = mark if is_place else error.context_mark or mark
            break
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{where}is not valid YAML: {cause}"
