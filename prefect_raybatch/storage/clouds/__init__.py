"""Google Cloud Storage and Azure Blob Storage as stores, over obstore."""

from prefect_raybatch.storage.clouds.store import CloudStore

__all__ = ["CloudStore"]
