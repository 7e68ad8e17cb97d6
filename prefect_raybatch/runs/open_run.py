"""Opens a run directory from Python: its state and its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefect_raybatch.errors import NoSuchRun
from prefect_raybatch.job.trusted_places import check_run_read
from prefect_raybatch.ledger.layout import partial_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.partials import all_partials, read_partial
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.result_reader import FinishedRows
from prefect_raybatch.runs.status import report_of, state_of
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import open_store


@dataclass(frozen=True)
class OpenRun(FinishedRows):
    """A run directory, or the folder of a partial result, at `uri`. Each access reads it anew."""

    uri: str
    options: StoreOptions | None = field(default=None, repr=False)  # may hold keys

    def _place(self) -> tuple[str, StoreOptions | None]:
        return self.uri, self.options

    @property
    def state(self) -> str:
        """Return "planned", "unfinished" or "completed"; "partial" for a partial result."""
        return state_of(self.uri, self.options)

    @property
    def report(self) -> RunReport:
        """Return the report of the run; for an unfinished run, one made from its commits so far."""
        return report_of(self.uri, dict(self.options or {}) or None)

    def _repr_html_(self) -> str:
        """Return the report as HTML for a notebook."""
        from prefect_raybatch.report.html import fragment

        return fragment(self.report)


def open_run(uri: str, options: StoreOptions | None = None, partial: bool | str = False) -> OpenRun:
    """Open the run directory `uri`, a local folder or a URI such as s3://bucket/runs/RUN_KEY.

    `options` are s3fs options, as in `output.options`; without them, credentials come from the
    environment. `partial` opens a partial result of the run instead: the newest (True), or the one
    with this name (_UUID). `uri` may itself be the folder of a partial result. Raises `NoSuchRun`,
    naming similar runs, if there is no such run or partial result.
    """
    check_run_read(uri)
    if partial:
        uri = partial_place(uri, options, None if partial is True else partial)
    state_of(uri, options)
    return OpenRun(open_store(uri, options).uri, options)


def partial_place(uri: str, options: StoreOptions | None, name: str | None) -> str:
    """Return the folder of a run's partial result `name`, or of the newest one if `name` is None.

    Raises `NoSuchRun` if there is none.
    """
    store = open_store(uri, options)
    plan = need_plan(Ledger(store))
    if name is None:
        found = all_partials(store, plan)
        if not found:
            raise NoSuchRun(
                f"{store.uri} has no partial result; raybatch finalize --partial writes one"
            )
        name = found[0].name
    return f"{store.uri}/{partial_path(read_partial(store, plan, name).name)}"
