"""Files of Iceberg tables on Google Cloud Storage and Azure: pyiceberg's file access over `Store`.

pyiceberg's own clients support neither all of source.options nor the servers of the tests, and its
client from Arrow tries for more than ten minutes if it has no credentials.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import pyarrow as pa
from pyiceberg.io import SCHEMA_TO_FILE_IO, FileIO, InputFile, OutputFile

from prefect_raybatch.schemes import EXTRAS, STORES, options_for
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import Store, open_store

OPTIONS_KEY = "raybatch.options"  # names an entry of `_known`: properties must hold no secrets
COPY_BYTES = 16 * 2**20
_known: dict[str, StoreOptions] = {}


def cloud_properties(options: StoreOptions) -> dict[str, str]:
    """Make pyiceberg read gs:// and az:// with `CloudFiles`; return the properties that it needs.

    They hold no secrets, only a key (a hash) by which `CloudFiles` finds `options` in this process.
    A malicious table can override that key in its own properties. It can then only select options
    that this process already has, or no options; it cannot name a server.
    """
    name = f"{__name__}.{CloudFiles.__name__}"
    SCHEMA_TO_FILE_IO.update(
        {scheme: [name] for scheme, store in STORES.items() if store in EXTRAS}
    )
    text = json.dumps(dict(options), sort_keys=True, default=repr)
    key = hashlib.sha256(text.encode()).hexdigest()
    _known[key] = dict(options)
    return {OPTIONS_KEY: key}


class CloudFiles(FileIO):
    """pyiceberg's `FileIO` over `Store`: pyarrow reads and writes local copies of the files."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        super().__init__(dict(properties))
        self._options = _known.get(str(properties.get(OPTIONS_KEY)), {})

    def new_input(self, location: str) -> InputFile:
        return _File(location, *self._place(location))

    def new_output(self, location: str) -> OutputFile:
        return _File(location, *self._place(location))

    def delete(self, location: str | InputFile | OutputFile) -> None:
        store, path = self._place(location if isinstance(location, str) else location.location)
        store.delete([path])

    def _place(self, location: str) -> tuple[Store, str]:
        folder, _, name = location.rpartition("/")
        return open_store(folder, options_for(folder, self._options)), name


class _File(InputFile, OutputFile):
    def __init__(self, location: str, store: Store, path: str) -> None:
        super().__init__(location)
        self._store, self._path = store, path

    def __len__(self) -> int:
        return self._store.stat(self._path).size

    def exists(self) -> bool:
        return self._store.holds(self._path)

    def open(self, seekable: bool = True) -> Any:
        with self._store.open(self._path) as remote, tempfile.NamedTemporaryFile() as local:
            shutil.copyfileobj(remote, local, COPY_BYTES)
            local.flush()
            return pa.memory_map(local.name)  # stays valid when the file is unlinked

    def to_input_file(self) -> InputFile:
        return self

    def create(self, overwrite: bool = False) -> Any:
        if not overwrite and self.exists():
            raise FileExistsError(f"{self.location} exists")
        return _Upload(self.location, self._store, self._path, overwrite)


class _Upload:
    """A local file that is uploaded when it is closed, unless its writer failed."""

    def __init__(self, location: str, store: Store, path: str, overwrite: bool) -> None:
        self._location, self._store, self._path = location, store, path
        self._overwrite = overwrite
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed below
        self.write, self.tell, self.flush = self._file.write, self._file.tell, self._file.flush

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        if self.closed:
            return
        self._file.flush()
        with self._file:
            if self._overwrite:
                self._store.put_file(self._path, os.fspath(self._file.name))
            elif not self._store.put_file_if_absent(self._path, self._file.name):
                raise FileExistsError(f"{self._location} exists")

    def __enter__(self) -> _Upload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, where: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
