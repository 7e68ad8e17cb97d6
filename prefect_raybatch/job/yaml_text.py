"""YAML as its author wrote it: its values, and the original text of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from prefect_raybatch.harmless import visible

MOST_VALUES = 100_000  # of a text; a few aliases of aliases can stand for billions


class _Loader(yaml.SafeLoader):
    """YAML's safe reader, independent of libraries that change the shared one.

    Importing vLLM makes that one read dates as text (lm-format-enforcer).
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
    """Return the value as YAML with hidden characters as escapes, so that it reads as it is."""
    text: str = yaml.dump(value, Dumper=_Dumper, allow_unicode=True, sort_keys=False, **options)
    # What is left of them stands in double quotes, where these escapes mean the same.
    return visible(text)


@dataclass(frozen=True)
class YamlText:
    """A YAML text: its `value`, and the nodes that it was parsed into."""

    value: Any
    root: yaml.Node | None = None

    def words(self, place: Sequence[int | str]) -> str | None:
        """Return the original text at `place` (names and numbers from the top).

        None for a quoted text, a collection, or a value that comes from elsewhere.
        """
        node = self.root
        for part in place:
            if isinstance(node, yaml.MappingNode):
                at = {key.value: inner for key, inner in node.value if _is_scalar(key)}
                node = at.get(str(part))
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
                node = node.value[part] if part < len(node.value) else None
            else:
                return None
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        return str(node.value) if node is not None and plain else None


def read_yaml(text: str) -> YamlText:
    """Parse a YAML text.

    Raises ValueError with the line of a syntax error, or with the keys that are repeated in a
    mapping, of which YAML readers silently take the last.
    """
    try:
        return _read(text)
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"{_line(error)}is not valid YAML: {_problem(error)}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"is not valid YAML: {error}") from None


def _read(text: str) -> YamlText:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
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
    finally:
        loader.dispose()


def _size(node: yaml.Node, sizes: dict[int, int | None]) -> int:
    """Return how many values a node stands for.

    The target of an alias or a merge key (<<) counts each time. Raises ValueError for an alias to
    an enclosing node.
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
    """Yield (line, message) for each key below `node` that is repeated in its mapping."""
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


def _line(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""


def _problem(error: yaml.MarkedYAMLError) -> str:
    told = ", ".join(filter(None, (error.context, error.problem)))
    if error.problem == "mapping values are not allowed here":
        return f"{told}; put quotes around text that contains a colon and a space"
    if error.problem == "found character '\\t' that cannot start any token":
        return f"{told}; indent with spaces, not with tabs"
    return told
