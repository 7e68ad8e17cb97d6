"""How many engines share a GPU: when that pays by the cost model, and what bounds it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prefect_raybatch.model.arguments import EngineArguments
from prefect_raybatch.model.memory import Model, gib
from prefect_raybatch.sizing.cards import EngineGpu
from prefect_raybatch.sizing.cost import HOST_SECONDS, Tokens, gpu_seconds, rows_per_second
from prefect_raybatch.sizing.fit import Fit
from prefect_raybatch.sizing.sequences import TRIED, best_sequences, fewest, holds_rows

SHORT = 32  # tokens out: what Python costs of longer answers is not measured, and packing lost
CORES = 3  # CPU cores a packed engine: its actor, its core process, its part of the CPU stages
MOST_ENGINES = 6
ENGINE_GAIN = 0.03  # the least for which more of them are taken: runs differ by 1 to 3 %
# Of tasks that pool: HOST_SECONDS is of drawing tokens, and what a vector takes of Python is less.
MOST_POOLING = 2


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

    1 if too little is known about the GPU. `length` is the context length in tokens, if known;
    `pools` is true for a task that does not generate; `sequences` are the values of max_num_seqs
    that may be chosen.
    """
    parts = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    if parts > 1:
        return 1, f"an engine spans {parts} GPUs"
    if row.out is None:
        return 1, row.why
    if row.out > SHORT:
        return 1, f"answers of up to {row.out} tokens ({row.why}), more than {SHORT}"
    if model is None:
        return 1, "the size of the model is unknown"
    if gpu.card is None:
        return 1, "the GPU's memory and speed are unknown"
    card = gpu.card
    fit = Fit(model, arguments, gpu.memory, length or 0).asking(max_num_seqs=sequences[0])
    numbers = range(1, MOST_ENGINES + 1)
    seqs = {n: best_sequences(fit, card, row, n, sequences) for n in numbers}

    def rate(n: int) -> float:
        return rows_per_second(model, card, row, n, seqs[n])

    best = fewest(numbers, rate, ENGINE_GAIN)
    seconds = gpu_seconds(model, card, row, seqs[best])
    times = (
        f"{1000 * HOST_SECONDS:.2f} ms of Python a row, {1000 * seconds:.2f} ms of {card.name} "
        f"for about {row.own} uncached and {row.out} output tokens"
    )
    if best == 1:
        return 1, f"one engine keeps the GPU busy: {times}"
    room = max((n for n in numbers[1:] if holds_rows(fit, n, row)), default=1)
    cores = max(1, math.floor(cpus_a_gpu / max(CORES, cpus_an_engine)))
    most = MOST_POOLING if pools else MOST_ENGINES
    bound = min(room, cores, most)
    found = best if best <= bound else fewest(range(1, bound + 1), rate, ENGINE_GAIN)
    bounds = []
    if room < best:
        bounds.append(f"{room} fit in {gib(gpu.memory)}")
    if cores < best:
        bounds.append(f"{cpus_a_gpu:g} CPUs per GPU allow {cores}")
    if pools and best > most:
        bounds.append(f"at most {most} for pooling tasks")
    elif found == best == MOST_ENGINES:
        bounds.append(f"at most {MOST_ENGINES}")
    return found, f"{best} engines keep the GPU busy: {times}" + "".join(
        f"; {text}" for text in bounds
    )
