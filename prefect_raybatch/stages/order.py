"""Determines the order in which the rows of a block enter the engine; equal requests enter once.

Rows with a common prefix are adjacent, so that the KV blocks of the first row are still in the
prefix cache for the next. Groups of such rows, and rows within a group, are in the order of their
cost (`max_tokens`, then prompt length), the costliest first, so that no long row is left to run
alone at the end. vLLM 0.29 puts a prompt's blocks into its cache when it schedules the prompt,
before it looks up the next waiting request (`KVCacheManager.allocate_slots`), so neighbours share
blocks even within one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa

from prefect_raybatch.bounded import Returned
from prefect_raybatch.model.memory import CACHE_BLOCK
from prefect_raybatch.spec.request import SamplingFields

# Rows stay adjacent if they share at least so many tokens more than all rows of their branch do.
GROUP = 2 * CACHE_BLOCK
GREEDY = 1e-5  # vLLM treats a temperature below this as 0
# Sampling fields with which equal requests may get different answers.
NOT_EXACT = ("extra_args", "vllm_xargs", "logits_processors")


@dataclass(frozen=True)
class EngineOrder:
    """Row indexes in the order in which the rows enter the engine.

    Of several rows with equal requests, `rows` has only one. `copies` maps this row to the other
    rows, which get its answer too.
    """

    rows: list[int]
    copies: dict[int, list[int]] = field(default_factory=dict)

    def served(self, row: int) -> list[int]:
        """Return the rows that get the answer to `row`'s request: `row` first, then its copies."""
        return [row, *self.copies.get(row, ())]


def token_keys(tokens: pa.Array | pa.ChunkedArray) -> list[bytes]:
    """Return a sort key for each prompt; keys compare like the lists of token ids.

    `tokens` is a list<int32> without nulls: the token ids of each prompt.
    """
    if isinstance(tokens, pa.ChunkedArray):
        tokens = tokens.combine_chunks()
    # Unsigned big-endian numbers compare like their bytes, and Python compares bytes in C.
    data = tokens.flatten().to_numpy(zero_copy_only=False).astype(">u4").tobytes()
    lengths = tokens.value_lengths().to_numpy(zero_copy_only=False)
    edges = [0, *(4 * np.cumsum(lengths, dtype=np.int64)).tolist()]
    return [data[start:end] for start, end in pairwise(edges)]


def adapter_keys(keys: Sequence[bytes], adapters: Sequence[int]) -> list[bytes]:
    """Return keys that group rows by adapter and distinguish equal prompts of two adapters.

    `keys` are the prompts' keys, `adapters` the number of each row's adapter, 0 for none.
    """
    if not any(adapters):
        return list(keys)
    # A prefix of GROUP tokens for each adapter, so that rows branch by adapter first.
    heads = {number: number.to_bytes(4, "big") * GROUP for number in set(adapters)}
    return [heads[number] + key for key, number in zip(keys, adapters, strict=True)]


def arrange(
    keys: Sequence[bytes],
    params: Sequence[SamplingFields],
    valid: Sequence[int],
    sort: bool,
    merge: bool,
) -> EngineOrder:
    """Return the order in which the rows with the indexes `valid` enter the engine.

    `keys` (see `token_keys`) and sampling fields `params` have an entry for each row of the block.
    `sort`: order rows by prefix and cost; without it, they keep the order of `valid`. `merge`: send
    equal requests once if their answers are certain to be equal.
    """
    asked = _merged(keys, params, valid) if merge else EngineOrder(list(valid))
    return EngineOrder(_sorted(keys, params, asked.rows), asked.copies) if sort else asked


def is_exact(params: SamplingFields) -> bool:
    """Return whether equal prompts with the sampling fields `params` have equal answers in vLLM.

    True for a pooling request, and for a single greedily sampled answer without a logits processor
    or extra arguments.
    """
    if "task" in params:  # a pooling request: nothing is sampled
        return True
    return (
        is_greedy(params)
        and params.get("n") in (None, 1)
        and not any(params.get(n) for n in NOT_EXACT)
    )


def is_greedy(params: SamplingFields) -> bool:
    """Return whether requests with these fields are sampled greedily (temperature below GREEDY)."""
    temperature = params.get("temperature", 1.0)
    # A row's own fields may have any type; vLLM refuses those that it cannot use.
    return isinstance(temperature, (int, float)) and 0 <= temperature < GREEDY


def _merged(
    keys: Sequence[bytes], params: Sequence[SamplingFields], valid: Sequence[int]
) -> EngineOrder:
    first: dict[tuple[bytes, str], int] = {}
    rows: list[int] = []
    copies: dict[int, list[int]] = {}
    known = _by_identity(lambda p: repr(sorted(p.items())) if is_exact(p) else None)
    for row in valid:
        same = known(params[row])
        leader = row if same is None else first.setdefault((keys[row], same), row)
        if leader == row:
            rows.append(row)
        else:
            copies.setdefault(leader, []).append(row)
    return EngineOrder(rows, copies)


def _sorted(keys: Sequence[bytes], params: Sequence[SamplingFields], rows: list[int]) -> list[int]:
    """Return the rows in the order of their prompts' prefix tree, the costliest branch first.

    A row's cost is its `max_tokens`, then the length of its prompt. A branch costs as much as its
    costliest row.
    """
    rows = sorted(rows, key=keys.__getitem__)
    common = common_tokens([keys[row] for row in rows])
    bound = _by_identity(_bound)
    # Each answer token costs a step, a whole prompt only part of one: so max_tokens counts first.
    cost = np.array([(bound(params[row]) << 40) + len(keys[row]) for row in rows], np.int64)
    made: list[int] = []
    branches = [(0, len(rows))] if rows else []
    while branches:  # not recursive: if each prompt extends the last, the tree is as deep as rows
        start, end = branches.pop()
        if end - start == 1:
            made.append(rows[start])
            continue
        inside = common[start + 1 : end]
        cuts = np.flatnonzero(inside < inside.min() + GROUP) + start + 1
        starts = np.concatenate(([start], cuts))
        ends = np.concatenate((cuts, [end]))
        costs = np.maximum.reduceat(cost[start:end], starts - start)
        order = np.argsort(-costs, kind="stable")[::-1]  # the last is taken first
        branches += zip(starts[order].tolist(), ends[order].tolist(), strict=True)
    return made


def _bound(params: SamplingFields) -> int:
    """Return the request's `max_tokens`, at most 1 << 22; 0 if it has none."""
    given = params.get("max_tokens")
    return min(max(given, 0), 1 << 22) if isinstance(given, int) else 0


def common_tokens(keys: Sequence[bytes]) -> np.ndarray:
    """Return int64[len(keys)]: how many first tokens each prompt shares with the one before it.

    `keys` are the prompts' sort keys from `token_keys`. The first value is 0.
    """
    common = np.zeros(len(keys), np.int64)
    before = np.empty(0, np.uint8)
    for i, key in enumerate(keys):
        now = np.frombuffer(key, np.uint8)
        least = min(len(now), len(before))
        differ = now[:least] != before[:least]
        at = int(differ.argmax()) if least else 0
        common[i] = (at if least and differ[at] else least) // 4
        before = now
    return common


def _by_identity(
    make: Callable[[SamplingFields], Returned],
) -> Callable[[SamplingFields], Returned]:
    """Return `make` with its results cached by the `id` of its argument, which must stay alive.

    This saves time, because most rows share the job's dict of fields.
    """
    made: dict[int, Returned] = {}

    def known(params: SamplingFields) -> Returned:
        key = id(params)
        if key not in made:
            made[key] = make(params)
        return made[key]

    return known
