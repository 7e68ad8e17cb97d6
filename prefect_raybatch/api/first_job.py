"""Writes a first job file: for a user's own table, from its columns, or for an example table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from prefect_raybatch.compile.job import read_spec
from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.harmless import clean
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import nearest, template_fields
from prefect_raybatch.job.csv_options import Csv
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.model.pinned import DEMO
from prefect_raybatch.yaml_text import visible_yaml

if TYPE_CHECKING:
    from prefect_raybatch.source import Inventory

MOST_COLUMNS = 40  # named in the file; the rest are counted
EXAMPLE_TABLE, EXAMPLE_JOB, EXAMPLE_ROWS = "companies.csv", "companies.yaml", 300
ROWS_READ = 100  # at most, to tell which column has the text
DEMO_WARNING = "The bundled model `demo` only knows the industries of companies."
_CONVERSATION = re.compile(r"(large_)?list<\w+: struct<(role: .*content: |content: .*role: )")
_TEXT = ("string", "large_string", "string_view")
_MARKUP = re.compile(r"[{}\[\].:!]")  # characters that a template reads as syntax
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class ColumnProfile:
    """A column of a table; `kind` is its Arrow type as text.

    For a text column, `length` is the mean number of characters of the first values, and `is_prose`
    whether most of these have several words.
    """

    name: str
    kind: str
    length: float | None = None
    is_prose: bool = False

    @property
    def is_nameable(self) -> bool:
        """Return whether a template can contain the column as {name}."""
        return not _MARKUP.search(self.name)


@dataclass(frozen=True)
class TableProfile:
    """A table's columns and format, as seen in its first rows.

    `csv` has the fields of `source.csv` needed to read it ({}: the defaults). `guessed`: the
    encoding in `csv` is a guess.
    """

    columns: list[ColumnProfile]
    csv: dict[str, Any]
    guessed: bool = False


def profile_table(fields: Mapping[str, Any]) -> TableProfile:
    """Return the columns and format of a table, from its first rows.

    `fields` are the `source` fields of a job that reads it. Raises the errors of `raybatch plan`
    for unreadable input.
    """
    from prefect_raybatch import source

    made = {"name": "first", "prompt": {"template": "-"}, "output": {"uri": "out"}}
    job = BatchJob.from_dict({**made, "source": dict(fields)}, "init")
    check_trust(job)
    given = read_spec(job.source)
    csv, guessed = source.detect_csv(given)
    given = replace(given, csv=Csv(**csv))
    if source.needs_snapshot(given):
        schema = source.peek(given).schema
        rows = next((table for _, table in source.heads(given, 1)), schema.empty_table())
    else:
        found = source.inventory(given)
        schema, rows = found.schema, _first_rows(found, dict(given.options))
    return TableProfile([_profile_column(rows, field) for field in schema], csv, guessed)


def _first_rows(inventory: Inventory, options: dict[str, Any] | None) -> pa.Table:
    from prefect_raybatch.stages.block import is_lost, losses
    from prefect_raybatch.stages.read import ShardReader

    reader = ShardReader(inventory.files, inventory.schema, None, options)
    units = [Unit(0, 0, min(ROWS_READ, reader.rows))]
    for task in reader.tasks([(units[0], 0)], 1, units_per_task=1, shuffle_seed="first"):
        for table in reader.read(task):
            if is_lost(table):
                raise SourceError(losses(table)[0].message)
            return table
    return inventory.schema.empty_table()


def _profile_column(rows: pa.Table, field: pa.Field) -> ColumnProfile:
    name, kind = field.name, str(field.type)
    if kind not in _TEXT or name not in rows.column_names or not rows.num_rows:
        return ColumnProfile(name, kind)
    values = rows[name].cast(pa.large_string()).slice(0, ROWS_READ)
    length = float(pc.sum(pc.utf8_length(values)).as_py() or 0) / len(values)
    several = pc.sum(pc.match_substring_regex(values, r"\S\s+\S")).as_py() or 0
    return ColumnProfile(name, kind, length, 2 * several > len(values))


def name_of(uri: str) -> str:
    """Return a job's name from the last part of a URI: `customers` for data/customers.csv.gz."""
    parts = uri.partition("?")[0].rstrip("/").split("/")
    plain = [part for part in parts if not set("*?[") & set(part)] or [""]
    return _UNFIT.sub("-", plain[-1].partition(".")[0]).strip("-._") or "job"


def default_prompt(columns: list[ColumnProfile]) -> dict[str, str]:
    """Return prompt fields that suit the columns, as {field: value}.

    A column of conversations becomes `messages`. If there is none, the template asks about the
    prose column with the longest text, else the longest text column, else the first column. Raises
    `ConfigError` if a template can contain none of the columns.
    """
    for column in columns:
        if _CONVERSATION.match(column.kind):
            return {"messages": column.name}
    nameable = [column for column in columns if column.is_nameable]
    if not nameable:
        raise ConfigError(
            f"a template can name no column, because of the signs in {columns[0].name!r}. Rename "
            "the columns, or build the prompt with --function FILE.py:NAME"
        )
    chosen = max(nameable, key=lambda one: (one.is_prose, one.length or 0.0))  # the first of equals
    return {"template": f"What is this? {{{chosen.name}}}"}


def check_first_template(template: str, columns: list[ColumnProfile]) -> str:
    """Return `template`; raise `ConfigError` if it is invalid or names a missing column.

    A template that names no column is refused as well, because all rows would get the same prompt.
    """
    names = [column.name for column in columns]
    try:
        used = template_fields(template)
    except ValueError as error:
        raise ConfigError(f"the template {error}") from None
    for name in used:
        if name not in names:
            raise ConfigError(
                f"the table has no column {name!r}{nearest(name, {*names})} (columns: "
                f"{', '.join(names[:MOST_COLUMNS])})"
            )
    if not used:
        raise ConfigError(
            f"the template names no column, so each row would ask the same. Write one in braces, "
            f"such as {{{names[0]}}}"
        )
    return template


