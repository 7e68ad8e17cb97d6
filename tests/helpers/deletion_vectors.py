"""Deletion vectors for Delta tables: the `deltalake` library reads them and writes none."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from pathlib import Path

MAGIC = 1681511377  # of a RoaringBitmapArray, by Delta's protocol
NO_RUNS = 12346  # a roaring bitmap of array containers alone, by roaring's format
Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def bitmap(rows: Sequence[int]) -> bytes:
    """Row numbers below 65,536 as Delta serializes them."""
    values = sorted(rows)
    container = struct.pack(f"<{len(values)}H", *values)
    head = struct.pack("<IIHHI", NO_RUNS, 1, 0, len(values) - 1, 16)
    data = struct.pack("<IQI", MAGIC, 1, 0) + head + container
    return data + b"\0" * (-len(data) % 4)


def z85(data: bytes) -> str:
    """Base 85 with ZeroMQ's alphabet, whose digits Python's own base85 has in another order."""
    python = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    return base64.b85encode(data).decode().translate(str.maketrans(python, Z85))


def delete_by_vector(table: Path, rows: Sequence[int]) -> None:
    """A commit that deletes rows of the table's first file, by their place in it, in the log alone.

    The table has deletion vectors enabled.
    """
    logs = sorted((table / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    add = next(action["add"] for action in actions if "add" in action)
    data = bitmap(rows)
    vector = {
        "storageType": "i",
        "pathOrInlineDv": z85(data),
        "sizeInBytes": len(data),
        "cardinality": len(rows),
    }
    commit = [
        {"commitInfo": {"timestamp": add["modificationTime"], "operation": "DELETE"}},
        {
            "remove": {
                "path": add["path"],
                "deletionTimestamp": add["modificationTime"],
                "dataChange": True,
                "extendedFileMetadata": True,
                "partitionValues": add["partitionValues"],
                "size": add["size"],
            }
        },
        {"add": {**add, "deletionVector": vector}},
    ]
    log = table / "_delta_log" / f"{len(logs):020}.json"
    log.write_text("\n".join(map(json.dumps, commit)) + "\n")
