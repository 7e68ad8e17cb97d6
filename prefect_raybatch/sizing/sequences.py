"""How many rows an engine computes at once: when more of them pay, and what bounds it. Pure.

A step of decoding reads all weights, however many rows it is for, so that more rows share that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.model.memory import Model
from prefect_raybatch.sizing.cards import Card
from prefect_raybatch.sizing.engines import Tokens, gpu_seconds
from prefect_raybatch.sizing.fit import rows_held
from prefect_raybatch.sizing.shards import SEQUENCES

MORE = 512  # the most for which vLLM captures CUDA graphs: 1024 gave no more on an H200
GAIN = 0.05  # that they must bring


def choose(
    job: BatchJob,
    model: Model | None,
    card: Card | None,
    gpu_bytes: int,
    arguments: Mapping[str, Any],
    row: Tokens,
    engines_per_gpu: int,
) -> tuple[int, str]:
    """(max_num_seqs, why): the job's own, or for `auto` 256, and 512 for an engine alone on its
    GPUs where that brings 5 % by `packing.gpu_seconds` and the KV cache is likely to hold so many
    rows of the typical length. `card` and `model` are None on a CPU and where they are not known.
    """
    if job.engine.max_num_seqs != "auto":
        return job.engine.max_num_seqs, "engine.max_num_seqs"
    if engines_per_gpu > 1:
        return SEQUENCES, f"for each of {engines_per_gpu} engines on a GPU"
    if model is None or card is None or not gpu_bytes:
        return SEQUENCES, "unless engine.max_num_seqs says more"
    row = replace(row, out=row.out if row.out is not None else job.sampling.max_tokens)
    usual, more = (gpu_seconds(model, card, row, seqs) for seqs in (SEQUENCES, MORE))
    gain = usual / more - 1
    if gain < GAIN:
        return SEQUENCES, f"{MORE} would bring about {gain:.0%}: answers of {row.out} tokens"
    wider = {**arguments, "max_num_seqs": MORE}
    held = rows_held(model, wider, gpu_bytes, row.typical)
    if held < MORE:
        return SEQUENCES, f"the KV cache has room for {held} rows of about {row.typical} tokens"
    return MORE, f"about {gain:.0%} faster than {SEQUENCES}: answers of {row.out} tokens"
