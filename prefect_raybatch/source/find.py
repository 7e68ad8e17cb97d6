"""Resolves source.uri: files, folders and globs, and the format that their names imply."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, CorruptRun, SourceError
from prefect_raybatch.job.checks import is_web, missing_path
from prefect_raybatch.job.openai_batch import BATCH_FORMAT
from prefect_raybatch.job.secrets import hide_users
from prefect_raybatch.job.trusted_places import check_links, url_check
from prefect_raybatch.ledger.layout import RESULT_FOLDERS
from prefect_raybatch.ledger.records import InputFile
from prefect_raybatch.source.hive import Values, path_values
from prefect_raybatch.source.places import OPENED, Places, detect_folder_kind, mark, saved_dataset
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.storage import (
    FileInfo,
    Store,
    contains,
    is_remote,
    join,
    open_store,
    split_glob,
)
from prefect_raybatch.storage.web import WebRules, WebStore
from prefect_raybatch.words import storable

ENDINGS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".br": "brotli"}
WITHIN = ("parquet", "arrow")  # formats with compression inside the file
DATABASES = (".db", ".sqlite", ".sqlite3", ".duckdb")
WORKBOOKS = (".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".numbers")
DOCUMENTS = (".docx", ".doc", ".pdf", ".odt", ".rtf", ".pptx", ".html", ".htm", ".md", ".xml")


Weights = tuple[tuple[int, int], ...]  # (rows, bytes) of consecutive ranges of rows
# Files that Windows adds to folders. Those of macOS and Linux have names that begin with a dot.
SYSTEM_FILES = ("thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "$recycle.bin")


@dataclass(frozen=True)
class Inventory:
    """The input of a run.

    `files` are in reading order. `schema` has the columns to read, with dictionary types decoded.
    `row_bytes` is the highest mean of uncompressed bytes per row in any file or copied block.
    `format` is the format of the source (parquet, csv, jsonl, arrow, dataset or a table format),
    even if `files` are a snapshot of it. `table` names the table and its version for `Plan.table`.
    `weights` are (rows, bytes) of consecutive row ranges that cover all rows, empty if unknown.
    `guessed`: the number of rows is estimated from a part of the input.
    """

    files: tuple[InputFile, ...]
    schema: pa.Schema
    row_bytes: float
    format: str
    table: Mapping[str, Any] | None = None
    weights: Weights = ()
    guessed: bool = False

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


@dataclass(frozen=True)
class Cut:
    """A part of a file that is read instead of the whole file.

    `content` holds whole rows, from byte `at` of the file on. In CSV the file's header line comes
    before them. `lead` applies to JSON Lines: the reader's first block is to be `lead` bytes longer
    than the others. Then its blocks end at the same places as when the whole file is read.
    """

    at: int
    content: bytes = field(repr=False)
    lead: int = 0


@dataclass(frozen=True)
class File:
    """A file of the input; `given` is the entry of source.uri that includes it.

    `named`: the entry is the path of the file, not a folder or a glob. `values` are the columns
    that the path supplies (`name=value` folders). `cut` is the part of the file to read, None for
    all.
    """

    store: Store
    info: FileInfo
    given: str
    named: bool
    values: Values = ()
    cut: Cut | None = None

    @cached_property
    def uri(self) -> str:
        if isinstance(self.store, WebStore):
            return self.store.uri
        return join(self.store.uri, self.info.path)

    def input(self, rows: int, footer: str | None = None, values: Values = ()) -> InputFile:
        """Return the file's entry in the plan, with `rows` rows to read.

        With `footer`, the digest of a Parquet footer, the change time and inode are recorded as
        well; the reader compares them to detect a changed file. `values` are the columns of the
        path that the reader adds.
        """
        made = replace(input_file(self.uri, self.info, rows), values=values)
        if footer is None:
            return made
        return replace(made, ctime_ns=self.info.ctime_ns, inode=self.info.inode, footer=footer)


def input_file(uri: str, info: FileInfo, rows: int) -> InputFile:
    """Return a file's entry in the plan, with `rows` rows to read."""
    return InputFile(uri=uri, size=info.size, etag=info.etag, mtime_ns=info.mtime_ns, rows=rows)


