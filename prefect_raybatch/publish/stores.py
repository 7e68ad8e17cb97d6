"""The common part of targets that are tables in a folder: its location, and its credentials."""

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
    """A table in a folder, local or on S3, opened by a library with its own S3 client."""

    @property
    def uri(self) -> str:
        return join(self.target.uri or "")

    @property
    def keys(self) -> dict[str, str] | None:
        """Return the library's `storage_options`; it looks up missing ones itself."""
        return object_store_options(table_settings(self.uri, self.options))

    def place(self) -> tuple[str, ...]:
        return folder_place(with_account(self.uri, self.options))

    def check_place(self) -> None:
        if not is_remote(self.uri):
            self.need_writable(self.uri)

    def rehearse(self, wanted: pa.Schema, there: pa.Schema | None) -> None:
        """Create the empty table in a temporary folder, which shows rejected names and types."""
        if there is not None:
            return
        with tempfile.TemporaryDirectory(prefix="raybatch-") as folder:
            changed: dict[str, Any] = {"uri": f"{folder}/table", "options": {}}
            for names in ("key", "partition_by"):  # of a result whose columns are not all known
                changed[names] = [n for n in getattr(self.target, names) if n in wanted.names]
            if not changed["key"]:
                changed["mode"] = "append"
            target = self.target.model_copy(update=changed)
            rows = AnsweredRows("", "", "", 0, wanted, lambda: iter(()))
            type(self)(target, {}).publish(rows, lambda step: None)

    def scrub(self, error: object) -> str:
        """Return the last of several lines, in which these libraries say what happened."""
        return super().scrub(text_of(error))


def folder_place(uri: str) -> tuple[str, ...]:
    """Return the folder a target writes to, for comparing two targets. Links are followed."""
    whole = join(uri)
    return ("folder", whole if is_remote(whole) else os.path.realpath(whole))
