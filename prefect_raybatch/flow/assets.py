"""The result as a Prefect asset."""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path
from typing import Any

from prefect.assets import Asset, add_asset_metadata, materialize

from prefect_raybatch.report.records import RunReport

log = logging.getLogger(__name__)

NOT_IN_KEYS = re.compile(r"[\s\0#?&%\"'<>\[\]{}|\\^`]")  # what Prefect takes in no key
LONGEST_KEY = 512


def asset_key(run: str) -> str:
    """The URI of a run's data/ as Prefect takes it: file:// for local folders. `_` stands for
    characters that no key may hold, and a longer one keeps its end, which has the run key; a hash
    of the whole follows then, so that no two places share a key."""
    uri = run.rstrip("/") + "/data/"
    scheme, mark, path = uri.partition("://")
    if not mark:
        scheme, path = "file", Path(uri).absolute().as_posix().rstrip("/") + "/"
    room = LONGEST_KEY - len(scheme) - len("://")
    kept = NOT_IN_KEYS.sub("_", path)
    if kept != path or len(path) > room:
        digest = f"~{hashlib.sha256(path.encode()).hexdigest()[:8]}/"
        kept = kept[-(room - len(digest)) :] + digest
    return f"{scheme.lower()}://{kept}"


def metadata(report: RunReport) -> dict[str, Any]:
    """What the asset says of a run."""
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


def materialize_result(report: RunReport) -> None:
    """Records data/ as an asset with row count and location. The result is there whatever comes of
    this, so an error is a warning."""
    try:
        key = asset_key(report.run)

        name = f"result-asset-{report.run_key}"

        @materialize(Asset(key=key), by="prefect-raybatch", name="result_asset", task_run_name=name)
        def result_asset() -> None:
            add_asset_metadata(key, metadata(report))

        result_asset()
    except Exception as error:
        log.warning("the result was not recorded as an asset: %s: %s", type(error).__name__, error)
