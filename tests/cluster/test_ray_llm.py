"""Blocks to rows for `ray.data.llm` and back, with what its stage does to rows in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers.small import MODEL, input_rows, receipts

from prefect_raybatch.cluster.ray_llm import (
    RAY_LLM_ERROR,
    ROW,
    Gather,
    Spread,
    answer_of,
    placement,
    sampling_of,
    through,
)
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.output import Output
from prefect_raybatch.ledger.failures import FailureKey, Loss
from prefect_raybatch.ledger.records import Receipt, Unit
from prefect_raybatch.sizing.sizes import Pool
from prefect_raybatch.stages.block import (
    ERROR,
    ERROR_TYPE,
    FINISH,
    PARAMS,
    TIMES,
    TOKENS,
    Failure,
    lost,
    tag,
)
from prefect_raybatch.stages.engine import EngineSpec
from prefect_raybatch.stages.finish import Finish
from prefect_raybatch.storage import open_store

SAMPLING = {"temperature": 0, "max_tokens": 3, "stop": ["."]}
REFUSED = Failure("prepare", "PromptTooLong", "too long").to_dict()


def prepared(
    unit: Unit, failed: Any = (), own: dict[int, dict[str, Any]] | None = None
) -> pa.Table:
    """A block as the prepare stage gives it on."""
    rows = range(unit.rows)
    errors = [REFUSED if i in failed else None for i in rows]
    params = [json.dumps(own[i]) if own and i in own else None for i in rows]
    table = tag(input_rows(0, unit.rows), unit)
    for name, column in {
        TOKENS: pa.array([[] if i in failed else [7, 8] for i in rows], pa.list_(pa.int32())),
        PARAMS: pa.array(params, pa.string()),
        ERROR: pa.array(errors, ERROR_TYPE),
        f"{TIMES}_prepare": pa.array([0.5] * unit.rows, pa.float64()),
    }.items():
        table = table.append_column(name, column)
    return table


def rays(tables: list[pa.Table], fails: Any = ()) -> pa.Table:
    """What `ray.data.llm` makes of the blocks: one bundle, its stage skips rows with an error."""
    rows = []
    for table in tables:
        for row in table.to_pylist():
            data = {**row, **sampling_of(row)}
            if data[RAY_LLM_ERROR]:
                rows.append(data)
                continue
            params = data.pop("sampling_params")
            assert list(data.pop("tokenized_prompt")) == [7, 8] and not params["temperature"]
            if data[ROW] in fails:
                rows.append({**data, RAY_LLM_ERROR: "ValueError: no: such token"})
                continue
            out = {"generated_tokens": [1] * (data[ROW] % 3 + 1), "generated_text": "t" * 3}
            out |= {"num_input_tokens": 2, "time_taken_llm": 1.5}
            rows.append({**answer_of({**data, **out}), RAY_LLM_ERROR: ""})
    return pa.Table.from_pylist([{**dict.fromkeys(set().union(*rows)), **row} for row in rows])


@pytest.fixture
def gather(tmp_path: Path) -> Gather:
    output = Output.model_validate({"uri": "out", "postprocess": "test_ray_llm:keep"})
    return Gather(Finish(output, dict(MODEL), open_store(str(tmp_path)), "a"), SAMPLING, None)


def keep(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": row["response"], "finish": row["finish_reason"]}


def found(gather: Gather, table: pa.Table) -> dict[int, Receipt]:
    return {receipt.shard: receipt for receipt in receipts(gather(table))}


def test_blocks_of_a_bundle_come_back_whole(gather: Gather, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    blocks = [
        prepared(Unit(4, 0, 5), failed={1}),
        lost(Unit(6, 0, 9), Loss("", "gone")),
        prepared(Unit(5, 2, 3)),
    ]
    blocks.append(blocks[0].slice(0, 0))  # committed by another driver meanwhile
    got = found(gather, rays([Spread(SAMPLING)(block) for block in blocks], fails={3}))
    assert set(got) == {4, 5, 6}
    # The unit of shard 5 begins at its row 2; row 3 of a block is one that vLLM refused.
    assert got[4].good.ranges == ((0, 1), (2, 3), (4, 5)) and got[4].failed.ranges == (
        (1, 2),
        (3, 4),
    )
    assert got[5].good.ranges == ((2, 5),) and not got[5].failed
    assert got[6].lost == Loss("", "gone")
    assert got[4].failures == {
        FailureKey("prepare", "PromptTooLong", "too long"): 1,
        FailureKey("engine", "ValueError", "no: such token"): 1,
    }
    assert got[4].stats.engine_s == pytest.approx(1.5, abs=0.2)
    assert got[4].stats.prompt_tokens == 6  # three rows of two


def test_an_answer_of_all_the_tokens_it_may_have_is_cut_off(gather: Gather) -> None:
    table = gather.block_of(rays([Spread(SAMPLING)(prepared(Unit(0, 0, 3)))]).to_pylist())
    assert table[FINISH].to_pylist() == ["stop", "stop", "length"]
    short = Gather(gather.finish, SAMPLING, 4)  # prompts have 2 tokens
    table = short.block_of(rays([Spread(SAMPLING)(prepared(Unit(0, 0, 3)))]).to_pylist())
    assert table[FINISH].to_pylist() == ["stop", "length", "length"]


def test_a_block_without_a_well_row_goes_round_the_engine(gather: Gather) -> None:
    table = Spread(SAMPLING)(prepared(Unit(0, 0, 2), failed={0, 1}))
    assert table.num_rows == 1 and table[RAY_LLM_ERROR][0].as_py()
    assert found(gather, rays([table]))[0].failed.ranges == ((0, 2),)


def test_rows_that_are_missing_lose_the_block_and_not_the_run(gather: Gather) -> None:
    table = rays([Spread(SAMPLING)(prepared(Unit(3, 0, 4)))]).slice(0, 3)
    (receipt,) = found(gather, table).values()
    assert receipt.lost == Loss("", "ray.data.llm lost 1 row of the block")


def test_a_row_with_other_sampling_fields_fails_alone(gather: Gather, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    block = prepared(Unit(0, 0, 4), own={1: {"top_k": 5}, 2: {"temperature": 0.0}})
    got = found(gather, rays([Spread(SAMPLING)(block)]))[0]
    assert got.good.ranges == ((0, 1), (2, 4)) and got.failed.ranges == ((1, 2),)
    assert "all rows of a shard need the same sampling fields" in next(iter(got.failures)).message


def test_engines_that_share_a_gpu_need_its_memory_known() -> None:
    spec = EngineSpec(dict(MODEL), {}, {}, engines_per_gpu=3)
    pool = Pool("gpu", (1, 1), 1, 3, "", 0, "", "")
    with pytest.raises(ConfigError, match="engines can share only GPUs whose memory is known"):
        through(None, spec, pool, {}, 2, 100)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("resources", "bundle"),
    [
        ({"num_cpus": 1}, {"CPU": 1}),
        ({"num_cpus": 2, "num_gpus": 0.333}, {"CPU": 2, "GPU": 0.333}),  # three on a GPU
        ({"num_cpus": 1, "num_gpus": 4.0}, {"CPU": 1, "GPU": 1}),  # a worker for each of four
    ],
)
def test_an_engine_has_the_resources_of_our_own(resources: Any, bundle: Any) -> None:
    place = {"placement_group_config": {"bundle_per_worker": bundle}}
    assert placement(resources) == place
    assert placement({**resources, "accelerator_type": "L4"}) == {**place, "accelerator_type": "L4"}
