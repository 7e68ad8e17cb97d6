"""Advice from a run's own figures: the evidence, and the one change to make. Pure.

Each rule looks at one cause. It gives no advice if a figure is unknown, or if the run was too short
for its engines to be full most of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from prefect_raybatch.job.checks import seconds_of
from prefect_raybatch.report.records import Advice, RunReport
from prefect_raybatch.sizing.shards import SEQUENCES, sequences_seen
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.words import counted

# Where each comes from, and which are chosen and not measured: docs/decisions/advice-thresholds.md.
FULL = 0.7  # of max_num_seqs: an engine with fewer sequences running is not full
BUSY_GPU = 0.8  # share of time; below that a full engine is held back by its host
UNEVEN = 1.25  # the busiest engine over the mean one
CUT_OFF_SHARE = 0.01  # of the answers
FULL_CACHE = 0.9  # of the KV cache's blocks
TOO_LONG = 0.001  # of the rows
# Times max_num_seqs: filling and emptying take a round, so three of four are full, over FULL.
FULL_ROUNDS = 4
CPU_STAGES = ("read", "prepare", "finish")
MEMORY_WORDS = ("out of memory", "outofmemory", "oom")
USUAL_TOKENS = 16384  # engine.max_num_batched_tokens on a GPU where the job gives none
DEADLINE_MISSED = "the deadline was missed"
SPARE = 1.1  # of what a deadline needs
# Of a card's data sheet: an 8B on an H200 reached 790 of 989 TFLOP/s in its largest multiplications
# and, in all it does, three quarters of that.
MOST_FLOPS = 0.55
MOST_BANDWIDTH = 0.6
LONG_TAIL = 0.1  # of the engines' time, in which some have no rows left


def advise(report: RunReport, spec: RunSpec) -> tuple[Advice, ...]:
    """Return advice on `report`, the most pressing first."""
    return tuple(advice for rule in RULES for advice in [rule(report, spec)] if advice)


def memory(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise if engines ran out of memory."""
    found = [
        (reason, number)
        for reason, number in report.losses.items()
        if any(word in reason.lower() for word in MEMORY_WORDS)
    ]
    if not found:
        return None
    tokens = spec.sizes.max_num_batched_tokens or USUAL_TOKENS
    change = f"engine.max_num_batched_tokens: {max(2048, tokens // 2)}"
    if tokens <= 2048:
        seqs = _most_sequences(report, spec) or SEQUENCES
        change = f"engine.max_num_seqs: {max(1, seqs // 2)}"
    times = sum(number for _, number in found)
    return Advice(
        "engines ran out of memory",
        f"{counted(times, 'shard')} {'was' if times == 1 else 'were'} lost with it and done again, "
        "the last one said: "
        f"{found[-1][0]}",
        change,
    )


