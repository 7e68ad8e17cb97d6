"""How many rows a shard has, and how many shards an engine works on at once. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.job.source import Source
from prefect_raybatch.words import counted

SHARDS = 8  # shards for an engine alone: progress and resume are that fine
# shards for each of several engines: with the last of them some engines wait for others
SHARDS_A_WORKER = 16
# Tokens of a shard, those of answers twice: a second of a large GPU with an 8B. Rows of more than a
# batch_size'th of that make smaller shards than batch_size.
LEAST_TOKENS = 1 << 16
LEAST_ROWS = 16
OUT_WEIGHT = 2  # a token out takes the GPU what about two of a prompt take
MOST_ROWS = 4000  # a shard takes seconds, and 10 million rows are 2,500 commits
SEQUENCES = 256  # max_num_seqs of an engine where nothing says that more of them pay
MOST_BYTES = 128 << 20  # uncompressed input bytes a shard, so that a block stays one block


IMAGE_BYTES = 256 << 20  # the same of rows whose images are prepared: mostly these


def bytes_a_shard(prompt: Prompt) -> int:
    """The most bytes that a shard is planned to have in memory."""
    return IMAGE_BYTES if prompt.images.used else MOST_BYTES


def choose_rows_per_shard(
    source: Source,
    batch_size: int,
    *,
    rows: int,
    row_bytes: float,
    engines: int,
    most_bytes: int = MOST_BYTES,
    row_tokens: float = 0.0,
) -> tuple[int, str]:
    """(rows a shard, why).

    rows / (engines * 16), or rows / 8 for an engine alone, not under `batch_size` (smaller blocks
    starve the engine) nor over 4,000 rows or `most_bytes`. Under `batch_size` where rows of
    `row_tokens` (prompt that is not cached, and twice the answer) are long: with few rows in all,
    engines would end with one shard each that others wait for. Source of the formula: Ray Data
    LLM's sizing guide asks for at least 2 to 4 partitions a worker and blocks no smaller than the
    batch; with more, engines wait less for each other at the end.
    """
    if source.rows_per_shard:
        return min(source.rows_per_shard, max(rows, 1)), "source.rows_per_shard"
    each = SHARDS_A_WORKER if engines > 1 else SHARDS
    wanted = math.ceil(rows / (engines * each))
    least, least_why = batch_size, f"engine.batch_size {batch_size}"
    enough = max(LEAST_ROWS, math.ceil(LEAST_TOKENS / max(row_tokens, 1.0)))
    if enough < batch_size:
        least, least_why = enough, f"{enough} of about {row_tokens:,.0f} tokens"
    by_bytes = max(1, int(most_bytes / max(row_bytes, 1.0)))
    chosen = min(max(wanted, least), MOST_ROWS, by_bytes, max(rows, 1))
    why = f"{counted(rows, 'row')} / ({counted(engines, 'engine')} * {counted(each, 'shard')})"
    if chosen == by_bytes:
        why = f"{most_bytes >> 20} MiB / {row_bytes:,.0f} bytes a row"
    elif chosen == MOST_ROWS:
        why += f", at most {MOST_ROWS:,}"
    elif chosen == rows < least:
        why = f"all rows, fewer than {least_why}"
    elif chosen > wanted:
        why += f", at least {least_why}"
    return chosen, why


def longest_first(works: Sequence[float]) -> list[int]:
    """The order in which to take pieces of so much work, so that none that is long is the last of
    an engine: in steps of a quarter, within which they stay as they are."""
    steps = [round(math.log(max(work, 1.0)) / math.log(1.25)) for work in works]
    return sorted(range(len(works)), key=lambda number: -steps[number])


def sequences_seen(engine: Engine, figures: Mapping[str, float]) -> int | None:
    """max_num_seqs as the job has it, or as engines told it in a run's figures; None: not known."""
    if engine.max_num_seqs != "auto":
        return engine.max_num_seqs
    return round(figures.get("sequences", 0.0)) or None


def concurrent_batches(engine: Engine, rows_per_shard: int, seqs: int, uneven: bool = False) -> int:
    """Shards in flight in an engine: set, or so many that rows in flight cover `seqs`
    (max_num_seqs) beside the one being filled, at least 2 (the tail of one overlaps the head of the
    next). Twice that where answers are of `uneven` lengths: a shard is held by its longest."""
    if engine.max_concurrent_batches:
        return engine.max_concurrent_batches
    return max(2, math.ceil((2 if uneven else 1) * seqs / rows_per_shard) + 1)


def problems(
    *, rows: int, rows_per_shard: int, concurrent: int, engines: int, seqs: int
) -> list[str]:
    """What leaves engines idle, with the number that mends it."""
    found = []
    # A run with fewer rows than that has all of them in flight.
    if min(rows_per_shard, max(rows, 1)) * concurrent < min(seqs, rows):
        need = math.ceil(seqs / rows_per_shard)
        found.append(
            f"engines starve: {counted(rows_per_shard, 'row')} * {counted(concurrent, 'shard')} at "
            f"once is under max_num_seqs {seqs}; set engine.max_concurrent_batches to {need}"
        )
    shards = math.ceil(rows / rows_per_shard)
    fit = max(1, math.ceil(rows / (4 * engines)))
    if rows < engines:
        found.append(
            f"{counted(rows, 'row')} for {counted(engines, 'engine')} leave most idle; "
            "set engine.replicas to 1"
        )
    elif engines > 1 and shards < 2 * engines and fit < rows_per_shard:
        found.append(
            f"{counted(shards, 'shard')} for {counted(engines, 'engine')} leave some idle; "
            f"set source.rows_per_shard to {fit:,}"
        )
    return found
