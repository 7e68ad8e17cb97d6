"""Tables of the reference pages that are written from the code: commands, errors, metrics, blocks.

A page has them between `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

import typer
import versions
from pydantic import BaseModel, SecretStr

from prefect_raybatch import errors
from prefect_raybatch.blocks import BatchInferenceJob, HostedModel, ObjectStore, RayCluster
from prefect_raybatch.cli.commands import app
from prefect_raybatch.driver.metrics import COMPLETED_METRIC, COUNTERS, GAUGES

GENERATED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [heads, ("---",) * len(heads), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


# --- commands ------------------------------------------------------------------------------------


def is_argument(parameter: Any) -> bool:
    return type(parameter).__name__ == "TyperArgument"


def option_row(option: Any) -> tuple[str, str]:
    """Return an option, with its value and default, or an argument, and its help text."""
    if is_argument(option):
        return f"`{short_name(option)}`", one_line(option.help)
    value = f" {option.metavar}" if option.metavar else ""
    is_flag = isinstance(option.default, bool) or option.secondary_opts
    if not value and not is_flag:
        value = f" {option.name.rstrip('_').upper()}"
    names = ", ".join(f"`{name}{value}`" for name in option.opts)
    names += "".join(f", `{name}`" for name in option.secondary_opts)
    text = one_line(option.help)
    sentence = f"{text.rstrip('.')}."
    if option.required:
        return names, f"{sentence} Required."
    if option.default is None or is_flag:
        return names, text
    return names, f"{sentence} Default: `{option.default}`."


def shared_options() -> dict[str, tuple[str, str]]:
    """Return arguments and options that three commands or more have with the same help text."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, command in COMMANDS.items():
        for option in command.params:
            found.setdefault(option_row(option), []).append(name)
    shared = {row[0]: row for row, names in found.items() if len(names) > 2}
    return dict(sorted(shared.items()))


def common_options() -> list[str]:
    return table(("option", "does"), list(shared_options().values()))


def short_name(option: Any) -> str:
    """Return its name alone: `--set`, or `JOB` of an argument."""
    if is_argument(option):
        return str(option.metavar or option.name.upper()).strip("[]")
    return "`, `".join([*option.opts, *option.secondary_opts])


def group_of(command: Any) -> str:
    """Return the panel of `raybatch --help` that has the command."""
    panel = command.rich_help_panel
    return panel if isinstance(panel, str) else "Commands"


def commands() -> list[str]:
    """Return a heading, the help text and the options of each command, by the groups of --help."""
    lines: list[str] = []
    shared = set(shared_options().values())
    for group in dict.fromkeys(map(group_of, COMMANDS.values())):
        lines += [f"## {group}", ""]
        for name, command in COMMANDS.items():
            if group_of(command) != group:
                continue
            own = [option_row(o) for o in command.params if option_row(o) not in shared]
            common = [f"`{short_name(o)}`" for o in command.params if option_row(o) in shared]
            lines += [f"### {name}", ""]
            for part in re.split(r"\n\s*\n", command.help or ""):
                lines += [one_line(part), ""]
            lines += [*table(("option", "does"), own), ""] if own else []
            lines += [f"And {', '.join(common)}.", ""] if common else []
    return lines[:-1]


# --- errors, metrics, blocks ---------------------------------------------------------------------


def error_classes() -> list[type[errors.RayBatchError]]:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    return [
        value
        for value in classes
        if issubclass(value, errors.RayBatchError) and value is not errors.RayBatchError
    ]


def error_table() -> list[str]:
    rows = [
        (
            f"`{error.__name__}`",
            one_line(inspect.getdoc(error)),
            "yes" if error.transient else "no",
            error.remedy,
        )
        for error in error_classes()
    ]
    return table(("error", "meaning", "retried", "what to do"), rows)


def metrics() -> list[str]:
    rows = [(f"`{name}_total`", "counter", text) for name, (text, _) in COUNTERS.items()]
    rows += [(f"`{name}`", "gauge", text) for name, (text, _) in GAUGES.items()]
    rows.append((f"`{COMPLETED_METRIC}`", "gauge", "1 once the result is proved complete."))
    return table(("metric", "type", "meaning"), rows)


def block_type(annotation: Any) -> str:
    kinds = [annotation]
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    names: list[str] = []
    for kind in kinds:
        if kind is SecretStr or "Secret" in str(kind):
            names.append("secret")
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            names.append(f"`{kind.__name__}`")
        else:
            names.append({str: "text", bool: "true or false"}.get(kind, "mapping"))
    return " or ".join(dict.fromkeys(names))


def block_fields(block: type[BaseModel]) -> list[str]:
    rows = [
        (f"`{name}`", block_type(field.annotation), one_line(field.description))
        for name, field in block.model_fields.items()
        if field.description and not name.startswith("_")
    ]
    return table(("field", "type", "meaning"), rows)


TABLES: dict[str, Callable[[], list[str]]] = {
    "commands": commands,
    "common-options": common_options,
    "errors": error_table,
    "metrics": metrics,
    "object-store": lambda: block_fields(ObjectStore),
    "hosted-model": lambda: block_fields(HostedModel),
    "ray-cluster": lambda: block_fields(RayCluster),
    "batch-inference-job": lambda: block_fields(BatchInferenceJob),
    "tested-versions": lambda: versions.table(versions.recorded()),
}


def generated(text: str) -> list[str]:
    """Return the names of a page's generated tables."""
    return [found[2] for found in GENERATED.finditer(text)]


def rewritten(text: str) -> str:
    """Return a page's text with its generated tables written anew."""

    def fresh(found: re.Match[str]) -> str:
        return found[1] + "\n".join(TABLES[found[2]]()) + "\n" + found[3]

    return GENERATED.sub(fresh, text)
