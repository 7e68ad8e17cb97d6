"""The engine stage of `ray.data.llm`, through its public interface (`engine.stage: ray.data.llm`).

Same contract as `EngineStage`: prepared blocks in, answered blocks out. That stage takes rows and
bundles blocks as it likes, so a block travels whole, as bytes, with its first row, and is put
together again behind it. It does not tell finish reasons or what the prefix cache gave.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.model import pinned as models
from prefect_raybatch.sizing.sizes import Pool
from prefect_raybatch.stages.block import (
    ERROR,
    ERROR_TYPE,
    PARAMS,
    TOKENS,
    Failure,
    lost_all,
    passes_by,
    timed,
)
from prefect_raybatch.stages.engine import EngineSpec, answered, fields_of
from prefect_raybatch.stages.finish import Finish
from prefect_raybatch.stages.ray_internals import RAY_LLM_ERROR, RAY_LLM_STAGE
from prefect_raybatch.stages.vllm.plugin import allow
from prefect_raybatch.stages.vllm.stepper import Completion, plain_fields
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from ray.data import Dataset

BLOCK, WHOLE, ROW = "block", "whole", "row"  # a block's id, the block as bytes, position in it
PASSES_BY = "nothing to infer"
# The two row-wise steps around the engine; with the retries of our own stages, since Ray makes one
# task of two steps only where their settings are the same.
AROUND = {"num_cpus": 0.25, "max_retries": 0}


def through(
    dataset: Dataset, spec: EngineSpec, pool: Pool, resources: dict[str, Any], calls: int, rows: int
) -> Dataset:
    """The prepared blocks of `dataset`, each answered or failed; rows for `Gather`.

    `calls` blocks are in flight in an engine, `rows` is the most a block holds.
    """
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    arguments = {"disable_log_stats": True, **spec.arguments, **spec.share}
    if spec.engines_per_gpu > 1 and not spec.share:
        raise ConfigError(
            "engine.engines_per_gpu: with engine.stage ray.data.llm engines can share only GPUs "
            "whose memory is known; set it to 1, or set engine.accelerator_type"
        )
    if spec.model.get("revision"):
        arguments["revision"] = spec.model["revision"]
    env = dict(spec.env)
    allow(env)
    config = vLLMEngineProcessorConfig(
        model_source=_source(spec.model),
        engine_kwargs=arguments,
        batch_size=rows,  # so a bundle is a block
        max_concurrent_batches=calls,
        max_tasks_in_flight_per_actor=calls + (calls > 1),
        concurrency=(pool.fewest, pool.engines),
        should_continue_on_error=True,
        log_engine_metrics=False,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        runtime_env={"env_vars": env} if env else None,
        **placement(resources),
    )
    processor = build_processor(
        config,
        preprocess=sampling_of,
        postprocess=answer_of,
        preprocess_map_kwargs=AROUND,
        postprocess_map_kwargs=AROUND,
    )
    # As for our own stage: a task that died is for the driver, which runs its rows alone. In place,
    # since an assignment would work out the GPUs anew, without the bundle.
    processor.get_stage_by_name(RAY_LLM_STAGE).map_batches_kwargs.update(
        max_restarts=resources["max_restarts"], max_task_retries=resources["max_task_retries"]
    )
    return processor(dataset)


def _source(model: dict[str, Any]) -> str:
    """It fetches s3:// models itself; the bundled one is a folder of this package."""
    source = str(model["source"])
    return models.local_path(model) if source == models.DEMO else source


def placement(resources: dict[str, Any]) -> dict[str, Any]:
    bundle = {"CPU": resources["num_cpus"]}
    if "num_gpus" in resources:
        whole = resources["num_gpus"] >= 1  # of several GPUs a worker has one each
        bundle["GPU"] = 1 if whole else resources["num_gpus"]
    found: dict[str, Any] = {"placement_group_config": {"bundle_per_worker": bundle}}
    if "accelerator_type" in resources:
        found["accelerator_type"] = resources["accelerator_type"]
    return found


def sampling_of(row: dict[str, Any]) -> dict[str, Any]:
    if row[RAY_LLM_ERROR]:
        return {}
    return {"sampling_params": json.loads(row["sampling"])}


def answer_of(row: dict[str, Any]) -> dict[str, Any]:
    return {
        BLOCK: row[BLOCK],
        WHOLE: row[WHOLE],
        ROW: row[ROW],
        "ids": list(row["generated_tokens"]),
        "text": row["generated_text"],
        "prompt_tokens": row["num_input_tokens"],
        "seconds": row["time_taken_llm"],
    }


