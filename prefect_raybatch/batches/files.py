"""Makes job fields from an OpenAI batch file, and one output file from the finished run."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from prefect_raybatch.batches.outputs import DATA_KIND, ERROR_KIND, AnswerLines
from prefect_raybatch.compile.job import compile_plan, read_spec
from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.job.faults import explain
from prefect_raybatch.job.group import Group
from prefect_raybatch.job.job_file import with_fields
from prefect_raybatch.job.openai_batch import BATCH_FORMAT
from prefect_raybatch.job.output import Output
from prefect_raybatch.job.source import Source
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.source.find import File, find
from prefect_raybatch.source.json_lines import line_blocks
from prefect_raybatch.source.openai_batch import COMPLETION_URL, EMBEDDING_URL
from prefect_raybatch.spec.options import HiddenOptions, StoreOptions
from prefect_raybatch.storage import open_store

_KEY_LENGTH = 24  # hex digits of the job's fingerprint that name a run


def batch_fields(
    source: str,
    output: str,
    names: list[str],
    changes: Mapping[str, object],
    options_of_block: Callable[[str], Mapping[str, object]],
) -> dict[str, Any]:
    """Copy a batch file to a folder beside the output file; return the fields of the job for it.

    `source` and `output` are the URIs of the two files. The copy is named by a hash of its content,
    so the same arguments give the same job. `names` are the model names that requests may contain;
    the first is the model that answers. `changes` are {field: value} of the user's `--set`.
    `options_of_block` returns the store options of a saved Prefect block. Raises `ConfigError`,
    `SourceError` and the errors of the stores.
    """
    if output.startswith(("http://", "https://")):
        raise ConfigError("-o: a URL cannot be written. Name a local or s3:// file")
    _split(output)
    place = f"{output}.run"
    fields: dict[str, Any] = {
        "name": "batch",
        "source": {"uri": source, "format": BATCH_FORMAT, "served_as": names},
        "prompt": {},
        "engine": {},
        "output": {"uri": place},
    }
    fields = with_fields(fields, changes)
    input_file = _valid(Source, fields["source"], "-i")
    written = _valid(Output, fields["output"], "-o")
    read_options, write_options = (
        {**(options_of_block(block) if block else {}), **options}
        for block, options in (
            (input_file.credentials_block, input_file.options),
            (written.credentials_block, written.options),
        )
    )
    _, files = find(replace(read_spec(input_file), options=HiddenOptions(read_options)))
    if len(files) != 1:
        raise SourceError(f"-i {source!r} has {len(files)} files. Name one file")
    requests, first_url = _copied(files[0], place, write_options)
    # The copy is beside the output, so it is reached in the same way.
    reach = {"options": written.options, "credentials_block": written.credentials_block}
    fields["source"] |= {"uri": requests, **reach}
    engine = fields["engine"]
    engine.get("endpoint", engine).setdefault("model", names[0])
    if first_url == EMBEDDING_URL:
        engine.setdefault("task", "embed")
    elif first_url == COMPLETION_URL and "endpoint" in engine:
        engine["endpoint"].setdefault("api", "completions")
    return fields


def _valid(group: type[Group], fields: object, where: str) -> Any:
    """Return a group of job fields; raise `ConfigError`, which names the option, if invalid."""
    try:
        return group.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(explain(error, group, where)) from None


def batch_key(fingerprint: str) -> str:
    """Return the run key for a batch file: `batch-` and the start of its job's fingerprint."""
    return f"batch-{fingerprint[:_KEY_LENGTH]}"


def write_output(output: str, run: str, options: StoreOptions) -> None:
    """Write the answers and errors of the run at `run` atomically to file `output`.

    `run` is the run directory; `options` are the store options of both places. Does nothing if the
    run is not finished.
    """
    folder, name = _split(output)
    store = open_store(run, options or None)
    ledger = Ledger(store)
    plan = need_plan(ledger)
    success = ledger.finished(plan)
    if success is not None:
        spec = compile_plan(plan)
        lines = AnswerLines.of(store, plan, success, spec.finish, spec.engine.model)
        lines.put(open_store(folder, options or None), name, DATA_KIND, ERROR_KIND)


def _split(output: str) -> tuple[str, str]:
    folder, slash, name = output.rpartition("/")
    if not name or (slash and folder.endswith(":/")):
        raise ConfigError(f"-o {output!r} is not a file. Name one, such as output.jsonl")
    return (folder or "/") if slash else ".", name


def _copied(file: File, place: str, options: StoreOptions) -> tuple[str, str | None]:
    """Copy a batch file, compressed and named by its content's hash, to folder `place`/inputs.

    `options` are the store options of `place`. Returns (URI of the copy, API path (`url`) of the
    first request that has one, or None).
    """
    digest, url, is_empty = hashlib.sha256(), None, True
    with tempfile.TemporaryDirectory() as scratch:
        local = Path(scratch) / "requests"
        with pa.CompressedOutputStream(str(local), "zstd") as out:
            for _, block in line_blocks(file):
                digest.update(block)
                out.write(block)
                is_empty = is_empty and not block.strip()
                url = url or _first_url(block)
        if is_empty:
            raise SourceError(f"{file.uri} has no requests. Write one object per line")
        store = open_store(f"{place}/inputs", options or None)
        name = f"{digest.hexdigest()}.jsonl.zst"
        store.put_file_if_absent(name, local)
        return f"{store.uri}/{name}", url


def _first_url(block: bytes) -> str | None:
    for line in block.split(b"\n"):
        with suppress(ValueError, RecursionError):
            request = json.loads(line)
            if isinstance(request, dict) and isinstance(request.get("url"), str):
                return str(request["url"])
    return None
