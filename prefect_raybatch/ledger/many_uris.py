"""Inputs of which a job names very many URIs one by one: a table beside the plan holds them.

The fingerprint covers all URIs. plan.json shows only the first few of them in its job; its parts of
the fingerprint have the number of all URIs and one hash of them in place of the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect_raybatch.ledger.plan_tables import from_parquet, to_parquet
from prefect_raybatch.ledger.records import JsonObject, digest, dump

MOST_URIS = 1_000  # URIs of an input that plan.json holds; more are in a table
FIRST_URIS = 10  # URIs that plan.json then still shows
URI_PART = "source.uri"  # name of the URIs among the parts of a fingerprint


def too_many(uris: Any) -> bool:
    """Return whether `uris` is a list too long for plan.json, so that it goes into a table."""
    return isinstance(uris, list) and len(uris) > MOST_URIS


def uris_table(uris: Sequence[str]) -> bytes:
    """Return URIs as the bytes of a Parquet table (column uri)."""
    import pyarrow as pa

    return to_parquet(pa.table({"uri": pa.array(uris, pa.string())}))


def read_uris(data: bytes) -> list[str]:
    found: list[str] = from_parquet(data, "table of URIs", ["uri"])["uri"].to_pylist()
    return found


def bounded_parts(parts: JsonObject) -> dict[str, Any]:
    """Return the parts of a fingerprint, with very many URIs replaced by their number and hash."""
    uris = parts.get(URI_PART, ())
    if not too_many(uris):
        return dict(parts)
    return {**parts, URI_PART: {"count": len(uris), "sha256": digest(dump(uris))}}


def bounded_job(job: JsonObject) -> dict[str, Any]:
    """Return a job's fields, with very many URIs cut to the first FIRST_URIS."""
    source = job.get("source", {})
    if not too_many(source.get("uri")):
        return dict(job)
    return {**job, "source": {**source, "uri": source["uri"][:FIRST_URIS]}}
