"""How many rows an engine computes at once: when more of them pay, and what bounds it. Pure.

A step of decoding reads all weights, however many rows it is for, so that more rows share that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from prefect_raybatch.sizing.cards import Card
from prefect_raybatch.sizing.engines import Tokens, gpu_seconds
from prefect_raybatch.sizing.fit import Fit
from prefect_raybatch.sizing.shards import SEQUENCES

MORE = 512  # the most for which vLLM captures CUDA graphs: 1024 gave no more on an H200
GAIN = 0.05  # the least gain for which more sequences are taken


def choose_max_num_seqs(
    *,
    asked: int | Literal["auto"],
    fit: Fit | None,
    card: Card | None,
    row: Tokens,
    longest: int,
    engines_per_gpu: int,
) -> tuple[int, str]:
    """(max_num_seqs, why): as `asked`, or for `auto` 256, and 512 for an engine alone on its GPUs
    where that brings 5 % by `gpu_seconds` and the KV cache is likely to hold so many rows of the
    typical length. `fit` and `card` are None on a CPU and where model or GPU are not known;
    `longest` are the tokens of an answer of which nothing else is known.
    """
    if asked != "auto":
        return asked, "engine.max_num_seqs"
    if engines_per_gpu > 1:
        return SEQUENCES, f"for each of {engines_per_gpu} engines on a GPU"
    if fit is None or card is None:
        return SEQUENCES, "unless engine.max_num_seqs says more"
    row = replace(row, out=row.out if row.out is not None else longest)
    usual, more = (gpu_seconds(fit.model, card, row, seqs) for seqs in (SEQUENCES, MORE))
    gain = usual / more - 1
    if gain < GAIN:
        return SEQUENCES, f"{MORE} would bring about {gain:.0%}: answers of {row.out} tokens"
    held = fit.asking(max_num_seqs=MORE).rows_held(row.typical)
    if held < MORE:
        return SEQUENCES, f"the KV cache has room for {held} rows of about {row.typical} tokens"
    return MORE, f"about {gain:.0%} faster than {SEQUENCES}: answers of {row.out} tokens"
