"""How many engines share a GPU: when that pays, and what bounds it. Pure.

An engine works in turns: Python on one core (about 0.9 ms a row), then the GPU. While one is in
Python another can have the GPU, as clerks share a copier: the textbook model of a closed queue
with n customers, one server and time to think, solved by mean value analysis. Where its figures
come from, and how far it agrees with what was measured: docs/tuning.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.early_stop import label_cap, labels_cut_short
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.job.sampling import Sampling
from prefect_raybatch.model.arguments import EngineArguments
from prefect_raybatch.model.memory import Model, gib, share
from prefect_raybatch.sizing.cards import Card, EngineGpu

# Seconds of Python a row of a short answer: one engine gave 1,102 rows/s on an H200.
HOST_SECONDS = 0.9e-3
# Share of a card's FLOPs that prefill reaches: three engines on that H200 took 0.55.
PREFILL_PEAK = 0.6
BUSY = 0.85  # a GPU busy for so much of its time is enough: one more engine brings a few per cent
SHORT = 32  # tokens out: at 128 and more packing loses, and between 6 and 128 nothing is measured
CORES = 3  # CPU cores a packed engine: its actor, its core process, its part of the CPU stages
MOST_ENGINES = 6
# Of tasks that pool: HOST_SECONDS is of drawing tokens, and what a vector takes of Python is less.
MOST_POOLING = 2
CHARACTERS = 4  # a token, roughly
# Of a prepared image, roughly: 28 x 28 pixels of two frames and three colours in bfloat16, which
# Qwen2-VL and its kin make a token of. Others take 1,200 (PaliGemma) to 24,000 (SmolVLM).
IMAGE_TOKEN_BYTES = 28 * 28 * 2 * 3 * 2
MARKUP = 8  # tokens that a chat template adds to a row


@dataclass(frozen=True)
class Tokens:
    """Tokens of a row, estimated before any is seen: those that all prompts begin with, the rest
    of the prompt, and the most that an answer has (None: not known), with the reason."""

    shared: int
    own: int
    out: int | None
    why: str

    @property
    def typical(self) -> int:
        return self.shared + self.own + (self.out or 0)


def tokens(prompt: Prompt, sampling: Sampling, row_bytes: float, early: bool = False) -> Tokens:
    """Of a row of `row_bytes` bytes: of input columns, or of its images as they are prepared;
    `early`: of a label no more is asked for than decides it."""
    first, _, rest = (prompt.template or "").partition("{")
    shared = (len(prompt.system or "") + len(first)) / CHARACTERS
    own = row_bytes / (IMAGE_TOKEN_BYTES if prompt.images.used else CHARACTERS)
    own += len(rest) / CHARACTERS + MARKUP
    return Tokens(round(shared), round(own), *_most_out(prompt, sampling, early))


def _most_out(prompt: Prompt, sampling: Sampling, early: bool) -> tuple[int | None, str]:
    extra = sampling.model_extra or {}
    structured = extra.get("structured_outputs") or {}
    choice = sampling.choice or (structured.get("choice") if isinstance(structured, dict) else None)
    answers = int(extra.get("n") or 1)
    most = sampling.max_tokens
    if choice:
        # Tokens of one character are rare, so that half as many as characters is a safe bound.
        most = min(most, max(len(str(label)) for label in choice) // 2 + 1)
        labels = labels_cut_short(sampling.given()) if early else None
        if labels and (cap := label_cap(labels)) < most:
            return cap * answers, "what decides between the choices"
        return most * answers, "the longest choice"
    if prompt.function:
        return None, "prompt.function may ask for answers of any length"
    return most * answers, "sampling.max_tokens"


def gpu_seconds(model: Model, card: Card, row: Tokens, seqs: int) -> float:
    """The GPU's own time for a row: FLOPs of the tokens that are not cached, and for each step of
    decoding the weights, shared by `seqs` sequences, and the sequence's own KV cache."""
    out = row.out or 0
    compute = 2 * model.active * (row.own + out) / (PREFILL_PEAK * card.flops)
    kept = model.kv_bytes(row.shared + row.own + out // 2)
    return compute + out * (model.weights / seqs + kept) / card.bandwidth


def busy(engines: int, host: float, gpu: float) -> float:
    """Share of its time that the GPU works when so many engines take turns (0 to 1)."""
    waiting = rate = 0.0
    for n in range(1, engines + 1):
        answer = gpu * (1 + waiting)
        rate = n / (host + answer)
        waiting = rate * answer
    return rate * gpu


def wanted(host: float, gpu: float) -> int:
    """The fewest engines, at most `MOST_ENGINES`, that keep the GPU busy."""
    return next((n for n in range(1, MOST_ENGINES) if busy(n, host, gpu) >= BUSY), MOST_ENGINES)


def fitting(
    model: Model, arguments: EngineArguments, gpu_bytes: int, row: Tokens, length: int | None
) -> int:
    """How many engines fit on the GPU, each with KV cache for `max_num_seqs` rows of twice the
    typical length and for one of `length` tokens."""
    for engines in range(MOST_ENGINES, 1, -1):
        try:
            cache = share(model, arguments, gpu_bytes, engines).kv_cache
        except ConfigError:
            continue
        rows = arguments.max_num_seqs * model.kv_bytes(2 * row.typical)
        need = max(rows, model.kv_bytes(length or 0))
        if cache >= (arguments.kv_cache_bytes or need):
            return engines
    return 1


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
) -> tuple[int, str]:
    """(engines on a GPU, why) for `engine.engines_per_gpu: auto`, on a GPU of which too little
    may be known: then 1. `length` is the context length in tokens, where it is known; `pools`: the
    task is not to generate."""
    parts = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    if parts > 1:
        return 1, f"an engine takes {parts} GPUs"
    if row.out is None:
        return 1, row.why
    if row.out > SHORT:
        return 1, f"answers of up to {row.out} tokens ({row.why}) are long: over {SHORT}"
    if model is None:
        return 1, "the size of the model is not known"
    if gpu.card is None:
        return 1, "the GPU's memory and speed are not known"
    seconds = gpu_seconds(model, gpu.card, row, arguments.max_num_seqs)
    best = wanted(HOST_SECONDS, seconds)
    fit = fitting(model, arguments, gpu.memory, row, length)
    cores = max(1, math.floor(cpus_a_gpu / max(CORES, cpus_an_engine)))
    times = (
        f"{1000 * HOST_SECONDS:.1f} ms of Python a row, {1000 * seconds:.2f} ms of {gpu.card.name} "
        f"for about {row.own} tokens that are not cached and {row.out} out"
    )
    if best == 1:
        return 1, f"one keeps the GPU busy: {times}"
    most = MOST_POOLING if pools else MOST_ENGINES
    found = min(best, fit, cores, most)
    bounds = []
    if fit < best:
        bounds.append(f"{fit} fit in {gib(gpu.memory)}")
    if cores < best:
        bounds.append(f"{cpus_a_gpu:g} CPUs a GPU allow {cores}")
    if pools and best > most:
        bounds.append(f"{most} at most where no tokens are drawn")
    elif found == best == MOST_ENGINES:
        bounds.append(f"{MOST_ENGINES} at most")
    return found, f"{best} keep the GPU busy: {times}" + "".join(f"; {text}" for text in bounds)
