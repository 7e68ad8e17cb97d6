"""Chooses how many rows a shard has, and on how many shards an engine works at once. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from prefect_raybatch.sizing.cost import Tokens
from prefect_raybatch.spec.sizes import RowSpec, SizeSpec
from prefect_raybatch.words import counted

SHARDS = 8  # shards for a single engine, so that progress and resume are fine enough
# Shards for each of several engines: at the end, some engines wait for the last shard of others.
SHARDS_A_WORKER = 16
# Least tokens of a shard, those of answers counted twice: a second of a large GPU with an 8B. Rows
# with more than 1/batch_size of these tokens make shards of fewer than batch_size rows.
LEAST_TOKENS = 1 << 16
LEAST_ROWS = 16
OUT_WEIGHT = 2  # an output token takes about as much GPU time as two prompt tokens
MOST_ROWS = 4000  # a shard takes seconds, and 10 million rows are 2,500 commits
SEQUENCES = 256  # default max_num_seqs of an engine, unless more are known to be faster
MOST_BYTES = 128 << 20  # uncompressed input bytes a shard, so that a block stays one block
IMAGE_BYTES = 256 << 20  # the same for rows with prepared images


def row_tokens(row: RowSpec, row_bytes: float) -> float:
    """Return a measure of the GPU time of a row with `row_bytes` bytes of input, in tokens.

    Counts the prompt's tokens that are not cached, plus twice the most tokens of its answers.
    """
    tokens = Tokens.of(row, row_bytes)
    return tokens.own + OUT_WEIGHT * row.out


def choose_rows_per_shard(
    spec: SizeSpec, *, rows: int, row_bytes: float, engines: int
) -> tuple[int, str]:
    """Return (rows per shard, reason).

    The job's number is used if it is set. Otherwise the number is rows / (engines * 16), but rows /
    8 for a single engine, within these limits:
    - It is at least `batch_size`, because smaller blocks starve the engine. If rows have many
      tokens, it may be lower: with few and large shards, some engines would be idle while others
      finish.
    - It is at most 4,000 rows or 128 MiB (256 MiB of images).

    Source of the formula: Ray Data LLM's sizing guide asks for at least 2 to 4 partitions per
    worker and blocks no smaller than the batch. With more partitions, engines wait less for each
    other at the end.
    """
    if spec.rows_per_shard:
        return min(spec.rows_per_shard, max(rows, 1)), "source.rows_per_shard"
    each = SHARDS_A_WORKER if engines > 1 else SHARDS
    wanted = math.ceil(rows / (engines * each))
    least, least_why = spec.batch_size, f"engine.batch_size {spec.batch_size}"
    tokens = row_tokens(spec.row, row_bytes)
    enough = max(LEAST_ROWS, math.ceil(LEAST_TOKENS / max(tokens, 1.0)))
    if enough < spec.batch_size:
        least, least_why = enough, f"{enough} rows of about {tokens:,.0f} tokens"
    most_bytes = IMAGE_BYTES if spec.row.images else MOST_BYTES
    by_bytes = max(1, int(most_bytes / max(row_bytes, 1.0)))
    chosen = min(max(wanted, least), MOST_ROWS, by_bytes, max(rows, 1))
    why = f"{counted(rows, 'row')} / ({counted(engines, 'engine')} * {counted(each, 'shard')})"
    if chosen == by_bytes:
        why = f"{most_bytes >> 20} MiB / {row_bytes:,.0f} bytes per row"
    elif chosen == MOST_ROWS:
        why += f", at most {MOST_ROWS:,}"
    elif chosen == rows < least:
        why = f"all rows, fewer than {least_why}"
    elif chosen > wanted:
        why += f", at least {least_why}"
    return chosen, why


def longest_first(works: Sequence[float]) -> list[int]:
    """Return the indices of tasks in the order to start them, so that no long one comes last.

    `works` are the tasks' amounts of work; the largest come first. Amounts are rounded to powers of
    1.25, and equal ones keep their order.
    """
    steps = [round(math.log(max(work, 1.0)) / math.log(1.25)) for work in works]
    return sorted(range(len(works)), key=lambda number: -steps[number])


def known_max_num_seqs(asked: int | None, figures: Mapping[str, float]) -> int | None:
    """Return max_num_seqs as the job sets it (`asked`), else as the engines reported it.

    `figures` are the engines' figures by name. Returns None if it is in neither.
    """
    if asked is not None:
        return asked
    return round(figures.get("sequences", 0.0)) or None


def concurrent_batches(
    asked: int | None, rows_per_shard: int, seqs: int, uneven: bool = False
) -> int:
    """Return the number of shards that are in flight in an engine at once.

    This is the job's value (`asked`), if set. Otherwise enough shards for `seqs` (max_num_seqs)
    rows are in flight, plus one, and at least 2: the next shard begins while the last rows of
    another are answered. `uneven` says that some answers are much longer than others. Then there
    are shards for twice `seqs` rows, because the longest answer holds up a shard.
    """
    if asked:
        return asked
    return max(2, math.ceil((2 if uneven else 1) * seqs / rows_per_shard) + 1)


def problems(
    *, rows: int, rows_per_shard: int, concurrent: int, engines: int, seqs: int
) -> list[str]:
    """Return texts about settings that leave engines idle, each with a better value.

    `concurrent` is the number of shards in flight in an engine, `seqs` is max_num_seqs.
    """
    messages = []
    # A run with fewer rows than that has all of them in flight.
    if min(rows_per_shard, max(rows, 1)) * concurrent < min(seqs, rows):
        need = math.ceil(seqs / rows_per_shard)
        messages.append(
            f"engines starve: {counted(rows_per_shard, 'row')} * {counted(concurrent, 'shard')} in "
            f"flight is under max_num_seqs {seqs}. Set engine.max_concurrent_batches to {need}"
        )
    shards = math.ceil(rows / rows_per_shard)
    fit = max(1, math.ceil(rows / (4 * engines)))
    if rows < engines:
        messages.append(
            f"{counted(rows, 'row')} for {counted(engines, 'engine')} leave most idle. "
            "Set engine.replicas to 1"
        )
    elif engines > 1 and shards < 2 * engines and fit < rows_per_shard:
        messages.append(
            f"{counted(shards, 'shard')} for {counted(engines, 'engine')} leave some idle. "
            f"Set source.rows_per_shard to {fit:,}"
        )
    return messages
