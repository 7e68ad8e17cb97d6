"""Stores a long list of input URIs in a table beside plan.json.

The fingerprint covers all URIs. The job in plan.json shows only the first few of them. The
fingerprint's parts in plan.json have the number of URIs and one hash in place of the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect_raybatch.ledger.plan_tables import from_parquet, to_parquet
from prefect_raybatch.ledger.records import JsonObject, digest, dump

MOST_URIS = 1_000  # most URIs that plan.json holds; a longer list is in a table
FIRST_URIS = 10  # URIs of a longer list that plan.json shows
URI_PART = "source.uri"  # name of the URIs among the parts of a fingerprint


def too_many(uris: Any) -> bool:
    """Return whether `uris` is a list too long for plan.json, so that it goes into a table."""
    return isinstance(uris, list) and len(uris) > MOST_URIS


def uris_table(uris: Sequence[str]) -> bytes:
    """Return URIs as the bytes of a Parquet table (column uri)."""
    import pyarrow as pa

    return to_parquet(pa.table({"uri": pa.array(uris, pa.string())}))


def read_uris(data: bytes) -> list[str]:
    """Return the URIs in a table that `uris_table` encoded."""
    found: list[str] = from_parquet(data, "table of URIs", ["uri"])["uri"].to_pylist()
    return found


def bounded_parts(parts: JsonObject) -> dict[str, Any]:
    """Return a fingerprint's parts; more than 1,000 URIs are replaced by their number and hash."""
    uris = parts.get(URI_PART, ())
    if not too_many(uris):
        return dict(parts)
    return {**parts, URI_PART: {"count": len(uris), "sha256": digest(dump(uris))}}


def bounded_job(job: JsonObject) -> dict[str, Any]:
    """Return a job's fields; a list of more than 1,000 URIs is cut to the first 10."""
    source = job.get("source", {})
    if not too_many(source.get("uri")):
        return dict(job)
    return {**job, "source": {**source, "uri": source["uri"][:FIRST_URIS]}}
