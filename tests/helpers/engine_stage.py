"""The engine stage over planned engines, its blocks, and what was lost of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from helpers.engines import Factory
from helpers.small import MODEL, input_rows
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.stages import engine as stage
from prefect_raybatch.stages.block import Failure, is_lost, losses, tag
from prefect_raybatch.stages.columns import ERROR, ERROR_TYPE, PARAMS, POSITION, SHARD, TOKENS
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage
from prefect_raybatch.stages.vllm import stepper

LAUNCH = EngineLaunch(dict(MODEL), {"temperature": 0.0, "max_tokens": 4}, {"max_num_seqs": 8})


@pytest.fixture
def started(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., tuple[EngineStage, Factory]]]:
    """The stage over engines that do, one after the other, what is given; closed in the end."""
    made: list[EngineStage] = []

    def make(*plan: Any, launch: EngineLaunch = LAUNCH) -> tuple[EngineStage, Factory]:
        factory = Factory(*plan)
        monkeypatch.setattr(stepper, "SteppedEngine", factory)
        monkeypatch.setattr(stage, "PAUSE", 0)
        made.append(EngineStage(launch))
        return made[-1], factory

    yield make
    for one in made:
        one.close()


def block(unit: Unit, failed: Any = (), params: dict[int, str] | None = None) -> pa.Table:
    """A prepared block: token lists [i], [i, i] ..., failed rows with none."""
    bad = Failure("prepare", "ValueError", "null").to_dict()
    rows = range(unit.rows)
    tokens = [[] if i in failed else [i] * 2 for i in rows]
    table = tag(input_rows(0, unit.rows), unit)
    for name, column in {
        TOKENS: pa.array(tokens, pa.list_(pa.int32())),
        PARAMS: pa.array([(params or {}).get(i) for i in rows], pa.string()),
        ERROR: pa.array([bad if i in failed else None for i in rows], ERROR_TYPE),
    }.items():
        table = table.append_column(name, column)
    return table


def lost_rows(table: pa.Table) -> list[tuple[int, int, str, bool]]:
    assert is_lost(table)
    places = zip(table[SHARD].to_pylist(), table[POSITION].to_pylist(), losses(table), strict=True)
    return [(shard, position, str(why), why.fatal) for shard, position, why in places]
