"""What targets that are tables in a folder share: where it is, and the keys to it."""

from __future__ import annotations

from prefect_raybatch.publish.base import Sink
from prefect_raybatch.storage import is_remote, join, object_store_options, s3_settings
from prefect_raybatch.storage.library_errors import text_of


class FolderSink(Sink):
    """A table in a folder, local or on S3, that a library with an S3 client of its own opens."""

    @property
    def uri(self) -> str:
        return join(self.target.uri or "")

    @property
    def keys(self) -> dict[str, str] | None:
        """The library's `storage_options`; what is not given it looks up itself."""
        return object_store_options(s3_settings(self.options) if is_remote(self.uri) else None)

    def scrub(self, error: object) -> str:
        """These libraries say what happened in the last of several lines."""
        return super().scrub(text_of(error))
