"""Records which shares of the input (some small files, or a part of a large one) were copied.

The records let an interrupted copy resume. A record's name is a hash of everything that the copy
depends on: the share's bytes, how they are read, the types known before, and the code. Files that a
record lists are not deleted until there is a plan, because another copy may be using them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import pyarrow as pa
from pydantic import TypeAdapter

from prefect_raybatch.errors import CorruptRun, RayBatchError
from prefect_raybatch.ledger.layout import COPIED, INPUT
from prefect_raybatch.ledger.plan_tables import decode_schema, encode_schema
from prefect_raybatch.ledger.record_files import put_record, read_record
from prefect_raybatch.ledger.records import InputFile, dump
from prefect_raybatch.ledger.strict import Count, Number, StrictRecord, read_json
from prefect_raybatch.source.copies import Copied
from prefect_raybatch.source.cuts import Stretch
from prefect_raybatch.source.find import input_file
from prefect_raybatch.storage import Store

log = logging.getLogger(__name__)

CopyShare = tuple[Stretch, ...]


@dataclass(frozen=True)
class _CopyRecord(StrictRecord):
    """The record of a share that was copied without errors; `Copied` explains the fields.

    `schema`, and the types of each file in `types`, are Arrow schemas in base64.
    """

    files: tuple[InputFile, ...]
    schema: str
    types: tuple[tuple[str, str], ...]
    known: tuple[str, ...]
    row_bytes: Number
    read: Count
    part: bool

    @classmethod
    def of(cls, one: Copied) -> _CopyRecord:
        types = tuple((uri, encode_schema(_schema(kinds))) for uri, kinds in one.types)
        schema = encode_schema(one.schema)
        return cls(one.files or (), schema, types, one.known, one.row_bytes, one.read, one.part)

    def share(self) -> Copied:
        types = tuple((uri, _kinds(decode_schema(text))) for uri, text in self.types)
        schema = decode_schema(self.schema)
        row_bytes = float(self.row_bytes)
        return Copied(
            self.files, schema, types, self.known, row_bytes, read=self.read, part=self.part
        )


def copy_key(
    read_as: str,
    share: CopyShare,
    known: Mapping[str, pa.DataType],
    of_files: Mapping[str, Mapping[str, pa.DataType]],
) -> str:
    """Return the name of the record for the copy of a share (some files, or a part of one).

    `read_as` describes how the files are read, and by which code. `known` are the column types
    known before the copy; `of_files` maps file URIs to their column types.
    """
    told = [
        read_as,
        [_bytes_identity(stretch) for stretch in share],
        [(name, str(kind)) for name, kind in known.items()],
        [
            (uri, [(name, str(kind)) for name, kind in types.items()])
            for uri, types in sorted(of_files.items())
        ],
    ]
    return hashlib.sha256(dump(told)).hexdigest()


def read_copy_record(store: Store, key: str) -> Copied | None:
    """Return the recorded outcome of copying a share; None if it has to be copied.

    It has to be copied if there is no record `key`, or if the record is damaged or lists files
    that changed.
    """
    path = _path(key)
    try:
        record = read_json(_RECORD, read_record(store, path), path)
        for file in record.files:
            if not file.uri.startswith(f"{INPUT}/"):
                raise CorruptRun(f"{path} lists {file.uri}, which is not in {INPUT}/")
            if input_file(file.uri, store.stat(file.uri), file.rows) != file:
                return None
        return record.share()
    except FileNotFoundError:
        return None
    except CorruptRun as error:
        log.warning(
            "Copying a part of the input again, because the record of its copy is damaged: %s",
            error,
        )
        return None


def write_copy_record(store: Store, key: str, one: Copied) -> None:
    """Record under `key` (from `copy_key`) that a share of the input was copied, as `one` says.

    Writes nothing if the copy failed: `files` is None, or `unfit` or `error` is set. Raises the
    store's errors.
    """
    if one.files is not None and one.unfit is None and one.error is None:
        put_record(store, _path(key), dump(asdict(_CopyRecord.of(one))))


def forget_copied(store: Store, attempt: str, named: Collection[str]) -> None:
    """Delete what the copy of the input left in the run directory and the plan does not use.

    These are the records of copied shares, and files that this attempt wrote but `named`, the paths
    that the plan lists, does not have. The source is not touched. Call it after the plan is
    written. Errors of the store are ignored.
    """
    ours = (f"{COPIED}/", f"{INPUT}/{attempt}-")
    with suppress(RayBatchError):  # only tidiness
        left = [i.path for i in store.list(INPUT) if i.path.startswith(ours)]
        store.delete([path for path in left if path not in named])


def _bytes_identity(stretch: Stretch) -> Sequence[object]:
    """Return values that identify the bytes of a stretch (whole rows of a file).

    They include the file's change time (ctime), which no program can set back.
    """
    file, info = stretch.file, stretch.file.info
    seen = [info.size, info.etag, info.mtime_ns, info.ctime_ns]
    place = [stretch.start, stretch.stop, stretch.lead, stretch.head.hex()]
    return [file.uri, *seen, *place, list(file.values)]


def _schema(kinds: Mapping[str, pa.DataType]) -> pa.Schema:
    return pa.schema(list(kinds.items()))


def _kinds(schema: pa.Schema) -> dict[str, pa.DataType]:
    return dict(zip(schema.names, schema.types, strict=True))


def _path(key: str) -> str:
    return f"{COPIED}/{key}.json"


_RECORD = TypeAdapter(_CopyRecord)
