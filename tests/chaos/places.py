"""Where results lie, read without the package: a folder, or a prefix of a bucket by botocore."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol


class Place(Protocol):
    """Files below a root; names are relative to it, with "/" between parts."""

    def names(self, folder: str) -> list[str]: ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes) -> None: ...

    def remove(self, name: str) -> None: ...


class Folder:
    """A local folder. Hidden temporary files count as files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self, folder: str) -> list[str]:
        top = self.root / folder if folder else self.root
        return [
            os.path.relpath(os.path.join(where, name), self.root)
            for where, _, names in os.walk(top)
            for name in names
        ]

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(data)

    def remove(self, name: str) -> None:
        (self.root / name).unlink()


class Bucket:
    """A prefix of a bucket. `client` is botocore's."""

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self.client, self.bucket, self.prefix = client, bucket, prefix

    def names(self, folder: str) -> list[str]:
        prefix = f"{self.prefix}/{folder}/" if folder else f"{self.prefix}/"
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=prefix
        )
        found = [item["Key"] for page in pages for item in page.get("Contents", ())]
        return [key[len(self.prefix) + 1 :] for key in found]

    def read(self, name: str) -> bytes:
        key = f"{self.prefix}/{name}"
        return bytes(self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read())

    def write(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}", Body=data)

    def remove(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}")


def client_of(options: dict[str, str]) -> Any:
    """A botocore client for `S3Server.options`."""
    import botocore.session
    from botocore.config import Config

    return botocore.session.get_session().create_client(
        "s3",
        endpoint_url=options["endpoint_url"],
        region_name=options["region"],
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        config=Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"total_max_attempts": 8, "mode": "standard"},
            read_timeout=60,
        ),
    )
