"""Hugging Face datasets in a folder, local or remote, written by `save_to_disk` of `datasets`."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, CorruptRun, SourceError
from prefect_raybatch.ledger.part_files import local_disk
from prefect_raybatch.source.filters import Filter
from prefect_raybatch.source.tables.base import TablePin, TableSource, translate_errors
from prefect_raybatch.source.tables.huggingface_rows import (
    ROWS_AT_ONCE,
    as_typed,
    choose_split,
    stored_type,
)
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.storage import Store, is_remote, join, open_store
from prefect_raybatch.storage.proof import CHUNK


def open_saved(source: ReadSpec) -> TableSource:
    """Open a dataset written by `save_to_disk`, or the split of it that source.split names."""
    place = join(source.uris[0])
    store = open_store(place, source.options)
    what = f"source.uri: the Hugging Face dataset in {place}"
    split = None
    with translate_errors(what):
        splits = _json(store, "dataset_dict.json").get("splits")
    if isinstance(splits, list):
        names = [str(name) for name in splits if Path(str(name)).name == str(name)]
        split = choose_split(source.split, names, "source.split")
        if "+" in split:
            raise ConfigError(
                f"source.split: only one split of the folder {place} can be read. Choose one"
            )
        store = store.sub(split)
    elif source.split is not None:
        raise ConfigError(
            f"source.split: {place} has one dataset without splits (no dataset_dict.json). Remove "
            "source.split"
        )
    with translate_errors(what):
        state = _json(store, "state.json")
    fingerprint = state.get("_fingerprint")
    folder = place if split is None else f"{place}/{split}"
    if not fingerprint:
        raise SourceError(
            f"source.uri: no dataset written by save_to_disk in {folder} (no state.json with a "
            "fingerprint). Set it to the folder that was passed to save_to_disk"
        )
    if source.version not in (None, fingerprint):
        raise SourceError(
            f"source.version: the dataset in {folder} has the fingerprint {fingerprint}, not "
            f"{source.version}: it was saved again, and earlier ones are not kept. Correct or "
            "remove source.version"
        )
    pin = TablePin(format="huggingface", uri=place, id=folder, version=str(fingerprint))
    with translate_errors(what):
        if is_remote(place):
            return RemoteFolderSource(store, state, pin)
        return FolderSource(Path(folder), pin)


def _json(store: Store, name: str) -> Mapping[str, Any]:
    """Return the content of a small JSON file, {} if it does not exist."""
    try:
        value = json.loads(store.read(name, INFO_BYTES))
    except FileNotFoundError:
        return {}
    except (CorruptRun, ValueError) as error:  # CorruptRun: the file is larger than INFO_BYTES
        raise SourceError(
            f"source.uri: {store.uri}/{name} cannot be read ({error}). Save the dataset again with "
            "save_to_disk"
        ) from None
    return value if isinstance(value, dict) else {}


def _streamed(
    what: str, data: Any, columns: Sequence[pa.Field], before: int
) -> Iterator[pa.RecordBatch]:
    """Yield rows of a `datasets.Dataset` with the given columns.

    `before` is the number of rows read earlier, for errors.
    """
    names = [field.name for field in columns]
    for table in data.select_columns(names).with_format("arrow").iter(ROWS_AT_ONCE):
        rows = as_typed(what, table, list(columns), before)
        before += rows.num_rows
        yield from rows.to_batches()


INFO_BYTES = 64 << 20  # most bytes of a JSON file that describes a dataset


class FolderSource(TableSource):
    """A dataset in a local folder, whose files are memory-mapped, not loaded."""

    def __init__(self, folder: Path, pin: TablePin) -> None:
        from datasets import Dataset

        self.pin = pin
        self._data = Dataset.load_from_disk(str(folder), keep_in_memory=False)
        for file in self._data.cache_files:
            if Path(file["filename"]).resolve().parent != folder.resolve():
                raise SourceError(
                    f"source.uri: {folder} lists {file['filename']} as one of its files, which is "
                    "outside the folder. Save the dataset again with save_to_disk"
                )
        schema = self._data.features.arrow_schema
        self.schema = pa.schema([pa.field(f.name, stored_type(f.type)) for f in schema])
        self.rows = self._data.num_rows

    def batches(
        self, columns: Sequence[str] | None, filter: Filter | None
    ) -> Iterator[pa.RecordBatch]:
        names = list(columns or self.schema.names)
        what = f"source.uri: the Hugging Face dataset {self.pin.id}"
        with translate_errors(what):
            yield from _streamed(what, self._data, [self.schema.field(n) for n in names], 0)


class RemoteFolderSource(TableSource):
    """A dataset in a folder of a store, whose files are downloaded to TMPDIR one by one."""

    def __init__(self, store: Store, state: Mapping[str, Any], pin: TablePin) -> None:
        from datasets import Features

        self.pin, self._store = pin, store
        self._files = [str(file.get("filename")) for file in state.get("_data_files") or ()]
        for name in self._files:
            if Path(name).name != name:
                raise SourceError(
                    f"source.uri: {store.uri} lists {name} as one of its files, which is outside "
                    "the folder. Save the dataset again with save_to_disk"
                )
        features = _json(store, "dataset_info.json").get("features")
        if features is None:
            raise SourceError(
                f"source.uri: {store.uri} does not record its columns (dataset_info.json, "
                "features). Save it again with save_to_disk"
            )
        schema = Features.from_dict(features).arrow_schema
        self.schema = pa.schema([pa.field(f.name, stored_type(f.type)) for f in schema])

    def batches(
        self, columns: Sequence[str] | None, filter: Filter | None
    ) -> Iterator[pa.RecordBatch]:
        from datasets import Dataset

        fields = [self.schema.field(name) for name in columns or self.schema.names]
        what = f"source.uri: the Hugging Face dataset {self.pin.id}"
        with translate_errors(what), tempfile.TemporaryDirectory(prefix="raybatch-") as folder:
            before = 0
            for name in self._files:
                path = Path(folder, name)
                with self._store.open(name) as stream, local_disk(), path.open("wb") as file:
                    shutil.copyfileobj(stream, file, CHUNK)
                data = Dataset.from_file(str(path))
                yield from _streamed(what, data, fields, before)
                before += data.num_rows
                del data
                path.unlink()
