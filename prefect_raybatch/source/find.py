"""What source.uri stands for: files, folders and globs, and the format their names tell."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from prefect_raybatch.errors import SourceError
from prefect_raybatch.job import Source
from prefect_raybatch.records import InputFile
from prefect_raybatch.storage import FileInfo, Store, is_remote, join, open_store, split_glob

ENDINGS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


@dataclass(frozen=True)
class Inventory:
    """What a run reads.

    `files` in reading order; `schema` of the columns read, dictionary types decoded; `row_bytes`
    the largest mean of uncompressed bytes a row over the files; `format` parquet, csv, jsonl or
    dataset (of the source, also where the files are a snapshot of it).
    """

    files: tuple[InputFile, ...]
    schema: pa.Schema
    row_bytes: float
    format: str

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


@dataclass(frozen=True)
class File:
    """A file found; `given` is the entry of source.uri, `named` when that is the file itself."""

    store: Store
    info: FileInfo
    given: str
    named: bool

    @property
    def uri(self) -> str:
        return join(self.store.uri, self.info.path)

    def input(self, rows: int) -> InputFile:
        """The file as the plan names it, of which a run reads `rows` rows."""
        return input_file(self.uri, self.info, rows)


def input_file(uri: str, info: FileInfo, rows: int) -> InputFile:
    return InputFile(uri=uri, size=info.size, etag=info.etag, mtime_ns=info.mtime_ns, rows=rows)


def detect_format(source: Source) -> str:
    """parquet, csv or jsonl: `source.format`, or by the endings of the files.

    Raises SourceError when nothing is found, for a mixture and for unknown endings, and the
    store's errors.
    """
    if source.format != "auto":
        return source.format
    return find(source)[0]


def needs_snapshot(source: Source) -> bool:
    """Whether `source` is read through a Parquet snapshot. Raises as `detect_format`."""
    return detect_format(source) != "parquet"


def find(source: Source) -> tuple[str, list[File]]:
    """The format of `source` and its files, by name. Raises as `detect_format`."""
    return _choose(source, _list(source))


def _list(source: Source) -> list[File]:
    """All files of `source`, by name. Raises SourceError when an entry gives none."""
    found: dict[str, File] = {}
    for given in source.uris:
        files = list(_expand(given, source.options))
        if not files:
            raise SourceError(_nothing(given))
        for file in files:
            before = found.setdefault(file.uri, file)
            if before is not file:
                raise SourceError(
                    f"source.uri: {file.uri} is listed twice, by {before.given!r} and by "
                    f"{given!r}; its rows would be read twice. Name it once."
                )
    return [found[uri] for uri in sorted(found)]


def _nothing(given: str) -> str:
    if split_glob(given)[1] is not None:
        return f"source.uri: no file matches {given!r}; check the folder and the pattern"
    if not is_remote(given) and os.path.isdir(split_glob(given)[0]):
        return (
            f"source.uri: folder {given!r} holds no files to read (hidden ones and those "
            "beginning with _ are left out)"
        )
    return f"source.uri: {given!r} does not exist; check the path (and the bucket)"


def _expand(given: str, options: dict[str, Any]) -> Iterator[File]:
    """The files one entry of source.uri stands for."""
    root, pattern = split_glob(given)
    if pattern is not None:
        parts = pattern.split("/")
        store = open_store(root, options, links=True)
        for info in store.list("", recursive=len(parts) > 1 or parts == ["**"]):
            if _matches(info.path.split("/"), parts):
                yield File(store, info, given, named=False)
        return
    folder, _, name = root.rpartition("/")
    if name and not folder.endswith(":/") and not given.endswith("/"):
        parent = open_store(folder or "/", options, links=True)
        with suppress(FileNotFoundError):
            yield File(parent, parent.stat(name), given, named=True)
            return
    store = open_store(root, options, links=True)
    for info in store.list():
        if not any(_hidden(part) for part in info.path.split("/")):
            yield File(store, info, given, named=False)


def _hidden(part: str) -> bool:
    """What writers leave beside the data: _SUCCESS, _temporary, .part-0.crc."""
    return part.startswith(("_", "."))


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Glob match part by part; `**` stands for any number of folders (at the end: also files)."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        if len(pattern) == 1:
            return bool(path) and not any(_hidden(part) for part in path)
        return _matches(path, pattern[1:]) or (
            bool(path) and not _hidden(path[0]) and _matches(path[1:], pattern)
        )
    if not path or (_hidden(path[0]) and not _hidden(pattern[0])):
        return False
    return fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


def ending(name: str) -> tuple[str | None, str | None]:
    """Format and compression that a file name tells, each None when it does not."""
    stem, dot, last = name.lower().rpartition(".")
    compression = COMPRESSIONS.get(dot + last)
    if compression:
        dot, last = stem.rpartition(".")[1:]
    found = ENDINGS.get(dot + last)
    if found == "parquet" and compression:
        return None, compression
    return found, compression


def _choose(source: Source, files: list[File]) -> tuple[str, list[File]]:
    """The format and the files of it; what `_list` found in folders may be left out."""
    if source.format != "auto":
        chosen = [f for f in files if f.named or ending(f.info.path)[0] in (source.format, None)]
        if not chosen:
            raise SourceError(
                f"source.format is {source.format}, but no file of {source.uris[0]!r} ends like "
                f"one; the first is {files[0].uri}"
            )
        return source.format, chosen
    by_format: dict[str | None, list[File]] = {}
    for file in files:
        by_format.setdefault(ending(file.info.path)[0], []).append(file)
    unknown = by_format.pop(None, [])
    if unknown:
        raise SourceError(
            f"source.format: {some(unknown)}: the ending does not tell the format; set "
            "source.format to parquet, csv or jsonl, or leave such files out with a glob"
        )
    if len(by_format) > 1:
        kinds = "; ".join(f"{kind}: {some(found)}" for kind, found in by_format.items())
        raise SourceError(
            f"source.uri holds files of several formats ({kinds}); set source.format to read "
            "those of one and leave out the others"
        )
    kind, chosen = next(iter(by_format.items()))
    return str(kind), chosen


def some(files: Sequence[File]) -> str:
    more = f" and {len(files) - 2} more" if len(files) > 2 else ""
    return ", ".join(file.uri for file in files[:2]) + more