def deadline(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise if the run took longer than allowed."""
    if not spec.limits.deadline or not report.workers:
        return None
    allowed = seconds_of(spec.limits.deadline)
    taken = max(report.elapsed, report.seconds)
    if taken <= allowed:
        return None
    engines, beside = _engines(report), taken - report.seconds
    change = f"a limits.deadline above the {beside:,.0f} s that starts and waits take"
    if beside < allowed:
        need = math.ceil(engines * report.seconds / (allowed - beside) * SPARE)
        change = f"{counted(need, 'engine')} instead of {engines} (engine.replicas in proportion)"
    return Advice(
        DEADLINE_MISSED,
        f"it took {taken:,.0f} s where limits.deadline {spec.limits.deadline} allows "
        f"{allowed:,.0f} s: {report.seconds:,.0f} s of work, with {counted(engines, 'engine')} at "
        f"{report.rows_per_s / engines:,.1f} rows/s, and {beside:,.0f} s of starts and waits",
        change,
    )


def starved(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise if engines wait for rows: the CPU stages are too slow, or too few shards are in
    flight."""
    running, waiting = report.figures.get("running"), report.figures.get("waiting")
    full = _most_sequences(report, spec)
    if running is None or waiting is None or not full or not _long_enough(report, full):
        return None
    if running >= FULL * full or waiting >= 1:
        return None
    seen = f"an engine had {running:,.0f} of {full} sequences running and none waiting"
    work = {s.name: s.seconds for s in report.stages if s.name in CPU_STAGES}
    slowest = max(work, key=lambda name: work[name], default=None)
    if slowest is None or work[slowest] < 0.5 * report.seconds:
        ahead = 2 * max(2, math.ceil(full * report.shards / report.rows))
        return Advice(
            "engines are not full",
            f"{seen}; the CPU stages were idle most of the time, so too little is sent ahead",
            f"engine.max_concurrent_batches: {ahead}",
        )
    at_once = work[slowest] / report.seconds
    group = "finish" if slowest == "finish" else "prepare"
    change = f"cluster.{group}.concurrency: {math.ceil(2 * at_once) + 1}"
    if spec.prompt.function and slowest == "prepare":
        change += ", with CPUs for it; or a faster prompt.function"
    return Advice(
        f"engines are starved by {slowest}",
        f"{seen}; {slowest} worked {work[slowest]:,.0f} s in all, {at_once:.1f} tasks at once",
        change,
    )


def idle_gpu(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise if the GPU waits although its engine is full: Python on one core limits it."""
    gpu, running = report.figures.get("gpu"), report.figures.get("running")
    full = _most_sequences(report, spec)
    if gpu is None or running is None or not full or not _long_enough(report, full):
        return None
    if gpu >= BUSY_GPU or running < FULL * full:
        return None
    return Advice(
        "the GPU is not used enough",
        f"GPUs were busy {gpu:.0%} of the time while engines had {running:,.0f} of {full} "
        "sequences running: the host holds them back",
        "one more engine on each GPU (engine.engines_per_gpu), or a higher engine.max_num_seqs "
        "where memory is short",
    )


def gpu_limit(report: RunReport, spec: RunSpec) -> Advice | None:
    """Say that the GPU is near its limit, so that no setting brings more."""
    mfu, mbu = report.roofline.get("mfu"), report.roofline.get("mbu")
    if mfu is None or mbu is None or (mfu < MOST_FLOPS and mbu < MOST_BANDWIDTH):
        return None
    bound = "arithmetic" if mfu >= MOST_FLOPS else "memory bandwidth"
    less = ["shorter prompts", "more of them shared (the same text first)"]
    if mbu >= MOST_BANDWIDTH or spec.sampling.max_tokens > 1:
        less.append("shorter answers")
    if not _quantized(spec):
        less.append("fewer bits a weight (engine.quantization: try-fp8)")
    return Advice(
        "the GPU is the limit",
        f"{mfu:.0%} of its FLOPs and {mbu:.0%} of its memory bandwidth were used over the whole "
        f"run, and {bound} is what no setting gives more of",
        f"only less work helps: {', '.join(less)}, a smaller model; or more GPUs",
    )


def tail(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise if engines ran out of rows while others continued."""
    share = report.roofline.get("idle_tail")
    if share is None or share < LONG_TAIL or _engines(report) < 2 or uneven(report, spec):
        return None
    rows = max(1, math.ceil(report.rows / _engines(report) / 32))
    return Advice(
        "engines stood idle at the end",
        f"{share:.0%} of their time: the last shards were in a few of them",
        f"source.rows_per_shard: {rows} for the next run",
    )


def full_cache(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise if sequences wait because the KV cache is full."""
    cache, running = report.figures.get("kv_cache"), report.figures.get("running")
    waiting, full = (
        report.figures.get("waiting"),
        _most_sequences(report, spec),
    )
    if cache is None or running is None or not waiting or not full:
        return None
    if cache < FULL_CACHE or running >= FULL * full:
        return None
    return Advice(
        "the KV cache is full",
        f"{cache:.0%} of it was in use on average, with {running:,.0f} of {full} sequences running "
        f"and {waiting:,.0f} waiting",
        "fewer engines on a GPU (engine.engines_per_gpu), or more GPUs an engine "
        "(engine.tensor_parallel_size)",
    )


def uneven(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise if some engines did much more than others."""
    engine = next((s for s in report.stages if s.name == "engine"), None)
    if engine is None or engine.busiest is None or len(report.workers) < 2:
        return None
    if engine.busiest < UNEVEN:
        return None
    engines = _engines(report)
    shards = sum(worker.shards for worker in report.workers) / engines
    most, least = report.workers[0], report.workers[-1]
    evidence = (
        f"engine {most.name} did {counted(most.rows, 'row')}, {engine.busiest:.2f} times the mean, "
        f"{least.name} {least.rows:,}; {shards:.1f} shards an engine"
    )
    if shards >= 16:  # smaller shards would not help: the nodes differ
        return Advice(
            "engines are uneven", evidence, f"look at the node of {least.name}: it is slower"
        )
    rows = max(1, math.ceil(report.rows / engines / 16))
    return Advice("engines are uneven", evidence, f"source.rows_per_shard: {rows} for the next run")


def cut_off(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise if answers ended at max_tokens."""
    number = report.tokens.get("cut_off", 0.0)
    most = 2 * spec.sampling.max_tokens
    failed = report.failed_with("AnswerCutOff")
    if failed:
        return failed_answers(report, failed, most)
    if not report.good or number < CUT_OFF_SHARE * report.good:
        return None
    return Advice(
        "answers are cut off",
        f"{number:,.0f} of {report.good:,} answers ended at sampling.max_tokens "
        f"{spec.sampling.max_tokens}",
        f"sampling.max_tokens: {most}",
    )


def failed_answers(report: RunReport, failed: int, most: int) -> Advice:
    return Advice(
        "answers are cut off",
        f"{failed:,} of {counted(report.rows, 'row')} failed with AnswerCutOff",
        f"raybatch retry-failed {report.run} --error AnswerCutOff --set sampling.max_tokens={most}",
    )


def too_long(report: RunReport, spec: RunSpec) -> Advice | None:
    """Advise if rows did not fit the model's context as configured."""
    number = report.failed_with("PromptTooLong")
    if not report.rows or number < max(1, TOO_LONG * report.rows):
        return None
    return Advice(
        "prompts are too long",
        f"{number:,} of {report.rows:,} rows failed with PromptTooLong at engine.max_model_len "
        f"{spec.engine.model.context or 'of the model'}",
        "a higher engine.max_model_len, then "
        f"raybatch retry-failed {report.run} --error PromptTooLong",
    )


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


def _most_sequences(report: RunReport, spec: RunSpec) -> int | None:
    return sequences_seen(spec.sizes.max_num_seqs, report.figures)


def _quantized(spec: RunSpec) -> bool:
    """Return whether the weights have fewer bits than the stored model, or a trial decides on
    that."""
    tried = any("quantization" in settings for settings in spec.engine.tries)
    return tried or bool(spec.engine.model.given.get("quantization"))


def _engines(report: RunReport) -> int:
    """Return the engines of the attempt that did most rows; an engine that died and its successor
    count as two."""
    known = report.engines or sum(node.engines for node in report.nodes)
    return max(1, known or len(report.workers))


def _long_enough(report: RunReport, full: int) -> bool:
    return report.rows >= FULL_ROUNDS * full * _engines(report)