def detect_format(source: ReadSpec) -> str:
    """Return `source.format`, or infer it from a table's folder or from file extensions.

    Raises SourceError if there are no files, several formats or unknown extensions, and the errors
    of `table_format`.
    """
    table = table_format(source)
    if table is not None or source.format != "auto":
        return table or source.format
    return find(source)[0]


def needs_snapshot(source: ReadSpec) -> bool:
    """Return whether `source` is read through a Parquet snapshot.

    False only for Parquet files that are read in place: without a filter or sample, and not over
    http(s). Raises the errors of `detect_format`.
    """
    chosen = source.filter is not None or source.sample is not None
    in_place = not chosen and not any(map(is_web, source.uris))
    return not in_place or detect_format(source) != "parquet"


def table_format(source: ReadSpec) -> str | None:
    """Return the table format of `source`, None if files are to be read.

    It is the format that `source` names, or the one that the contents of its folder show. Raises
    the store's errors, and ConfigError if source.version, types or split do not apply to it.
    """
    found = source.table_format or (_by_look(source) if source.format == "auto" else None)
    if found is None and source.version is not None:
        raise ConfigError(
            f"source.version applies to tables ({', '.join(OPENED)}, ...), but source.uri holds "
            "files. Remove source.version"
        )
    if source.types and found not in (None, "sql"):
        raise ConfigError(
            f"source.types: a {found} table has types of its own. Remove source.types"
        )
    if source.split is not None and found != "huggingface":
        raise ConfigError(
            "source.split applies to Hugging Face datasets only: hf://datasets/OWNER/NAME, or a "
            "folder written by save_to_disk (with dataset_info.json and state.json, or "
            "dataset_dict.json). Remove source.split"
        )
    return found


def _by_look(source: ReadSpec) -> str | None:
    if len(source.uris) != 1 or is_web(source.uris[0]):
        return None
    root, pattern = _as_it_stands(source.uris[0], source.options)
    if pattern is not None or (ending(root)[0] and not _is_folder(root, source.uris[0])):
        return None
    store = open_store(root, source.options, links=True)
    return OPENED.get(detect_folder_kind(store) or "") or (
        "huggingface" if saved_dataset(store) else None
    )


def _is_folder(root: str, given: str) -> bool:
    return given.endswith("/") if is_remote(root) else os.path.isdir(root)


def find(source: ReadSpec) -> tuple[str, list[File]]:
    """Return (format, files sorted by URI) of a `source` that is not a table.

    Raises SourceError if there are no files, several formats, unknown extensions, file names that
    are not UTF-8, or two links to one file. Raises the store's errors as well.
    """
    kind, files = _choose(source, _list(source))
    _refuse_names(files)
    _refuse_links(files)
    return kind, files


def _list(source: ReadSpec) -> list[File]:
    """Return all files of `source`, sorted by URI.

    Raises SourceError in three cases: an entry of source.uri matches no file; it matches files of a
    table or run that must not be read as plain files (`Places.refuse`); two entries include the
    same file.
    """
    found: dict[str, File] = {}
    places = Places(source.options)
    for given in source.uris:
        if is_web(given):
            _add(found, [_by_web(given, source)], given)
            continue
        root, pattern = _as_it_stands(given, source.options)
        files = list(_expand(root, pattern, given, source.options, places))
        read = [f.uri for f in files if _may_be_read(f, source.format)]
        if read or not files:
            at = files[0].store.uri if files else root
            named = any(file.named for file in files)
            places.refuse(at, read, pattern is None and not named, named)
        if not files:
            raise SourceError(_nothing(given))
        check_links([file.uri for file in files])
        _add(found, files, given)
    return [found[uri] for uri in sorted(found)]


def _add(found: dict[str, File], files: Sequence[File], given: str) -> None:
    for file in files:
        before = found.setdefault(file.uri, file)
        if before is not file:
            raise SourceError(
                f"source.uri: {file.uri} is listed twice, by {hide_users(before.given)!r} and by "
                f"{hide_users(given)!r}, so its rows would be read twice. Remove one"
            )