@dataclass(frozen=True)
class Spread:
    """A block as rows for `ray.data.llm`: one for each well row, or one that passes by."""

    sampling: dict[str, Any]

    def __call__(self, table: pa.Table) -> pa.Table:
        found: list[dict[str, Any]] = []
        if not passes_by(table):
            table, found = self._rows(table)
        if not found:
            found = [{ROW: -1, "tokenized_prompt": [], "sampling": "", RAY_LLM_ERROR: PASSES_BY}]
        name = uuid.uuid4().hex
        for row in found:
            row |= {BLOCK: name, WHOLE: None}
        found[0][WHOLE] = _to_bytes(table)
        return pa.Table.from_pylist(found, SCHEMA)

    def _rows(self, table: pa.Table) -> tuple[pa.Table, list[dict[str, Any]]]:
        errors = table[ERROR].to_pylist()
        prompts, own = table[TOKENS].to_pylist(), table[PARAMS].to_pylist()
        found, shape = [], None
        for i, error in enumerate(errors):
            if error is not None:
                continue
            fields = plain_fields(fields_of(self.sampling, own[i]))
            shape = shape or _shape(fields)
            if _shape(fields) != shape:
                # Rows of a block become one Arrow column: a field that one lacks would be null.
                errors[i] = Failure(
                    "engine",
                    "ValueError",
                    "with engine.stage ray.data.llm all rows of a shard need the same sampling "
                    "fields; set those that only some rows have in sampling as well",
                ).to_dict()
                continue
            found.append(
                {
                    ROW: i,
                    "tokenized_prompt": prompts[i],
                    "sampling": json.dumps(fields),
                    RAY_LLM_ERROR: "",
                }
            )
        column = table.column_names.index(ERROR)
        return table.set_column(column, ERROR, pa.array(errors, ERROR_TYPE)), found


SCHEMA = pa.schema(
    [
        (BLOCK, pa.string()),
        (WHOLE, pa.large_binary()),
        (ROW, pa.int32()),
        ("tokenized_prompt", pa.list_(pa.int32())),
        ("sampling", pa.string()),
        (RAY_LLM_ERROR, pa.string()),
    ]
)


@dataclass(frozen=True)
class Gather:
    """The rows of blocks back to blocks with answers, each handed to `finish`: receipts.

    `sampling` and `length` (tokens) say where an answer was cut off.
    """

    finish: Finish
    sampling: dict[str, Any]
    length: int | None

    def __call__(self, table: pa.Table) -> pa.Table:
        blocks: dict[str, list[dict[str, Any]]] = {}
        for row in table.to_pylist():
            blocks.setdefault(row[BLOCK], []).append(row)
        return pa.concat_tables([self.finish(self.block_of(rows)) for rows in blocks.values()])

    def block_of(self, rows: list[dict[str, Any]]) -> pa.Table:
        table = _from_bytes(next(row[WHOLE] for row in rows if row[WHOLE] is not None))
        if passes_by(table):
            return table
        done = {row[ROW]: row for row in rows if row[RAY_LLM_ERROR] != PASSES_BY}
        well = [i for i, error in enumerate(table[ERROR].to_pylist()) if error is None]
        if set(done) != set(well):
            missing = len(set(well) - set(done))
            why = f"ray.data.llm lost {counted(missing, 'row')} of the block"
            return lost_all(table, Loss("", why))
        own = table[PARAMS].to_pylist()
        answers = [(i, [i], self._completion(done[i], own[i])) for i in well]
        took = max((done[i].get("seconds") or 0.0 for i in well), default=0.0)
        began = time.time() - took
        return timed(answered(table, answers, began), "engine", began)

    def _completion(self, row: dict[str, Any], own: str | None) -> Completion:
        if row[RAY_LLM_ERROR]:
            kind, _, message = row[RAY_LLM_ERROR].partition(": ")
            return Completion([], error=(kind, message))
        fields = plain_fields(fields_of(self.sampling, own))
        most = fields.get("max_tokens")
        ids, prompt = list(row["ids"]), int(row["prompt_tokens"])
        cut = (most is not None and len(ids) >= most) or (
            self.length is not None and prompt + len(ids) >= self.length
        )
        texts = [row["text"]] if fields["detokenize"] else None
        return Completion([ids], texts, "length" if cut else "stop", prompt)


def _shape(value: object) -> Any:
    if isinstance(value, dict):
        return tuple(sorted((name, _shape(inner)) for name, inner in value.items()))
    return type(value).__name__ if value is None else True


def _to_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return cast(bytes, sink.getvalue().to_pybytes())


def _from_bytes(data: bytes) -> pa.Table:
    return pa.ipc.open_stream(data).read_all().combine_chunks()
