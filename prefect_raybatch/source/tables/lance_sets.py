"""Lance datasets through the `pylance` library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from prefect_raybatch.errors import SourceError
from prefect_raybatch.source.filters import Filter
from prefect_raybatch.source.tables.base import (
    Scrub,
    TablePin,
    TableSource,
    check_own_files,
    moment_of,
    translate_errors,
)
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.storage import join, object_store_options, table_settings
from prefect_raybatch.storage.library_errors import failure_in

if TYPE_CHECKING:
    from lance import LanceDataset

ABSENT = "was not found"  # part of the library's error for a missing dataset


def open_lance(source: ReadSpec) -> TableSource:
    """Open a Lance dataset in a folder, local or on S3, at source.version (None: newest).

    Raises SourceError for a missing dataset or version.
    """
    import lance

    uri = join(source.uris[0])
    keys = table_settings(uri, source.options)
    scrub = keys.scrub if keys else str
    what = f"source.uri: the Lance dataset {uri}"

    def opened(version: int | str | None) -> LanceDataset:
        return lance.dataset(uri, version=version, storage_options=object_store_options(keys))

    with translate_errors(what, scrub):
        try:
            newest = opened(None)
        except ValueError as error:
            if ABSENT not in str(error):
                raise
            raise SourceError(
                f"source.uri: no Lance dataset in {uri} (no _versions/). Set it to the folder of "
                "the dataset, and check the path and the bucket"
            ) from None
        versions = {
            entry["version"]: _utc(cast(datetime, entry["timestamp"]))
            for entry in newest.versions()
        }
        data = newest if source.version is None else _pinned(source.version, uri, versions, opened)
        return LanceSource(data, uri, versions.get(data.version), scrub)


def _pinned(
    version: str,
    uri: str,
    versions: Mapping[int, datetime],
    opened: Callable[[int | str], LanceDataset],
) -> LanceDataset:
    """Return the dataset at a version number, a tag, or as it was at a time.

    `versions` are the times of all versions; `opened` opens one. Raises SourceError if no
    version matches.
    """
    when = None if version.isdecimal() else moment_of(version)
    chosen: int | str = int(version) if version.isdecimal() else version
    if when is not None:
        before = [number for number, made in versions.items() if made <= when]
        chosen = max(before, default=0)
    try:
        return opened(chosen)
    except ValueError as error:
        if failure_in(error) != "gone":
            raise
        raise SourceError(
            f"source.version: {uri} has no version or tag {version} (versions: {min(versions)} to "
            f"{max(versions)}, the first of {versions[min(versions)]:%Y-%m-%d %H:%M:%S} UTC). "
            "Choose another; cleanup removes old ones"
        ) from None


def _files(data: LanceDataset, uri: str) -> Iterator[str]:
    """Yield all locations where the dataset's files may be: its folder and its base folders."""
    bases = [str(base.path) for base in data.base_paths().values()]
    yield from bases
    for fragment in data.get_fragments():
        for file in fragment.data_files():
            yield f"{uri}/data/{file.path}"
            for base in bases:
                yield from (f"{base}/{file.path}", f"{base}/data/{file.path}")


def _utc(when: datetime) -> datetime:
    """Return a time in UTC: the library returns local time without a zone."""
    return when.astimezone(UTC)


class LanceSource(TableSource):
    """A Lance dataset at a version; rows come in the order of its fragments."""

    def __init__(
        self, data: LanceDataset, uri: str, made: datetime | None, scrub: Scrub = str
    ) -> None:
        self._data, self._scrub = data, scrub
        self.pin = TablePin(
            format="lance",
            uri=uri,
            id=uri,  # a dataset has no permanent id
            version=str(data.version),
            made=None if made is None else made.isoformat(),
        )
        check_own_files(uri, _files(data, uri))
        self.schema = data.schema
        self.rows = data.count_rows()

    def batches(
        self, columns: Sequence[str] | None, filter: Filter | None
    ) -> Iterator[pa.RecordBatch]:
        where = filter.sql(self.schema, quote="`") if filter else None
        names = list(columns or self.schema.names)
        what = f"source.uri: the Lance dataset {self.pin.uri} at version {self.pin.version}"
        with translate_errors(what, self._scrub):
            yield from self._data.to_batches(columns=names, filter=where)
