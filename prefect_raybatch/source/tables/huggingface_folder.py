"""Hugging Face datasets in a local folder, as `save_to_disk` of `datasets` writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.job.source import Source
from prefect_raybatch.source.filters import Filter
from prefect_raybatch.source.tables.base import TablePin, TableSource, said_plainly
from prefect_raybatch.source.tables.huggingface_rows import (
    ROWS_AT_ONCE,
    as_typed,
    choose_split,
    stored_type,
)
from prefect_raybatch.storage import is_remote, join


def open_saved(source: Source) -> TableSource:
    """A dataset in a folder, or with `source.split` one of several in it."""
    place = join(source.uris[0])
    if is_remote(place):
        raise ConfigError(
            f"source.format: datasets that save_to_disk wrote are opened in local folders; "
            f"of {place} name the files, data-*.arrow, with format: arrow"
        )
    folder, split = Path(place), None
    splits = _json(folder / "dataset_dict.json").get("splits")
    if isinstance(splits, list):
        names = [str(name) for name in splits if Path(str(name)).name == str(name)]
        split = choose_split(source.split, names, "source.split")
        if "+" in split:
            raise ConfigError(f"source.split: of the folder {place} one is read; name one")
        folder /= split
    elif source.split is not None:
        raise ConfigError(
            f"source.split: {place} holds one dataset, without splits (no dataset_dict.json); "
            "remove it"
        )
    fingerprint = _json(folder / "state.json").get("_fingerprint")
    if not fingerprint:
        raise SourceError(
            f"source.uri: {folder} holds no dataset as save_to_disk writes it (no state.json with "
            "a fingerprint); name the folder that was given to save_to_disk"
        )
    if source.version not in (None, fingerprint):
        raise SourceError(
            f"source.version: the dataset in {folder} has the fingerprint {fingerprint}, not "
            f"{source.version}: it was saved anew. Older ones are not kept there"
        )
    identity = place if split is None else f"{place}/{split}"
    pin = TablePin(format="huggingface", uri=place, id=identity, version=str(fingerprint))
    with said_plainly(f"source.uri: the Hugging Face dataset in {folder}"):
        return FolderSource(folder, pin)


def _json(path: Path) -> Mapping[str, Any]:
    """What a small file of JSON holds, {} where it is not there."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SourceError(f"source.uri: {path} cannot be read ({error})") from None
    return value if isinstance(value, dict) else {}


class FolderSource(TableSource):
    """A dataset in a folder, whose files are mapped into memory and not read at once."""

    def __init__(self, folder: Path, pin: TablePin) -> None:
        from datasets import Dataset

        self.pin = pin
        self._data = Dataset.load_from_disk(str(folder), keep_in_memory=False)
        for file in self._data.cache_files:
            if Path(file["filename"]).resolve().parent != folder.resolve():
                raise SourceError(
                    f"source.uri: {folder} names {file['filename']} as one of its own"
                )
        schema = self._data.features.arrow_schema
        self.schema = pa.schema([pa.field(f.name, stored_type(f.type)) for f in schema])
        self.rows = self._data.num_rows

    def batches(
        self, columns: Sequence[str] | None, filter: Filter | None
    ) -> Iterator[pa.RecordBatch]:
        names = list(columns or self.schema.names)
        what = f"source.uri: the Hugging Face dataset {self.pin.id}"
        with said_plainly(what):
            data, before = self._data.select_columns(names).with_format("arrow"), 0
            for table in data.iter(ROWS_AT_ONCE):
                rows = as_typed(what, table, [self.schema.field(name) for name in names], before)
                before += rows.num_rows
                yield from rows.to_batches()
