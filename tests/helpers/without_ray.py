"""Runs without Ray: the stages of a pass one after the other, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from prefect_raybatch.cluster import connect
from prefect_raybatch.cluster.pipeline import Pipeline
from prefect_raybatch.ledger.records import Receipt, Unit
from prefect_raybatch.sizing.sizes import Capacity

from .small import receipts

CLUSTER = Capacity(cpus=4.0, gpus=0.0, nodes=1, address="here")


def outside_ray(patch: pytest.MonkeyPatch) -> None:
    """Has this process be in no cluster, and know of none. `raybatch plan` names the one that a
    process is in, as an earlier test may have left it."""
    patch.delenv("RAY_ADDRESS", raising=False)
    patch.setattr("ray.is_initialized", lambda: False)


def instead_of_ray(patch: pytest.MonkeyPatch) -> None:
    """Has every run of this process join a cluster that is this process alone. What the stages, the
    driver and the ledger do is the same; no engine dies, and nothing is side by side."""

    @contextmanager
    def joined(*_: Any) -> Iterator[Capacity]:
        yield CLUSTER

    @contextmanager
    def admitted(*_: Any) -> Iterator[None]:
        yield None

    patch.setattr(connect, "connected", joined)
    patch.setattr(connect, "admitted", admitted)
    patch.setattr(connect, "glance", lambda job: CLUSTER)
    patch.setattr(connect, "dashboard_url", lambda: "")
    patch.setattr(connect, "leaving", dict)
    patch.setattr(Pipeline, "__call__", one_pass)
    patch.setattr(Pipeline, "engines", lambda self: {"ALIVE": 1})


def one_pass(self: Pipeline, units: Sequence[Unit], isolated: bool) -> Iterator[Receipt]:
    self.on_pass()
    first, spec, finish = self.stages(isolated)
    with ExitStack() as held:
        engine = self.engine(spec) if spec is not None else lambda table: table
        if spec is not None:  # a hosted model's connections would stay open until the last test
            held.callback(engine.close)
        for task in self.read_tasks(units, isolated):
            for table in self.reader.bind(task, self.skips(isolated))():
                yield from receipts(finish(engine(first(table))))
