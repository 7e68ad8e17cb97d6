"""The permission that each operation on a store needs, as the store's provider names it."""

from __future__ import annotations

from typing import Literal

Operation = Literal["read", "list", "write", "delete"]
PERMISSIONS: dict[str, dict[str, str]] = {
    "s3": {
        "read": "s3:GetObject (and s3:ListBucket: without it a missing file reads as forbidden)",
        "list": "s3:ListBucket",
        "write": "s3:PutObject",
        "delete": "s3:DeleteObject",
    },
    "gs": {
        "read": "storage.objects.get (role Storage Object Viewer)",
        "list": "storage.objects.list (role Storage Object Viewer)",
        "write": "storage.objects.create and .delete (role Storage Object User)",
        "delete": "storage.objects.delete (role Storage Object User)",
    },
    "az": {
        "read": "blobs/read (role Storage Blob Data Reader)",
        "list": "blobs/read (role Storage Blob Data Reader)",
        "write": "blobs/write (role Storage Blob Data Contributor)",
        "delete": "blobs/delete (role Storage Blob Data Contributor)",
    },
}
