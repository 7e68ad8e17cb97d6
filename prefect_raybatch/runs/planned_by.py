"""Records which version of this package made a run's plan.

When another version continues the run, that is logged.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.installed import code_version
from prefect_raybatch.ledger.layout import PLANNED_BY
from prefect_raybatch.ledger.record_files import put_record_if_absent, read_record
from prefect_raybatch.ledger.records import dump, load
from prefect_raybatch.runs.run import who
from prefect_raybatch.storage import Store

log = logging.getLogger(__name__)


def note_planner(store: Store) -> None:
    """Record in the run directory which code made the plan, unless that is recorded already."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        record = dump({"code": code_version(), "who": who(), "at": at})
        put_record_if_absent(store, PLANNED_BY, record)
    except RayBatchError as error:  # the plan is there, and that is what counts
        log.warning("the version that made the plan could not be recorded: %s", error)


def planner_code(store: Store) -> str | None:
    """Return the code that made the plan; None if it is not recorded."""
    try:
        code = load(read_record(store, PLANNED_BY), PLANNED_BY).get("code")
    except (FileNotFoundError, RayBatchError):
        return None
    return code if isinstance(code, str) else None


def compare_code(store: Store) -> None:
    """Warn if this process runs other code than the one that made the plan."""
    planned, own = planner_code(store), code_version()
    if planned is not None and planned != own:
        log.warning(
            "the plan was made by prefect_raybatch %s, and this process runs %s: new answers may "
            "differ from the committed ones",
            *(planned, own),
        )
