"""Whether the names that we use of another package are still where they were, by its source.

By its source and not by importing it: fields that only an object has are seen as well, and vLLM
takes over ten seconds to import.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from prefect_raybatch.job.vllm.fields import parsed

# file: {class, or "" for the module: names; "name(a, b)" is a function that takes a and b}
Contract = Mapping[str, Mapping[str, Sequence[str]]]


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed"
    return Path(next(iter(spec.submodule_search_locations)))


def version_of(package: str, *distributions: str) -> str:
    """Name and version of the one of these distributions that the package is imported from."""
    folder = folder_of(package).parent
    for found in metadata.distributions(path=[str(folder)]):
        if found.name in (distributions or (package,)):
            return f"{found.name} {found.version}"
    raise AssertionError(f"none of {distributions or package} is installed in {folder}")


def moved(folder: Path, contract: Contract, version: str) -> list[str]:
    """A line for each name that is not there any more."""
    lines = []
    for file, owners in contract.items():
        path = folder / file
        if not path.exists():
            lines.append(f"{version} has no file {folder.name}/{file} any more")
            continue
        tree = parsed(path.read_text(encoding="utf-8"))
        for owner, names in owners.items():
            known = _names(tree, owner)
            if known is None:
                lines.append(f"{version}: {folder.name}/{file} has no class {owner} any more")
                continue
            for wanted in names:
                name, _, rest = wanted.partition("(")
                where = f"{folder.name}/{file}: {f'{owner}.' if owner else ''}{name}"
                if name not in known:
                    lines.append(f"{version}: {where} is not there any more")
                    continue
                gone = set(re.findall(r"\w+", rest)) - known[name]
                if gone and "**" not in known[name]:
                    lines.append(f"{version}: {where} takes no {', '.join(sorted(gone))} any more")
    return lines


def _names(tree: ast.Module, owner: str) -> dict[str, set[str]] | None:
    """The names of a class or, for "", of the module, with the parameters of those that have any;
    None where there is no such class."""
    body: list[ast.stmt] = tree.body
    if owner:
        found = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == owner]
        if not found:
            return None
        body = found[0].body
    names: dict[str, set[str]] = {}
    for node in body:
        for inner in ast.walk(node) if owner or isinstance(node, (ast.Try, ast.If)) else (node,):
            names |= _bound(inner, owner)
    return names


def _bound(node: ast.AST, owner: str) -> dict[str, set[str]]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return {node.name: {a.arg for a in every} | ({"**"} if node.args.kwarg else set())}
    if isinstance(node, ast.ClassDef):
        return {node.name: set()}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(a.asname or a.name): set() for a in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = {}
    for target in targets:
        if isinstance(target, ast.Name):
            names[target.id] = set[str]()
        elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and owner:
            names[target.attr] = set[str]()
    return names


def imported(path: Path, package: str) -> list[tuple[str, str]]:
    """(module, name) of all that a file of ours imports from a package, wherever in the file."""
    return [
        (node.module, alias.name)
        for node in ast.walk(parsed(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package
        for alias in node.names
    ]
