"""A first job file for somebody's own table, with what was seen in it."""

from __future__ import annotations

import re
from typing import Any

import yaml

from prefect_raybatch.job.batch_job import BatchJob

MOST_COLUMNS = 40  # named in the file; the rest are counted
_TEXT = ("string", "large_string", "string_view")
_MARKUP = re.compile(r"[{}\[\].:!]")  # what a template takes for more than a name
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")


def seen_columns(uri: str, options: dict[str, Any] | None = None) -> list[tuple[str, str]]:
    """(name, type) of each column of a table, of which a CSV's first block is read. Raises as
    `raybatch plan` for what cannot be read."""
    from prefect_raybatch import source

    job = BatchJob.from_dict(_fields("first", uri, "-", "demo", "out"))
    given = job.source.model_copy(update={"options": options or {}})
    snapshot = source.needs_snapshot(given)
    found = source.peek(given) if snapshot else source.inventory(given)
    return [(name, str(found.schema.field(name).type)) for name in found.schema.names]


def name_of(uri: str) -> str:
    """A job's name from the last part of a URI: `customers` of data/customers.csv.gz."""
    last = uri.rstrip("/").rpartition("/")[2].partition("?")[0].partition(".")[0]
    return _UNFIT.sub("-", last).strip("-._") or "job"


def default_template(columns: list[tuple[str, str]]) -> str:
    """A question about the first column of text, or about the first of all."""
    plain = [(name, kind) for name, kind in columns if not _MARKUP.search(name)]
    texts = [name for name, kind in plain if kind in _TEXT]
    chosen = (texts or [name for name, _ in plain or columns])[0]
    return f"What is this? {{{chosen}}}"


def job_text(
    columns: list[tuple[str, str]], *, name: str, uri: str, template: str, model: str, output: str
) -> str:
    """The job file, commented. Raises `ConfigError` where these make no job."""
    fields = _fields(name, uri, template, model, output)
    BatchJob.from_dict(fields)
    shown = [f"#   {column}: {kind}" for column, kind in columns[:MOST_COLUMNS]]
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
    """YAML of one line."""
    made: str = yaml.safe_dump([text], width=10**6, allow_unicode=True, default_flow_style=True)
    return made.strip()[1:-1]
