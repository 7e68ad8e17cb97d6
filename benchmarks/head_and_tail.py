"""How much of a run is its head and its tail: simulated engines take its shards in planned order.

    python benchmarks/head_and_tail.py

The shards, their order and the sizes of engines are the package's own; the engines are simulated
step by step with its model of costs (prefect_raybatch/sizing/cost.py): rows in flight, tokens a
step, turns at the GPU, shards that wait at an engine's door, and rows that are prepared eight
shards at a time. No GPU is needed, and nothing but rates follows from it.

Each figure is as it was before the work in a row counted -> as it is. `steady` is what as many rows
again take, `whole` all of the run, and `reported` what the report calls steady: rows between the
ends of the first and the last shard, to which it also counts what was done of them before.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from gpu import DIMENSIONS

from prefect_raybatch import BatchJob
from prefect_raybatch.compile.job import size_spec
from prefect_raybatch.model.memory import Model, describe
from prefect_raybatch.plan.plan import shard_starts, shard_work
from prefect_raybatch.sizing import cost
from prefect_raybatch.sizing.cards import CARDS
from prefect_raybatch.sizing.roofline import work_of
from prefect_raybatch.sizing.shards import (
    MOST_ROWS,
    SHARDS,
    SHARDS_A_WORKER,
    concurrent_batches,
    longest_first,
)
from prefect_raybatch.sizing.sizes import Sizing, imagined, sizes_of
from prefect_raybatch.source.snapshot_writer import WEIGHED_ROWS

LLAMA_8B = {**DIMENSIONS["8b"], "max_position_embeddings": 4352}
CARD = CARDS["H200"]
PREPARED = 8  # shards that are prepared at a time
PREPARE_SECONDS = 1.2e-6  # of a core, a prompt token


@dataclass
class Row:
    """A row in an engine: of which shard, tokens of its prompt that are not cached and not computed
    yet, tokens of its answer still to come, and the tokens that it keeps."""

    shard: int
    left: int
    out: int
    held: int


@dataclass
class Work:
    """A kind of work: rows as (own tokens, tokens out), the tokens that all prompts share, and the
    sampling fields that the plan knows."""

    name: str
    rows: list[tuple[int, int]]
    shared: int
    sampling: dict[str, Any]

    @property
    def form(self) -> bool:
        return "choice" in self.sampling

    @property
    def row_bytes(self) -> float:
        return cost.CHARACTERS * sum(own for own, _ in self.rows) / len(self.rows)

    def times(self, many: int) -> Work:
        return replace(self, rows=self.rows * many)


def works() -> list[Work]:
    draw = random.Random(7)

    def heavy() -> tuple[int, int]:
        own = min(4000, round(draw.lognormvariate(5.5, 1.0)))
        return own, min(512, round(16 * draw.paretovariate(1.1)))

    tails = [heavy() for _ in range(6000)]
    choice = {"max_tokens": 16, "choice": ["Law Firm", "Retail", "Real Estate", "Other"]}
    most = {"max_tokens": 512}
    return [
        Work("company, choice, 40,000 rows", [(60, 3)] * 40_000, 56, choice),
        Work("374 in, 64 out, 3,600 rows", [(278, 64)] * 3600, 96, {"max_tokens": 64}),
        Work("2,000 in, 32 out, 1,000 rows", [(1900, 32)] * 1000, 100, {"max_tokens": 32}),
        Work("heavy tails, 6,000 rows", tails, 96, most),
        Work("heavy tails, by length, 6,000 rows", sorted(tails), 96, most),
    ]


@dataclass
class Engine:
    """A simulated engine; `calls` are the shards in it, by the rows that are not answered."""

    gpu: int
    waiting: deque[Row] = field(default_factory=deque)
    running: list[Row] = field(default_factory=list)
    calls: dict[int, int] = field(default_factory=dict)
    door: deque[int] = field(default_factory=deque)

    @property
    def held(self) -> int:
        return len(self.calls) + len(self.door)


class Simulation:
    """Engines that take shards; `shards` holds the rows of each, in the order in which they go."""

    def __init__(self, work: Work, size: Sizing, model: Model, shards: Sequence[np.ndarray]):
        self.work, self.size, self.model, self.shards = work, size, model, shards
        self.work_of = work_of(model, CARD)
        packed = size.pool.engines_per_gpu
        self.engines = [Engine(number // packed) for number in range(size.pool.engines)]
        self.free = [0.0] * size.pool.gpus[1]  # when each GPU is
        self.todo = deque(range(len(shards)))
        self.entered = [0.0] * len(shards)
        self.ended = [0.0] * len(shards)
        self.prepared = self._prepared()

    def _prepared(self) -> list[float]:
        """When each shard is ready for an engine."""
        cores, found = [0.0] * PREPARED, []
        for rows in self.shards:
            tokens = sum(self.work.rows[n][0] + self.work.shared for n in rows.tolist())
            found.append(heapq.heappop(cores) + tokens * PREPARE_SECONDS)
            heapq.heappush(cores, found[-1])
        return found

    def run(self) -> list[tuple[float, float, int]]:
        """(entered, ended, rows) of each shard."""
        turns = [(0.0, number) for number in range(len(self.engines))]
        while turns:
            now, number = heapq.heappop(turns)
            engine = self.engines[number]
            self._hand_out(now)
            while engine.door and len(engine.calls) < self.size.concurrent:
                self._enter(engine, engine.door.popleft(), now)
            if engine.running or engine.waiting:
                heapq.heappush(turns, (self._step(engine, now), number))
            elif self.todo:
                heapq.heappush(turns, (max(now + 0.001, self.prepared[self.todo[0]]), number))
        return list(zip(self.entered, self.ended, map(len, self.shards), strict=True))

    def _hand_out(self, now: float) -> None:
        """Ray gives the next shard to the engine that has the fewest; one waits at its door."""
        while self.todo and self.prepared[self.todo[0]] <= now:
            engine = min(self.engines, key=lambda one: one.held)
            if engine.held > self.size.concurrent:
                return
            engine.door.append(self.todo.popleft())

    def _enter(self, engine: Engine, shard: int, now: float) -> None:
        self.entered[shard] = now
        rows = sorted(
            (self.work.rows[n] for n in self.shards[shard].tolist()),
            key=lambda row: (-row[1], -row[0]),
        )
        engine.calls[shard] = len(rows)
        engine.waiting.extend(Row(shard, own, out, self.work.shared) for own, out in rows)

    def _step(self, engine: Engine, now: float) -> float:
        """When the engine has its next turn."""
        arguments, logits, layers = self.size.arguments, self.work_of.head, self.work_of.layers
        read, flops, admitted = self.work_of.weights, 0.0, 0
        budget, began = arguments.max_num_batched_tokens, max(now, self.free[engine.gpu])
        for row in engine.running:
            if not row.left:  # the answer's next token
                budget -= 1
                row.held += 1
                row.out -= 1
                flops += layers + logits + self.work_of.attention * row.held
                read += self.work_of.kv * row.held
        for row in engine.running:
            if budget and row.left:
                took = min(budget, row.left)
                budget -= took
                flops += self._prefill(row, took) + logits
        while budget and engine.waiting and len(engine.running) < arguments.max_num_seqs:
            row = engine.waiting.popleft()
            took = min(budget, row.left)
            budget -= took
            flops += self._prefill(row, took) + logits
            engine.running.append(row)
            admitted += 1
        fitted, running = cost.FITTED, len(engine.running)
        seconds = flops / (fitted.compute * CARD.flops) + read / CARD.bandwidth + fitted.gpu_step
        if self.size.pool.engines_per_gpu > 1:
            seconds /= fitted.sharing
        self.free[engine.gpu] = done = began + seconds
        self._answered(engine, done)
        grammar = fitted.host_grammar if self.work.form else 0.0
        host = fitted.host_step + running * (fitted.host_sequence + grammar)
        host += fitted.host_row * admitted
        apart = (fitted.apart_grammar if self.work.form else fitted.apart) * min(host, seconds)
        return max(done, now + host) + apart

    def _prefill(self, row: Row, tokens: int) -> float:
        """FLOPs of so many of its prompt's tokens; the last gives the first of its answer."""
        attention = self.work_of.attention * (row.held + tokens // 2)
        row.left -= tokens
        row.held += tokens
        row.out -= not row.left
        return tokens * (self.work_of.layers + attention)

    def _answered(self, engine: Engine, now: float) -> None:
        for row in engine.running:
            if row.out <= 0 and not row.left:
                engine.calls[row.shard] -= 1
                if not engine.calls[row.shard]:
                    del engine.calls[row.shard]
                    self.ended[row.shard] = now
        engine.running = [row for row in engine.running if row.out > 0 or row.left]


def sizes(work: Work, gpus: int, before: bool) -> Sizing:
    """As the package has them, and as it had them before it looked at the work in a row."""
    prompt = {"template": "{text}", "system": "x" * cost.CHARACTERS * work.shared}
    job = BatchJob.from_dict(
        {
            "name": "head-and-tail",
            "source": {"uri": "nowhere.parquet"},
            "prompt": prompt,
            "sampling": work.sampling,
            "engine": {"model": "nowhere", "replicas": gpus},
            "output": {"uri": "nowhere"},
        }
    )
    have, count = imagined(CARD.name, gpus, 16 * gpus), len(work.rows)
    size = sizes_of(size_spec(job), count, work.row_bytes, have, describe(LLAMA_8B, {}))
    if not before:
        return size
    each = SHARDS_A_WORKER if size.pool.engines > 1 else SHARDS
    rows = min(max(math.ceil(count / (size.pool.engines * each)), 256), MOST_ROWS, count)
    concurrent = concurrent_batches(None, rows, size.max_num_seqs)
    return replace(size, rows_per_shard=rows, concurrent=concurrent)


def shards_of(work: Work, size: Sizing, before: bool) -> list[np.ndarray]:
    """The rows of each shard, in the order in which engines get them."""
    starts = shard_starts(len(work.rows), size.rows_per_shard)
    shards = [np.arange(first, last) for first, last in pairwise(starts.tolist())]
    pieces = [work.rows[at : at + WEIGHED_ROWS] for at in range(0, len(work.rows), WEIGHED_ROWS)]
    known = [(len(rows), cost.CHARACTERS * sum(own for own, _ in rows)) for rows in pieces]
    weighed = shard_work(starts, tuple(known))
    if before or weighed is None:
        return shards
    return [shards[number] for number in longest_first(weighed.tolist())]


def seconds(work: Work, gpus: int, before: bool) -> tuple[float, list[tuple[float, float, int]]]:
    size = sizes(work, gpus, before)
    shards = shards_of(work, size, before)
    found = Simulation(work, size, describe(LLAMA_8B, {}), shards).run()
    return max(end for _, end, _ in found) - min(start for start, _, _ in found), found


def reported(found: list[tuple[float, float, int]]) -> float:
    """As a run's report has its steady rate: between the ends of the first and the last shard."""
    ends = sorted((end, rows) for _, end, rows in found)
    return sum(rows for _, rows in ends[1:]) / (ends[-1][0] - ends[0][0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", default="1,4")
    args = parser.parse_args()
    print("| work | GPUs | shards | seconds | rows/s | steady / whole | reported / whole |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for gpus in map(int, args.gpus.split(",")):
        for work in works():
            whole = work.times(gpus)
            cells = []
            for before in (True, False):
                took, found = seconds(whole, gpus, before)
                # What as many rows again take is free of head and tail.
                more = seconds(whole.times(2), gpus, before)[0] - took
                rate = len(whole.rows) / took
                cells.append((len(found), took, rate, took / more, reported(found) / rate))
            pairs = zip(zip(*cells, strict=True), (0, 1, 0, 2, 2), strict=True)
            shown = [f"{old:,.{n}f} -> {new:,.{n}f}" for (old, new), n in pairs]
            print(f"| {work.name} | {gpus} | {' | '.join(shown)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
