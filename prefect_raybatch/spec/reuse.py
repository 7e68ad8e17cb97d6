"""Whose answers a run reuses, and whether requests are asked before the rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReuseSpec:
    """Which answers of earlier runs a run reuses, and whether it keeps its own for later ones.

    `run` is the URI of the run whose answers are reused, `latest` for the newest complete one of
    the job, None for none. `keep_days` is how many days raw answers are kept, None for as long as
    the run. `keeps`: the run looks its answers up and keeps them for later runs. `ordered`: the
    requests of the whole run are asked in the order of their prompts.
    """

    run: str | None
    keep_days: float | None
    keeps: bool
    ordered: bool

    @property
    def asks_apart(self) -> bool:
        """Whether requests are asked in a ledger of their own, where rows look answers up."""
        return self.keeps or self.ordered
