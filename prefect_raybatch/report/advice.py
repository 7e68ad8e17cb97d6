"""Derives advice from a run's figures: a problem, the evidence, and one change to make. Pure.

Each rule checks one cause. It returns None if the cause is absent or a figure that it needs is
unknown. `starved` and `idle_gpu` return None also for a run that was too short for its engines to
be full most of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from prefect_raybatch.job.checks import seconds_of
from prefect_raybatch.report.records import Advice, RunReport
from prefect_raybatch.sizing.shards import SEQUENCES, known_max_num_seqs
from prefect_raybatch.spec.engine import EngineSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.words import counted

# docs/decisions/advice-thresholds.md says which of these are measured and which are chosen.
FULL = 0.7  # share of max_num_seqs: an engine with fewer running sequences is not full
BUSY_GPU = 0.8  # share of time; below it the host slows a full engine down
UNEVEN = 1.25  # rows of the busiest engine divided by the mean
CUT_OFF_SHARE = 0.01  # share of the answers
FULL_CACHE = 0.9  # share of the KV cache's blocks
TOO_LONG = 0.001  # share of the rows
# Rows per engine, in multiples of max_num_seqs: filling and emptying take one round, so the engine
# is full in three of four, which is above FULL.
FULL_ROUNDS = 4
CPU_STAGES = ("read", "prepare", "finish")
MEMORY_WORDS = ("out of memory", "outofmemory", "oom")
USUAL_TOKENS = 16384  # default of engine.max_num_batched_tokens on a GPU
DEADLINE_MISSED = "the deadline was missed"
SPARE = 1.1  # factor on the engines that a deadline needs
# Shares of the data sheet: an 8B on an H200 reached 790 of 989 TFLOP/s in its largest matrix
# products, and three quarters of that overall.
MOST_FLOPS = 0.55
MOST_BANDWIDTH = 0.6
LONG_TAIL = 0.1  # share of the engines' time in which they have no rows left


def advise(report: RunReport, spec: RunSpec) -> tuple[Advice, ...]:
    """Return advice on `report`, the most pressing first."""
    return tuple(advice for rule in RULES for advice in [rule(report, spec)] if advice)


def memory(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise smaller steps or fewer sequences if engines ran out of memory."""
    losses = [
        (reason, number)
        for reason, number in report.losses.items()
        if any(word in reason.lower() for word in MEMORY_WORDS)
    ]
    if not losses:
        return None
    tokens = spec.sizes.max_num_batched_tokens or USUAL_TOKENS
    change = f"engine.max_num_batched_tokens: {max(2048, tokens // 2)}"
    if tokens <= 2048:
        seqs = _most_sequences(report, spec.sizes) or SEQUENCES
        change = f"engine.max_num_seqs: {max(1, seqs // 2)}"
    shards = sum(number for _, number in losses)
    return Advice(
        "engines ran out of memory",
        f"{counted(shards, 'shard')} had to be run again; the last error: {losses[-1][0]}",
        change,
    )