def _by_web(given: str, source: ReadSpec) -> File:
    """Return the file at the URL `given`, after a request to its server for size and ETag.

    Raises SourceError, StoreUnavailable, and ConfigError for invalid headers in source.options.
    """
    headers = source.options.get("headers") or {}
    if not isinstance(headers, Mapping):
        raise ConfigError("source.options.headers must map header names to values")
    rules = WebRules(source.web.max_mb * 10**6, source.web.allow_private, url_check("source.uri"))
    store = WebStore(given, headers, rules)
    return File(store, store.stat(store.name), store.uri, named=True)


def _may_be_read(file: File, format: str) -> bool:
    format = "jsonl" if format == BATCH_FORMAT else format
    return file.named or format == "auto" or ending(file.info.path)[0] in (format, None)


def _refuse_names(files: Sequence[File]) -> None:
    """Raise SourceError for a file whose name is not UTF-8: the plan could not record it."""
    for file in files:
        if storable(file.uri) != file.uri:
            raise SourceError(
                f"source.uri: the name {file.uri!a} is not UTF-8, so the plan cannot record it. "
                "Rename the file or folder"
            )


def _refuse_links(files: Sequence[File]) -> None:
    """Raise SourceError if two paths are the same file, through a symbolic or hard link."""
    seen: dict[tuple[int | None, int], File] = {}
    for file in files:
        info = file.info
        if not info.inode:  # S3 and some file systems have no inode numbers
            continue
        other = seen.setdefault((info.device, info.inode), file)
        # Some network file systems give numbers that are not unique: these must agree as well.
        same = (info.size, info.mtime_ns) == (other.info.size, other.info.mtime_ns)
        if other is not file and same:
            raise SourceError(
                f"source.uri: {other.uri} and {file.uri} are the same file, reached twice by a "
                "link, so its rows would be read twice. Remove the link, or change source.uri to "
                "include only one of them"
            )


def reaches(given: str, output: str) -> bool:
    """Return whether `given`, an entry of source.uri, would read results of runs below `output`."""
    if is_web(given):
        return False
    root, pattern = split_glob(given) if is_remote(given) else _as_it_stands(given, {})
    if not contains(root, output):
        return False
    if pattern is None:
        return True
    outer, inner = (
        uri if is_remote(uri) else os.path.realpath(uri) for uri in (root, join(output))
    )
    below = [part for part in inner[len(outer) :].split("/") if part]
    results = ([*below, None, kind, "part-00000.parquet"] for kind in RESULT_FOLDERS.values())
    return any(matches(path, pattern.split("/")) for path in results)


def check_planned(files: Sequence[InputFile], source: ReadSpec, snapshot: bool) -> None:
    """Raise CorruptRun if the plan lists an input file that the run may not read.

    A plan may be forged, and its files are read with the rights of whoever continues the run. So
    source.uri must cover each file; if the files are a `snapshot`, they must be in the run
    directory. Raises ConfigError for a symbolic link out of the folders that the operator
    allows.
    """
    places = [] if snapshot else [_as_it_stands(uri, source.options) for uri in source.uris]
    if not snapshot:
        check_links([file.uri for file in files])
    for file in files:
        if snapshot:
            inside = not file.uri.startswith("/") and ".." not in file.uri.split("/")
            inside = inside and "://" not in file.uri
        else:
            inside = any(_is_within(file.uri, *place) for place in places)
        if not inside:
            where = "the run directory" if snapshot else "source.uri"
            raise CorruptRun(
                f"plan.json lists the input file {file.uri!r}, which is not in {where}. The run "
                "was planned for another input, or its plan was changed. Start a new run key"
            )


def _is_within(uri: str, root: str, pattern: str | None) -> bool:
    """Return whether the file `uri` is `root`, below it, or matched by the glob `pattern` below it.

    Symbolic links below `root` count as part of the input and are not resolved; `root` counts both
    as written and with its links resolved. False for a `uri` with `.` or `..` in it.
    """
    if {".", ".."} & {*uri.split("/")}:
        return False
    uri = uri if is_remote(uri) else os.path.abspath(uri)  # it is read from the working directory
    roots = [root] if is_remote(root) else [root, os.path.realpath(root)]
    for outer in roots:
        inside = f"{outer.rstrip('/')}/"
        below = uri[len(inside) :] if uri.startswith(inside) else ""
        if pattern is None and (uri == outer or below):
            return True
        if pattern is not None and below and matches(below.split("/"), pattern.split("/")):
            return True
    return False


