"""Computes a finished shard's figures: rows, tokens, seconds, and sources of answers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from prefect_raybatch.ledger.increments import ASKED, MERGED_ROW, REUSED
from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.stages.columns import (
    ANSWERS,
    CACHED_TOKENS,
    ENGINE_BEGAN,
    ENGINE_SPENT,
    FINISH,
    FORMED,
    MERGED,
    PREPARE_SPENT,
    PROMPT_TOKENS,
    READ_SPENT,
    REUSE,
    TRUNCATED,
    HiddenColumn,
)


def shard_figures(
    load: ShardStats, table: pa.Table, began: float, counts: Mapping[str, float]
) -> ShardStats:
    """Return the figures of a finished shard: `load`, `counts`, and figures of its rows.

    `load` has the engine's load figures, `counts` further ones by name (`ShardStats.others`).
    `began` is when the finish stage received the block `table`, in seconds since 1970.
    """
    answers = table[ANSWERS].to_pylist()
    ends = table[FINISH].to_pylist()
    merged = table[MERGED].to_pylist()
    truncated = formed = read = None
    if TRUNCATED in table.column_names:
        truncated = sum(map(bool, table[TRUNCATED].to_pylist()))
    if FORMED in table.column_names:
        formed = sum(
            bool(form) and reason == "length"
            for form, reason in zip(table[FORMED].to_pylist(), ends, strict=True)
        )
    if READ_SPENT in table.column_names:
        read = _spent(table, READ_SPENT)
    figures = replace(
        load,
        others={**load.others, **counts},
        rows=table.num_rows,
        prompt_tokens=sum(
            n or 0 for n, m in zip(table[PROMPT_TOKENS].to_pylist(), merged, strict=True) if not m
        ),
        cached_tokens=_sum(table, CACHED_TOKENS),
        output_tokens=sum(
            len(ids) for a, m in zip(answers, merged, strict=True) if a and not m for ids in a
        ),
        cut_off=sum(reason == "length" for reason in ends),
        cut_off_structured=formed,
        deduplicated=sum(map(bool, merged)),
        truncated=truncated,
        started=_spent(table, ENGINE_BEGAN),
        ended=round(time.time(), 4),
        read_s=read,
        prepare_s=_spent(table, PREPARE_SPENT),
        engine_s=_spent(table, ENGINE_SPENT),
        finish_s=round(time.time() - began, 4),
    )
    return _reused(table, figures)


def _reused(table: pa.Table, stats: ShardStats) -> ShardStats:
    """Return `stats` with the number of rows by source of their answer, and the tokens saved.

    The tokens saved are the prompt and answer tokens of reused and merged rows. If the run does not
    reuse answers, `stats` is returned unchanged.
    """
    if REUSE not in table.column_names:
        return stats
    kinds = table[REUSE].to_numpy()
    answers, prompts = table[ANSWERS].to_pylist(), table[PROMPT_TOKENS].to_pylist()
    saved = [
        (prompts[i] or 0) + sum(map(len, answers[i] or ()))
        for i in np.flatnonzero((kinds == REUSED) | (kinds == MERGED_ROW)).tolist()
    ]
    return replace(
        stats,
        deduplicated=None,
        reused=int((kinds == REUSED).sum()),
        merged=int((kinds == MERGED_ROW).sum()),
        asked=int((kinds == ASKED).sum()),
        saved_tokens=sum(saved),
    )


def _spent(table: pa.Table, column: HiddenColumn) -> float:
    """Return the seconds in a column whose rows all hold the same value."""
    return round(float(table[column][0].as_py()), 4)


def _sum(table: pa.Table, name: str) -> int:
    return int(np.nansum(table[name].to_numpy(zero_copy_only=False).astype(float)))
