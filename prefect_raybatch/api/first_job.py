"""Write a first job file: for a user's own table, from its columns, or for an example table."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from prefect_raybatch.compile.job import read_spec
from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.harmless import clean
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.csv_options import Csv
from prefect_raybatch.job.yaml_text import visible_yaml
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.spec.options import HiddenOptions

if TYPE_CHECKING:
    from prefect_raybatch.source import Inventory

MOST_COLUMNS = 40  # named in the file; the rest are counted
EXAMPLE_TABLE, EXAMPLE_JOB, EXAMPLE_ROWS = "companies.csv", "companies.yaml", 300
ROWS_READ = 100  # at most, to tell which column has the text
_TEXT = ("string", "large_string", "string_view")
_MARKUP = re.compile(r"[{}\[\].:!]")  # what a template takes for more than a name
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class SeenColumn:
    """A column of a table; `length` is the mean characters of its first values if it is text."""

    name: str
    kind: str
    length: float | None = None


@dataclass(frozen=True)
class SeenTable:
    """A table as its first rows show it.

    `csv` are the fields that `source.csv` needs for it, `guessed` whether the encoding among them
    is a guess.
    """

    columns: list[SeenColumn]
    csv: dict[str, Any]
    guessed: bool = False


def seen_table(uri: str, options: dict[str, Any] | None = None) -> SeenTable:
    """Return a table as its first rows show it.

    Raises like `raybatch plan` for unreadable input.
    """
    from prefect_raybatch import source

    job = BatchJob.from_dict(_fields("first", uri, "-", "demo", "out"))
    given = replace(read_spec(job.source), options=HiddenOptions(options))
    csv, guessed = source.seen_csv(given)
    given = replace(given, csv=Csv(**csv))
    if source.needs_snapshot(given):
        schema = source.peek(given).schema
        rows = next((table for _, table in source.heads(given, 1)), schema.empty_table())
    else:
        found = source.inventory(given)
        schema, rows = found.schema, _first_rows(found, dict(given.options))
    columns = [SeenColumn(f.name, str(f.type), _mean_length(rows, f)) for f in schema]
    return SeenTable(columns, csv, guessed)


def _first_rows(found: Inventory, options: dict[str, Any] | None) -> pa.Table:
    from prefect_raybatch.stages.block import is_lost, losses
    from prefect_raybatch.stages.read import ShardReader

    reader = ShardReader(found.files, found.schema, None, options)
    units = [Unit(0, 0, min(ROWS_READ, reader.rows))]
    for task in reader.tasks([(units[0], 0)], 1, units_per_task=1, shuffle_seed="first"):
        for table in reader.read(task):
            if is_lost(table):
                raise SourceError(losses(table)[0].message)
            return table
    return found.schema.empty_table()


def _mean_length(rows: pa.Table, field: pa.Field) -> float | None:
    if str(field.type) not in _TEXT or field.name not in rows.column_names or not rows.num_rows:
        return None
    lengths = pc.utf8_length(rows[field.name].cast(pa.large_string()).slice(0, ROWS_READ))
    return float(pc.sum(lengths).as_py() or 0) / float(min(ROWS_READ, rows.num_rows))


def name_of(uri: str) -> str:
    """Return a job's name from the last part of a URI: `customers` for data/customers.csv.gz."""
    last = uri.rstrip("/").rpartition("/")[2].partition("?")[0].partition(".")[0]
    return _UNFIT.sub("-", last).strip("-._") or "job"


def default_template(columns: list[SeenColumn]) -> str:
    """Return a question about the column with the longest text, or about the first column."""
    plain = [column for column in columns if not _MARKUP.search(column.name)] or columns
    chosen = max(plain, key=lambda column: column.length or 0.0)  # the first of equal ones
    return f"What is this? {{{chosen.name}}}"


def job_text(
    table: SeenTable, *, name: str, uri: str, template: str, model: str, output: str
) -> str:
    """Return the commented job file. Raises `ConfigError` if these make no valid job."""
    fields = _fields(name, uri, template, model, output)
    BatchJob.from_dict({**fields, "source": {"uri": uri, "csv": table.csv}})
    columns = table.columns
    shown = [f"#   {clean(f'{column.name}: {column.kind}')}" for column in columns[:MOST_COLUMNS]]
    if len(columns) > MOST_COLUMNS:
        shown.append(f"#   and {len(columns) - MOST_COLUMNS} more")
    put = {key: _scalar(value) for key, value in _leaves(fields)}
    lines = [
        "# A batch inference job: each row of the input is answered once.",
        "#   raybatch plan FILE          what would run, before anything starts",
        "#   raybatch run FILE           run it; the same command again resumes",
        f"name: {put['name']}",
        "source:",
        f"  uri: {put['source.uri']}",
        *_csv_lines(table),
        "  limit: 100                  # first rows only, for a trial; remove it for all",
        "# Columns seen there, which a template may name:",
        *shown,
        "prompt:",
        "  system: Answer in one word.",
        f"  template: {put['prompt.template']}",
        "sampling:",
        "  temperature: 0",
        "  max_tokens: 64              # of an answer, at most",
        '  # choice: ["yes", "no"]     # the only answers there may be',
        "engine:",
        f"  model: {put['engine.model']}",
        "output:",
        f"  uri: {put['output.uri']}",
        "  column: answer",
        "# limits:",
        "#   max_failed_fraction: 0.05   # more failed rows than that stop the run",
    ]
    return "\n".join(lines) + "\n"


def _csv_lines(table: SeenTable) -> list[str]:
    """Return the line `csv: {...}` of the job file, if it differs from the defaults."""
    if not table.csv:
        return []
    shown = {name: "tab" if value == "\t" else value for name, value in table.csv.items()}
    made = ", ".join(f"{name}: {json.dumps(value)}" for name, value in shown.items())
    note = "   # the encoding is a guess" if table.guessed else ""
    return [f"  csv: {{{made}}}{note}"]


def _fields(name: str, uri: str, template: str, model: str, output: str) -> dict[str, Any]:
    return {
        "name": name,
        "source": {"uri": uri},
        "prompt": {"template": template},
        "engine": {"model": model},
        "output": {"uri": output},
    }


def _leaves(value: dict[str, Any], above: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, inner in value.items():
        path = f"{above}{key}"
        found += _leaves(inner, f"{path}.") if isinstance(inner, dict) else [(path, inner)]
    return found


def _scalar(text: str) -> str:
    """Return a text as one line of YAML."""
    return visible_yaml([text], width=10**6, default_flow_style=True).strip()[1:-1]


def write_example(folder: Path, replace_files: bool = False) -> list[Path]:
    """Write a table of companies and a job that infers their industries; return both paths.

    The job uses the bundled model. Raises `ConfigError` if one of the files exists, unless it may
    be replaced.
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