def _nothing(given: str) -> str:
    root, pattern = split_glob(given)
    if pattern is not None:
        if not is_remote(root) and not os.path.isdir(root):
            return f"source.uri: {missing_path(root)}. Check the path"
        return (
            f"source.uri: no file in {root} matches {pattern!r}. Check the folder and the pattern"
        )
    if not is_remote(given) and os.path.isdir(root):
        return (
            f"source.uri: folder {given!r} has no files to read. Check the path; hidden files, "
            "names that begin with _ and system files such as Thumbs.db are ignored"
        )
    if is_remote(given):
        return f"source.uri: {given!r} does not exist. Check the path and the bucket"
    dollar = ". Variables such as $HOME are filled in only in a job file" if "$" in given else ""
    return f"source.uri: {missing_path(given)}. Check the path{dollar}"


def _as_it_stands(given: str, options: Mapping[str, object]) -> tuple[str, str | None]:
    """Split an entry of source.uri into (root, glob pattern or None), like `split_glob`.

    Brackets in the name of an existing file or folder are taken literally. `*` and `?` need no such
    exception: as patterns they also match themselves.
    """
    root, pattern = split_glob(given)
    parts = pattern.split("/") if pattern else []
    while parts and not set("*?") & set(parts[0]):
        if "[" in parts[0] and not _exists(root, parts[0], options):
            break
        root = join(root, parts.pop(0))
    return root, "/".join(parts) or None


def _exists(root: str, name: str, options: Mapping[str, object]) -> bool:
    if not is_remote(root):
        return os.path.exists(join(root, name))
    store = open_store(root, options, links=True)
    with suppress(FileNotFoundError):
        store.stat(name)
        return True
    return next(store.list(name), None) is not None


def _expand(
    root: str, pattern: str | None, given: str, options: Mapping[str, object], places: Places
) -> Iterator[File]:
    """Yield the files of one entry of source.uri.

    Notes in `places` each folder that its files show to be a table or a run.
    """
    parts = pattern.split("/") if pattern else []
    folder, _, name = root.rpartition("/")
    if not parts and name and not folder.endswith(":/") and not given.endswith("/"):
        parent = open_store(folder or "/", options, links=True)
        with suppress(FileNotFoundError):
            found = parent.stat(name)
            yield File(parent, found, given, named=True, values=path_values(folder, ""))
            return
    store = open_store(root, options, links=True)
    for info in store.list("", recursive=len(parts) != 1 or parts == ["**"]):
        shown = mark(info.path)
        if shown:
            places.note(join(store.uri, shown[0]) if shown[0] else store.uri, shown[1])
        path = info.path.split("/")
        if matches(path, parts) if parts else not any(hidden(part) for part in path):
            values = path_values(root, "/".join(path[:-1]))
            yield File(store, info, given, named=False, values=values)


def ending(name: str) -> tuple[str | None, str | None]:
    """Return (format, compression) by a file name's extensions; either is None if unknown."""
    stem, dot, last = name.lower().rpartition(".")
    compression = COMPRESSIONS.get(dot + last)
    if compression:
        dot, last = stem.rpartition(".")[1:]
    found = ENDINGS.get(dot + last)
    if found in WITHIN and compression:
        return None, compression
    return found, compression


def _choose(source: ReadSpec, files: list[File]) -> tuple[str, list[File]]:
    """Return the format and the files to read.

    With source.format, files in folders and globs are dropped if their extension implies another
    format. Without it, several formats or an unknown extension raise SourceError.
    """
    if source.format != "auto":
        chosen = [f for f in files if _may_be_read(f, source.format)]
        if not chosen:
            raise SourceError(
                f"source.format is {source.format}, but no file of {source.uris[0]!r} has an "
                f"extension of that format (the first is {files[0].uri}). Correct source.format or "
                "source.uri"
            )
        return source.format, chosen
    by_format: dict[str | None, list[File]] = {}
    for file in files:
        by_format.setdefault(ending(file.info.path)[0], []).append(file)
    unknown = by_format.pop(None, [])
    if unknown:
        read = [file for found in by_format.values() for file in found]
        raise SourceError(
            f"source.format: {some(unknown)}: {_unreadable(unknown[0])}{_without(unknown[0], read)}"
        )
    if len(by_format) > 1:
        kinds = "; ".join(f"{kind}: {some(found)}" for kind, found in by_format.items())
        raise SourceError(
            f"source.uri has files of several formats ({kinds}). Set source.format to read one of "
            "them and ignore the others"
        )
    kind, chosen = next(iter(by_format.items()))
    return str(kind), chosen


