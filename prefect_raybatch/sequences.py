"""How many rows an engine computes at once: when more of them pay, and what bounds it. Pure.

A step of decoding reads all weights, however many rows it is for, so that more rows share that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prefect_raybatch.cards import Card
from prefect_raybatch.job import BatchJob
from prefect_raybatch.memory import Model
from prefect_raybatch.misfit import rows_held
from prefect_raybatch.packing import Tokens, gpu_seconds
from prefect_raybatch.shard_sizes import SEQUENCES

MOST = 1024  # vLLM's own on large cards
GAIN = 0.05  # that twice as many rows must bring


def choose(
    job: BatchJob,
    model: Model | None,
    card: Card | None,
    gpu_bytes: int,
    arguments: Mapping[str, Any],
    row: Tokens,
    engines_per_gpu: int,
) -> tuple[int, str]:
    """(max_num_seqs, why): the job's own, or for `auto` 256, doubled up to 1024 while that brings
    5 % by `packing.gpu_seconds` and the KV cache is likely to hold so many rows of the typical
    length. `card` and `model` are None on a CPU and where they are not known."""
    if job.engine.max_num_seqs != "auto":
        return job.engine.max_num_seqs, "engine.max_num_seqs"
    if engines_per_gpu > 1:
        return SEQUENCES, f"for each of {engines_per_gpu} engines on a GPU"
    if model is None or card is None or not gpu_bytes:
        return SEQUENCES, "unless engine.max_num_seqs says more"
    row = replace(row, out=row.out if row.out is not None else job.sampling.max_tokens)
    found = SEQUENCES
    while found < MOST:
        now, then = (gpu_seconds(model, card, row, seqs) for seqs in (found, 2 * found))
        gain = now / then - 1
        if gain < GAIN:
            return found, f"twice as many would bring {gain:.0%}: answers of {row.out} tokens"
        wider = {**arguments, "max_num_seqs": 2 * found}
        held = rows_held(model, wider, gpu_bytes, row.typical)
        if held < 2 * found:
            return found, f"the KV cache has room for {held} rows of about {row.typical} tokens"
        found *= 2
    return found, f"answers of {row.out} tokens; half as many would read the weights twice as often"