def deadline(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise more engines or a later deadline if the run took longer than limits.deadline."""
    if not spec.limits.deadline or not report.workers:
        return None
    allowed = seconds_of(spec.limits.deadline)
    taken = max(report.elapsed, report.seconds)
    if taken <= allowed:
        return None
    engines, waits = _engines(report), taken - report.seconds
    change = f"limits.deadline above the {waits:,.0f} s of start-up and waits"
    if waits < allowed:
        need = math.ceil(engines * report.seconds / (allowed - waits) * SPARE)
        change = f"{counted(need, 'engine')} instead of {engines} (raise engine.replicas)"
    return Advice(
        DEADLINE_MISSED,
        f"the run took {taken:,.0f} s, limits.deadline {spec.limits.deadline} allows "
        f"{allowed:,.0f} s: {report.seconds:,.0f} s of work by {counted(engines, 'engine')} at "
        f"{report.rows_per_s / engines:,.1f} rows/s each, and {waits:,.0f} s of start-up and waits",
        change,
    )


def starved(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise more CPU tasks or more shards in flight if engines waited for rows."""
    running, waiting = report.figures.get("running"), report.figures.get("waiting")
    full = _most_sequences(report, spec.sizes)
    if running is None or waiting is None or not full or not _long_enough(report, full):
        return None
    if running >= FULL * full or waiting >= 1:
        return None
    state = f"an engine had {running:,.0f} of {full} sequences running and none waiting"
    work = {s.name: s.seconds for s in report.stages if s.name in CPU_STAGES}
    slowest = max(work, key=lambda name: work[name], default=None)
    if slowest is None or work[slowest] < 0.5 * report.seconds:
        ahead = 2 * max(2, math.ceil(full * report.shards / report.rows))
        return Advice(
            "engines are not full",
            f"{state}; the CPU stages were idle most of the time, so too few shards were in flight",
            f"engine.max_concurrent_batches: {ahead}",
        )
    at_once = work[slowest] / report.seconds
    group = "finish" if slowest == "finish" else "prepare"
    change = f"cluster.{group}.concurrency: {math.ceil(2 * at_once) + 1}"
    if spec.prompt.function and slowest == "prepare":
        change += ", with CPUs for them; or a faster prompt.function"
    return Advice(
        f"engines are starved by {slowest}",
        f"{state}; {slowest} took {work[slowest]:,.0f} s in total, {at_once:.1f} tasks at once",
        change,
    )


def idle_gpu(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise more engines per GPU if GPUs were idle although their engines had enough sequences.

    The host is then the limit: an engine's Python runs on one core.
    """
    gpu, running = report.figures.get("gpu"), report.figures.get("running")
    full = _most_sequences(report, spec.sizes)
    if gpu is None or running is None or not full or not _long_enough(report, full):
        return None
    if gpu >= BUSY_GPU or running < FULL * full:
        return None
    return Advice(
        "the GPU is underused",
        f"GPUs were busy {gpu:.0%} of the time while engines had {running:,.0f} of {full} "
        "sequences running: the host is the bottleneck",
        "one more engine per GPU (engine.engines_per_gpu), or, if memory is short, a higher "
        "engine.max_num_seqs",
    )


def gpu_limit(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise less work or more GPUs if the GPUs reached their limit: no setting would help."""
    mfu, mbu = report.roofline.get("mfu"), report.roofline.get("mbu")
    if mfu is None or mbu is None or (mfu < MOST_FLOPS and mbu < MOST_BANDWIDTH):
        return None
    bound = "arithmetic" if mfu >= MOST_FLOPS else "memory bandwidth"
    less = ["shorter prompts", "longer shared prefixes (constant text first)"]
    if mbu >= MOST_BANDWIDTH or spec.sampling.max_tokens > 1:
        less.append("shorter answers")
    if not _quantized(spec.engine):
        less.append("smaller weights (engine.quantization: try-fp8)")
    return Advice(
        "the GPU is the limit",
        f"the run used {mfu:.0%} of its FLOPs and {mbu:.0%} of its memory bandwidth: it is bound "
        f"by {bound}",
        f"less work ({', '.join(less)}, a smaller model) or more GPUs; no other setting helps",
    )


def tail(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise smaller shards if engines had no rows left while others were still working.

    Returns None if the rows were spread unevenly: `uneven` gives advice on that.
    """
    share = report.roofline.get("idle_tail")
    if share is None or share < LONG_TAIL or _engines(report) < 2 or uneven(report, spec):
        return None
    rows = max(1, math.ceil(report.rows / _engines(report) / 32))
    return Advice(
        "engines were idle at the end",
        f"for {share:.0%} of their time, only some of them had shards left",
        f"source.rows_per_shard: {rows} for the next run",
    )


def full_cache(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise more memory for each engine if sequences waited because the KV cache was full."""
    cache, running = report.figures.get("kv_cache"), report.figures.get("running")
    waiting, full = (
        report.figures.get("waiting"),
        _most_sequences(report, spec.sizes),
    )
    if cache is None or running is None or not waiting or not full:
        return None
    if cache < FULL_CACHE or running >= FULL * full:
        return None
    return Advice(
        "the KV cache is full",
        f"{cache:.0%} of it was used on average, with {running:,.0f} of {full} sequences running "
        f"and {waiting:,.0f} waiting",
        "fewer engines per GPU (engine.engines_per_gpu), or more GPUs per engine "
        "(engine.tensor_parallel_size)",
    )


def uneven(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise smaller shards or to check a slow node, if an engine had far more rows than others."""
    engine = next((s for s in report.stages if s.name == "engine"), None)
    if engine is None or engine.busiest is None or len(report.workers) < 2:
        return None
    if engine.busiest < UNEVEN:
        return None
    engines = _engines(report)
    shards = sum(worker.shards for worker in report.workers) / engines
    most, least = report.workers[0], report.workers[-1]
    evidence = (
        f"engine {most.name} processed {counted(most.rows, 'row')}, {engine.busiest:.2f} times the "
        f"mean, {least.name} {least.rows:,}; {shards:.1f} shards per engine"
    )
    if shards >= 16:  # smaller shards would not help: the nodes differ
        return Advice(
            "engines are uneven", evidence, f"check the node of {least.name}: it is slower"
        )
    rows = max(1, math.ceil(report.rows / engines / 16))
    return Advice("engines are uneven", evidence, f"source.rows_per_shard: {rows} for the next run")


def cut_off(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise a higher max_tokens if answers were cut off at it.

    If rows failed because of that, advise to retry them.
    """
    number = report.tokens.get("cut_off", 0.0)
    most = 2 * spec.sampling.max_tokens
    failed = report.failed_with("AnswerCutOff")
    if failed:
        return failed_answers(report, spec, failed, most)
    few = not report.good or number < CUT_OFF_SHARE * report.good
    if few or spec.sampling.fills_context:
        return None
    return Advice(
        "answers are cut off",
        f"{number:,.0f} of {report.good:,} answers were cut off at sampling.max_tokens "
        f"{spec.sampling.max_tokens}",
        f"sampling.max_tokens: {most}",
    )


def failed_answers(report: RunReport, spec: RunSpec, failed: int, most: int) -> Advice:
    """Return the advice to retry rows that failed because their answers were cut off.

    `failed` is their number, `most` the max_tokens to retry with.
    """
    return Advice(
        "answers are cut off",
        f"{failed:,} of {counted(report.rows, 'row')} failed with AnswerCutOff",
        f"{_retry(report, spec, 'AnswerCutOff')} --set sampling.max_tokens={most}",
    )


def too_long(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise a longer context and a retry if prompts did not fit into the context length."""
    number = report.failed_with("PromptTooLong")
    if not report.rows or number < max(1, TOO_LONG * report.rows):
        return None
    return Advice(
        "prompts are too long",
        f"{number:,} of {report.rows:,} rows failed with PromptTooLong at engine.max_model_len "
        f"{spec.engine.model.context or 'of the model'}",
        f"a higher engine.max_model_len, then run {_retry(report, spec, 'PromptTooLong')}",
    )


def _retry(report: RunReport, spec: RunSpec, error: str) -> str:
    """Return the command that retries the rows that failed with the class `error`."""
    # A run directory does not decide where rows are sent.
    job = " --job JOB" if spec.output.targets or spec.engine.model.endpoint is not None else ""
    return f"raybatch retry-failed {report.run}{job} --error {error}"


RULES: tuple[Callable[[RunReport, RunSpec], Advice | None], ...] = (
    memory,
    deadline,
    starved,
    idle_gpu,
    gpu_limit,
    full_cache,
    uneven,
    tail,
    too_long,
    cut_off,
)


def _most_sequences(report: RunReport, sizes: SizeSpec) -> int | None:
    return known_max_num_seqs(sizes.max_num_seqs, report.figures)


def _quantized(engine: EngineSpec) -> bool:
    """Return whether the weights are quantized, or may be because the job tries quantization."""
    tried = any("quantization" in settings for settings in engine.tries)
    return tried or bool(engine.model.vllm_arguments.get("quantization"))


def _engines(report: RunReport) -> int:
    """Return the number of engines of the attempt with most rows, at least 1.

    An engine that was restarted counts twice.
    """
    known = report.engines or sum(node.engines for node in report.nodes)
    return max(1, known or len(report.workers))


def _long_enough(report: RunReport, full: int) -> bool:
    return report.rows >= FULL_ROUNDS * full * _engines(report)
