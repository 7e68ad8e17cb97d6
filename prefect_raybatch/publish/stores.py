"""The base class of targets that are tables in a folder: their location and credentials."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pyarrow as pa

from prefect_raybatch.publish.base import AnsweredRows, Sink
from prefect_raybatch.schemes import with_account
from prefect_raybatch.storage import is_remote, join, object_store_options, table_settings
from prefect_raybatch.storage.library_errors import text_of


class FolderSink(Sink):
    """A table in a folder as a target; its library reads local folders and object stores itself."""

    @property
    def uri(self) -> str:
        return join(self.target.uri or "")

    @property
    def keys(self) -> dict[str, str] | None:
        """Return the `storage_options` for the target's library; None for a local folder.

        The library looks up missing credentials itself.
        """
        return object_store_options(table_settings(self.uri, self.options))

    def place(self) -> tuple[str, ...]:
        return folder_place(with_account(self.uri, self.options))

    def check_place(self) -> None:
        if not is_remote(self.uri):
            self.need_writable(self.uri)

    def rehearse(self, schema: pa.Schema, existing: pa.Schema | None) -> None:
        """If there is no table, create one without rows in a temporary folder.

        This shows names and types that the library rejects. Does nothing if the table exists.
        """
        if existing is not None:
            return
        with tempfile.TemporaryDirectory(prefix="raybatch-") as folder:
            changed: dict[str, Any] = {"uri": f"{folder}/table", "options": {}}
            for names in ("key", "partition_by"):  # of a result whose columns are not all known
                changed[names] = [n for n in getattr(self.target, names) if n in schema.names]
            if not changed["key"]:
                changed["mode"] = "append"
            target = self.target.model_copy(update=changed)
            rows = AnsweredRows("", "", "", 0, schema, lambda: iter(()))
            type(self)(target, {}).publish(rows, lambda step: None)

    def scrub(self, error: object) -> str:
        """Return an error in one line, with all of its lines joined and credentials masked."""
        return super().scrub(text_of(error))


def folder_place(uri: str) -> tuple[str, ...]:
    """Return ("folder", URI or absolute path), the same for all ways to write a folder's address.

    Symbolic links are followed.
    """
    whole = join(uri)
    return ("folder", whole if is_remote(whole) else os.path.realpath(whole))