def job_text(
    table: TableProfile,
    *,
    name: str,
    source: Mapping[str, Any],
    prompt: Mapping[str, str],
    model: str,
    output: str,
) -> str:
    """Return the text of a commented job file; raise `ConfigError` if the job is invalid.

    `source` has the job's source fields with which the table was read, `prompt` the prompt fields.
    `output` is output.uri.
    """
    shown = dict(source)
    shown.pop("csv", None)
    # Escape dollar signs: the path was read literally, without variables.
    shown["uri"] = str(shown["uri"]).replace("$", "$$")
    fields: dict[str, Any] = {
        "name": name,
        "source": {**source, **({"csv": table.csv} if table.csv else {})},
        "prompt": dict(prompt),
        "engine": {"model": model},
        "output": {"uri": output},
    }
    BatchJob.from_dict(fields)
    lines = [
        "# A batch inference job: each row of the input is answered once.",
        "#   raybatch preview FILE       types, prompts and the first answers",
        "#   raybatch plan FILE          what would run, before anything starts",
        "#   raybatch run FILE           run it; the same command again resumes",
        f"name: {_scalar(name)}",
        "source:",
        *(f"  {key}: {_scalar(value)}" for key, value in shown.items()),
        *_csv_lines(table),
        "  limit: 100                  # first rows only, for a trial; remove it for all",
        "# Columns seen there, which a template may name:",
        *_column_lines(table.columns),
        "prompt:",
        *([] if "messages" in prompt else ["  system: Answer in one word."]),
        *(f"  {key}: {_scalar(value)}" for key, value in prompt.items()),
        "sampling:",
        "  temperature: 0",
        "  max_tokens: 64              # of an answer, at most",
        '  # choice: ["yes", "no"]     # the only answers there may be',
        *([f"# {DEMO_WARNING}"] if model == DEMO else []),
        "engine:",
        f"  model: {_scalar(model)}",
        "output:",
        f"  uri: {_scalar(output)}",
        "  column: answer",
        "# limits:",
        "#   max_failed_fraction: 0.05   # more failed rows than that stop the run",
    ]
    return "\n".join(lines) + "\n"


def _column_lines(columns: list[ColumnProfile]) -> list[str]:
    shown = [f"#   {clean(f'{column.name}: {column.kind}')}" for column in columns[:MOST_COLUMNS]]
    if len(columns) > MOST_COLUMNS:
        shown.append(f"#   and {len(columns) - MOST_COLUMNS} more")
    return shown


def _csv_lines(table: TableProfile) -> list[str]:
    """Return the line `csv: {...}` of the job file, in a list; [] if the table needs none."""
    if not table.csv:
        return []
    shown = {name: "tab" if value == "\t" else value for name, value in table.csv.items()}
    made = ", ".join(f"{name}: {json.dumps(value)}" for name, value in shown.items())
    note = "   # the encoding is a guess" if table.guessed else ""
    return [f"  csv: {{{made}}}{note}"]


def _scalar(value: object) -> str:
    """Return a scalar value as YAML on one line."""
    return visible_yaml([value], width=10**6, default_flow_style=True).strip()[1:-1]


def write_example(folder: Path, replace_files: bool = False) -> list[Path]:
    """Write a table of companies and a job that infers their industries; return both paths.

    The job uses the bundled model. Raises `ConfigError` if one of the files exists, unless
    `replace_files`.
    """
    from prefect_raybatch.demo.customers import write_customers

    paths = [folder / EXAMPLE_TABLE, folder / EXAMPLE_JOB]
    existing = [path for path in paths if path.exists()]
    if existing and not replace_files:
        names, exist = " and ".join(map(str, existing)), "exists" if len(existing) == 1 else "exist"
        raise ConfigError(f"{names} already {exist}. Use another folder, or replace with --force.")
    write_customers(paths[0], EXAMPLE_ROWS)
    paths[1].write_text(_example_job(), encoding="utf-8")
    return paths


def _example_job() -> str:
    from prefect_raybatch import demo

    lines = [
        "# Infers the industry of each company. The model `demo` is bundled: no GPU, no download.",
        "name: companies",
        f"source: {{uri: {EXAMPLE_TABLE}}}",
        "prompt:",
        f"  system: {_scalar(demo.SYSTEM)}",
        f"  template: {_scalar(demo.TEMPLATE)}",
        f"sampling: {{temperature: 0, max_tokens: 16, choice: [{', '.join(demo.LABELS)}]}}",
        "engine: {model: demo, max_model_len: 256}",
        "output: {uri: out, column: industry}",
    ]
    return "\n".join(lines) + "\n"


def demo_job(data: Path, output: Path, model: str) -> BatchJob:
    """Return the job that infers the industry of each company in the table `data`.

    `output` is the folder for its runs.
    """
    from prefect_raybatch import demo

    return BatchJob.from_dict(
        {
            "name": "demo",
            "source": {"uri": str(data)},
            "prompt": {"system": demo.SYSTEM, "template": demo.TEMPLATE},
            "sampling": {"temperature": 0, "max_tokens": 16, "choice": list(demo.LABELS)},
            "engine": {"model": model, "max_model_len": 256 if model == "demo" else 1024},
            "output": {"uri": str(output), "column": "industry"},
        }
    )
