"""Chooses how many engines share a GPU, and how many rows each computes at once. No I/O.

More engines are chosen if the cost model predicts a gain. More rows at once are faster because a
decoding step reads all weights once, whatever the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.model.arguments import EngineArguments
from prefect_raybatch.model.memory import Model, gib, share
from prefect_raybatch.sizing.cards import Card, EngineGpu
from prefect_raybatch.sizing.cost import Tokens, gpu_seconds, host_seconds, rows_per_second
from prefect_raybatch.sizing.fit import Fit
from prefect_raybatch.sizing.shards import SEQUENCES

SHORT = 32  # most output tokens of a short answer
# CPU cores per engine that shares a GPU: its actor and its part of the CPU stages. An engine that
# pools has its core in the actor's process; the others have a process more.
CORES, POOLING_CORES = 3, 2.5
MOST_ENGINES = 6
ENGINE_GAIN = 0.05  # least gain for more engines: the cost model is off by 5 % for 8B models
TRIED = (SEQUENCES, 512, 1024)  # values of max_num_seqs; higher ones were not measured
MOST_TOTAL = 2048  # sequences of all engines on a GPU: two of 1,024 were measured, no more
# Sequences of an engine whose model is a mixture of experts: 1,024 of half of Qwen3-30B-A3B gave
# 0.97 and 0.81 of the rate of 512, which no constant of the cost model says (sweep-h100.jsonl).
MOST_EXPERTS = 512
# The least gain for which more sequences are taken: they cost nothing where the KV cache holds
# them, and 1,024 in place of 512 were measured to bring more than the model says.
SEQUENCE_GAIN = 0.005


def counted_cpus(asked: float, pools: bool) -> float:
    """Return the CPU cores that an engine takes on a GPU that it shares, with its CPU stages.

    `asked` are those that the job sets for an engine. `pools` says that the task does not generate.
    """
    return max(POOLING_CORES if pools else CORES, asked)


def holds_rows(fit: Fit, engines: int, row: Tokens) -> bool:
    """Return whether the KV cache of each of `engines` engines on a GPU probably holds enough rows.

    Enough means `max_num_seqs` rows as long as `row`, with the shared prefix kept once. If several
    engines share the GPU, each has a fixed part of its memory, so more room is required: for
    `max_num_seqs` rows of twice that length, and for at least one row of the context length. If the
    job sets the size of the cache, each part must have room for a cache of that size instead.
    """
    arguments, model = fit.arguments, fit.model
    if engines == 1:
        return fit.rows_held(row) >= arguments.max_num_seqs
    try:
        cache = share(model, arguments, fit.gpu_bytes, engines).kv_cache
    except ConfigError:
        return False
    each = model.kv_bytes(row.cached_per_row(times=2))
    rows = model.kv_bytes(row.cached_once) + arguments.max_num_seqs * each
    return cache >= (arguments.kv_cache_bytes or max(rows, model.kv_bytes(fit.length)))


def fewest(tried: Sequence[int], rate: Callable[[int], float], gain: float) -> int:
    """Return the first number of `tried` (ascending) whose `rate` is close to the best rate.

    A rate is close if the best rate is at most (1 + `gain`) times as high.
    """
    best = max(map(rate, tried))
    return next(number for number in tried if rate(number) * (1 + gain) >= best)


def fewest_sequences(
    fit: Fit, card: Card, row: Tokens, engines: int, tried: Sequence[int] = TRIED
) -> int:
    """Return the smallest value of `tried` (max_num_seqs) whose rate is close to the best rate.

    The rate is in rows per second of `engines` engines on one GPU. The first value is always
    considered. A higher value is skipped if the KV cache has no room for so many rows, or if the
    predictions of the cost model were never compared with measurements at so many.
    """
    most = min(MOST_TOTAL // engines, MOST_EXPERTS if fit.model.sparse else MOST_TOTAL)
    measured = [n for n in tried[1:] if n <= most]
    room = [n for n in measured if holds_rows(fit.with_arguments(max_num_seqs=n), engines, row)]

    def rate(seqs: int) -> float:
        return rows_per_second(fit.model, card, row, engines, seqs)

    return fewest([tried[0], *room], rate, SEQUENCE_GAIN)


def _row_times(model: Model, card: Card, row: Tokens, seqs: int) -> str:
    host, gpu = host_seconds(model, row, seqs), gpu_seconds(model, card, row, seqs)
    return (
        f"{1000 * host:.2f} ms of Python a row, {1000 * gpu:.2f} ms of {card.name} "
        f"for about {row.own} uncached and {row.expected:.0f} output tokens"
    )


def choose_engines_per_gpu(
    *,
    model: Model | None,
    gpu: EngineGpu,
    cpus_a_gpu: float,
    cpus_an_engine: float,
    arguments: EngineArguments,
    row: Tokens,
    length: int | None,
    pools: bool = False,
    sequences: Sequence[int] = TRIED,
) -> tuple[int, str]:
    """Return (engines per GPU, reason) for `engine.engines_per_gpu: auto`.

    The number is 1 if the model or the GPU is unknown, or if an engine spans several GPUs. `length`
    is the context length in tokens, if known. `pools` says that the task does not generate.
    `sequences` are the possible values of max_num_seqs.
    """
    parts = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    if parts > 1:
        return 1, f"an engine spans {parts} GPUs"
    if model is None:
        return 1, "the size of the model is unknown"
    if gpu.card is None:
        return 1, "the GPU's memory and speed are unknown"
    card = gpu.card
    fit = Fit(model, arguments, gpu.memory, length or 0).with_arguments(max_num_seqs=sequences[0])
    numbers = range(1, MOST_ENGINES + 1)
    seqs = {n: fewest_sequences(fit, card, row, n, sequences) for n in numbers}

    def rate(n: int, row: Tokens = row) -> float:
        return rows_per_second(model, card, row, n, seqs[n])

    def fewest_of(numbers: Sequence[int]) -> int:
        found = fewest(numbers, rate, ENGINE_GAIN)
        if row.form or row.mean:
            return found
        # Free answers are often shorter than max_tokens; then more engines must be as fast, too.
        shorter = replace(row, mean=row.out / 2)
        return min(found, fewest(numbers, partial(rate, row=shorter), ENGINE_GAIN))

    best = fewest_of(numbers)
    times = _row_times(model, card, row, seqs[best])
    if best == 1:
        return 1, f"one engine keeps the GPU busy: {times}"
    room = max((n for n in numbers[1:] if holds_rows(fit, n, row)), default=1)
    cores = max(1, math.floor(cpus_a_gpu / counted_cpus(cpus_an_engine, pools)))
    chosen = fewest_of(range(1, min(room, cores) + 1))
    reasons = [f"{best} engines keep the GPU busy: {times}"]
    if room < best:
        reasons.append(f"{room} fit in {gib(gpu.memory)}")
    if cores < best:
        reasons.append(f"{cpus_a_gpu:g} CPUs per GPU allow {cores}")
    if chosen == best == MOST_ENGINES:
        reasons.append(f"at most {MOST_ENGINES}")
    return chosen, "; ".join(reasons)


def choose_max_num_seqs(
    *,
    asked: int | None,
    fit: Fit | None,
    card: Card | None,
    row: Tokens,
    engines_per_gpu: int,
    step: int | None = None,
) -> tuple[int, str]:
    """Return (max_num_seqs, reason).

    The value is the job's (`asked`), if set. The default is 256. It is 512 or 1,024 if the cost
    model predicts a gain of at least 0.5 % and the KV cache probably holds that many typical rows.

    `fit` and `card` are None on a CPU, or if the model or the GPU is unknown. `step` is the number
    of tokens of an engine step, if the job sets it. It limits the default, because each sequence
    has at least one token in a step.
    """
    if asked is not None:
        return asked, "engine.max_num_seqs"
    seqs, why = _chosen(fit, card, row, engines_per_gpu)
    if step is not None and step < seqs:
        return step, "engine.max_num_batched_tokens, since each takes a token of a step"
    return seqs, why


def _chosen(
    fit: Fit | None, card: Card | None, row: Tokens, engines_per_gpu: int
) -> tuple[int, str]:
    if fit is None or card is None:
        return SEQUENCES, "default of engine.max_num_seqs"
    best = fewest_sequences(fit, card, row, engines_per_gpu)
    each = f" in each of {engines_per_gpu} engines on a GPU" if engines_per_gpu > 1 else ""

    def gain(seqs: int) -> float:
        model = fit.model
        usual = rows_per_second(model, card, row, engines_per_gpu, SEQUENCES)
        return rows_per_second(model, card, row, engines_per_gpu, seqs) / usual - 1

    if best > SEQUENCES:
        what = f"about {gain(best):.0%} faster than {SEQUENCES}"
        return best, f"{what}: answers of {row.out} tokens{each}"
    more = next((n for n in TRIED[1:] if gain(n) > SEQUENCE_GAIN), None)
    if more is None:
        what = f"{TRIED[-1]} would bring about {gain(TRIED[-1]):.0%}"
        return SEQUENCES, f"{what}: answers of {row.out} tokens{each}"
    if engines_per_gpu > 1:
        return SEQUENCES, f"{more} rows do not fit into the KV cache{each}"
    held = fit.with_arguments(max_num_seqs=more).rows_held(row)
    return SEQUENCES, f"the KV cache holds {held} rows of about {row.typical} tokens"
