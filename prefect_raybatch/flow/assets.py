"""The result as a Prefect asset."""

from __future__ import annotations

import hashlib
import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect.assets import Asset, add_asset_metadata, materialize

from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.job.source import Source
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.storage import open_store

log = logging.getLogger(__name__)

NOT_IN_KEYS = re.compile(r"[\s\0#?&%\"'<>\[\]{}|\\^`]")  # not allowed in Prefect's keys
LONGEST_KEY = 512
UPSTREAM = 20  # maximum number of sources named as assets
VARIES = re.compile(r"\{run_|[*?\[]")  # where a URI begins to differ from run to run


def asset_key(output: str, job: str) -> str:
    """Return the asset key of a job's results, which is the same for every run.

    The key is the output URI followed by the job's name. The URI ends before the first folder whose
    name contains {run_date} or {run_key}. A local folder becomes a file:// URI. `_` replaces
    characters that Prefect does not allow. A key that is too long loses its beginning. If
    characters were replaced or removed, a hash is appended, so that no two outputs share a key.
    """
    return _key(f"{_fixed(output)}/{job}/")


def source_keys(source: Source) -> list[str]:
    """Return the asset keys of a job's sources, at most UPSTREAM (20).

    A source that is the result of a run gets the asset key of the job that wrote it.
    """
    keys: dict[str, None] = {}
    for uri in source.uris[:UPSTREAM]:
        known = _result_of(uri, source.options) if source.stored else None
        keys[known or _key(_named(uri))] = None
    return list(keys)


def _named(uri: str) -> str:
    """Return the part of a URI that never varies (see `_fixed`).

    User, password and query are removed.
    """
    scheme, mark, rest = _fixed(uri).partition("://")
    if not mark:
        return _fixed(uri)
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def _result_of(uri: str, options: dict[str, Any]) -> str | None:
    """Return the asset key of the job whose run wrote the result at `uri`.

    None if `uri` is a pattern, or if no readable run is there.
    """
    place = uri.rstrip("/").removesuffix("/data")
    if VARIES.search(place):
        return None
    with suppress(RayBatchError, OSError):
        plan = Ledger(open_store(place, options or None)).load_plan()
        if plan is not None:
            return asset_key(place.rpartition("/")[0], plan.job_name)
    return None


def _fixed(uri: str) -> str:
    """Return the part of a URI before its first folder or file name that varies.

    A name varies if it contains a wildcard, {run_date} or {run_key}. If no name varies, return the
    whole URI. A slash at the end is removed.
    """
    found = VARIES.search(uri)
    if found is None:
        return uri.rstrip("/")
    return uri[: found.start()].rpartition("/")[0].rstrip("/")


def _key(uri: str) -> str:
    scheme, mark, path = uri.partition("://")
    if not mark:
        end = "/" if uri.endswith("/") else ""
        scheme, path = "file", Path(uri).absolute().as_posix().rstrip("/") + end
    room = LONGEST_KEY - len(scheme) - len("://")
    kept = NOT_IN_KEYS.sub("_", path)
    if kept != path or len(path) > room:
        digest = f"~{hashlib.sha256(path.encode()).hexdigest()[:8]}/"
        kept = kept[-(room - len(digest)) :] + digest
    return f"{scheme.lower()}://{kept}"


def metadata(report: RunReport) -> dict[str, Any]:
    """Return the asset's metadata: location, run key, job, row counts, files and model."""
    return {
        "location": report.run.rstrip("/") + "/data/",
        "run_key": report.run_key,
        "job": report.job,
        "rows": report.good,
        "planned_rows": report.rows,
        "quarantined": report.failed,
        "skipped": report.skipped,
        "files": sum(part.path.startswith("data/") for part in report.parts),
        "model": str(report.model.get("source")),
    }


def materialize_result(report: RunReport, name: str, output: str, source: Source) -> bool:
    """Record the result as an asset with row count and location, and its inputs as upstream assets.

    `name` is the job's name. `output` is its output URI as written in the job, with {run_date} and
    {run_key} if it has them. `source` is the job's source with its credentials. Returns False if
    the result could not be recorded; the error is only logged, because the result exists in any
    case.
    """
    try:
        key = asset_key(output, name)
        upstream = [source_key for source_key in source_keys(source) if source_key != key]

        @materialize(
            Asset(key=key),
            by="prefect-raybatch",
            name="result_asset",
            task_run_name=f"result-asset-{report.run_key}",
            asset_deps=[Asset(key=source_key) for source_key in upstream],
        )
        def result_asset() -> None:
            add_asset_metadata(key, metadata(report))

        result_asset()
    except Exception as error:
        log.warning("could not record the result as an asset: %s: %s", type(error).__name__, error)
        return False
    return True