def _unreadable(file: File) -> str:
    """Return, for an error message, why a file name does not imply a format, and what to do."""
    name = file.info.path.lower()
    if name.endswith((".snappy", ".sz", ".zip", ".7z", ".xz")):
        return (
            "this compression cannot be read as a stream. Compress with gzip, bz2, zstd, lz4 or "
            "brotli"
        )
    if name.endswith(DATABASES):
        duckdb = name.endswith(".duckdb")
        needs = ', which needs pip install "prefect-raybatch[duckdb]",' if duckdb else ""
        return (
            "a database cannot be read as a file. Set source.uri to "
            f"{'duckdb' if duckdb else 'sqlite'}:////FOLDER/FILE{needs} and source.query to a "
            "SELECT"
        )
    if name.endswith(WORKBOOKS):
        return "workbooks are not supported. Save the sheet as CSV (UTF-8) or Parquet"
    if name.endswith(DOCUMENTS):
        return "documents are not supported. Save the content as CSV, JSON Lines or Parquet"
    return (
        "the extension does not show the format. Set source.format to parquet, csv, jsonl or arrow"
    )


def database_of_file(path: str) -> str | None:
    """Return "sqlite" or "duckdb" if a local file begins like such a database; else None."""
    if not os.path.isfile(path):
        return None
    with suppress(OSError), open(path, "rb") as file:
        start = file.read(16)
        if start == b"SQLite format 3\0":
            return "sqlite"
        if start[8:12] == b"DUCK":
            return "duckdb"
    return None


def _without(file: File, read: Sequence[File]) -> str:
    """Return, for an error message, how to exclude `file` from its folder or glob.

    "" if source.uri names the file itself. `read` are the files that can be read.
    """
    if file.named:
        return ""
    if not read or split_glob(file.given)[1] is not None:
        return ", or exclude such files with a glob"
    first = read[0].info.path
    dot = first.find(".", first.rfind("/") + 1)
    deep = "**/" if any("/" in other.info.path for other in read) else ""
    glob = f"{file.given.rstrip('/')}/{deep}*{first[dot:]}"
    return f", or exclude such files with a glob: source.uri: {glob}"


def some(files: Sequence[File]) -> str:
    """Return, for a message, the URIs of the first two files and the number of the others."""
    more = f" and {len(files) - 2} more" if len(files) > 2 else ""
    return ", ".join(file.uri for file in files[:2]) + more


def hidden(part: str) -> bool:
    """Return whether a name is hidden: writers and desktops leave such files beside the data.

    Examples are _SUCCESS, _temporary, .part-0.crc; .DS_Store, Thumbs.db, ~$open.xlsx.
    """
    return part.startswith(("_", ".", "~$")) or part.lower() in SYSTEM_FILES


def matches(path: Sequence[str | None], pattern: Sequence[str]) -> bool:
    """Return whether a path matches a glob, both given as their parts between slashes.

    `**` stands for any number of folders; as the last part, also for files. A hidden name is
    matched only by a part that is itself a hidden name, e.g. `_*`. A part of `path` that is None
    stands for any name that is not hidden.
    """
    if not pattern:
        return not path
    if pattern[0] == "**":
        if len(pattern) == 1:
            return bool(path) and not any(hidden(part) for part in path if part is not None)
        return matches(path, pattern[1:]) or (
            bool(path) and not hidden(path[0] or "") and matches(path[1:], pattern)
        )
    if not path or (hidden(path[0] or "") and not hidden(pattern[0])):
        return False
    return (path[0] is None or fnmatch.fnmatchcase(path[0], pattern[0])) and matches(
        path[1:], pattern[1:]
    )
