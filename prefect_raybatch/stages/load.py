"""Load of an engine and its node: sampled in the engine's process, recorded with each shard.

The figures reach the `finish` stage in a column of the block, and the commit in the worker's
receipt. They are as durable as the commit, and no metrics server is needed. Unknown figures are
left out, not set to 0.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
import psutil
import pyarrow as pa

from prefect_raybatch import nvml
from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.stages.columns import FIGURES, SHARD

log = logging.getLogger(__name__)

SAMPLE_EVERY = 2.0  # seconds between samples
SAMPLES_KEPT = 3600  # samples: two hours
NO_STATS = ShardStats()


class Sampler:
    """Samples the load of an engine and its node every `every` seconds in a background thread.

    `load()` returns the engine's figures: running and waiting (numbers of sequences), sequences
    (the most that may run at once), kv_cache (share in use), steps (since the engine started). Any
    of them may be missing. `node()` returns the node's: cpu and gpu (shares in use), memory and
    gpu_memory (GiB in use); it is a `Node` by default. `clock()` returns seconds since 1970. The
    last SAMPLES_KEPT samples are kept.
    """

    def __init__(
        self,
        load: Callable[[], Mapping[str, float]],
        node: Callable[[], Mapping[str, float]] | None = None,
        every: float = SAMPLE_EVERY,
        clock: Callable[[], float] = time.time,
    ):
        self.load, self.every, self.clock = load, every, clock
        self.node = Node() if node is None else node
        self.where = {"engine": f"{socket.gethostname()}:{os.getpid()}"}
        self._samples: deque[tuple[float, dict[str, float]]] = deque(maxlen=SAMPLES_KEPT)
        self._steps: tuple[float, float] | None = None

    def start(self) -> Sampler:
        threading.Thread(target=self._main, name="raybatch-figures", daemon=True).start()
        return self

    def _main(self) -> None:
        said = ""
        while True:
            time.sleep(self.every)
            try:
                self.take()
            except Exception as error:
                # for example an engine that dies meanwhile; samples are for the report alone
                if str(error) != said:
                    said = str(error)
                    log.warning("cannot sample engine metrics: %s: %s", type(error).__name__, error)

    def take(self) -> None:
        """Take a sample now."""
        now, load = self.clock(), dict(self.load())
        before, steps = self._steps, load.pop("steps", None)
        self._steps = None if steps is None else (now, steps)
        if before and self._steps and now > before[0] and self._steps[1] >= before[1]:
            load["steps_per_s"] = (self._steps[1] - before[1]) / (now - before[0])
        self._samples.append((now, {**load, **self.node()}))

    def stats_between(self, began: float, ended: float) -> ShardStats:
        """Return the figures sampled from `began` to `ended` (seconds since 1970).

        They are means (running, waiting, sequences, kv_cache, steps_per_s, node_cpu, gpu), peaks
        (kv_cache_peak, node_memory_peak, gpu_memory_peak) and `samples`, the number of samples. If
        there was no sample in that time, the latest one is used; if that is over two sampling
        intervals old, the result is empty.
        """
        samples = list(self._samples)
        found = [sample for at, sample in samples if began <= at <= ended]
        if not found and samples and ended - samples[-1][0] <= 2 * self.every:
            found = [samples[-1][1]]
        if not found:
            return ShardStats()
        stats: dict[str, float] = {"samples": len(found)}
        for key, name in MEAN_OF.items():
            values = [sample[key] for sample in found if key in sample]
            if values:
                stats[name] = round(sum(values) / len(values), 4)
        for key, name in PEAK_OF.items():
            values = [sample[key] for sample in found if key in sample]
            if values:
                stats[name] = round(max(values), 4)
        return ShardStats.of(stats)

    def add_stats(self, table: pa.Table, began: float, once: ShardStats = NO_STATS) -> pa.Table:
        """Return the block with a column (FIGURES) of the figures sampled since `began`.

        `began` is in seconds since 1970. The first row of each shard has the figures as JSON, and
        other rows are null. The figures `once` are added to the block's first shard only, so that a
        sum over the shards counts them once.
        """
        stats = self.stats_between(began, self.clock()).to_dict()
        values: list[str | None] = [None] * table.num_rows
        more = once.to_dict()
        for first in np.unique(table[SHARD].to_numpy(), return_index=True)[1].tolist():
            values[first] = json.dumps({"stats": {**stats, **more}, "where": self.where})
            more = {}
        return FIGURES.add_to(table, values)


MEAN_OF = {
    "running": "running",
    "waiting": "waiting",
    "sequences": "sequences",
    "kv_cache": "kv_cache",
    "steps_per_s": "steps_per_s",
    "cpu": "node_cpu",
    "gpu": "gpu",
}
PEAK_OF = {
    "kv_cache": "kv_cache_peak",
    "memory": "node_memory_peak",
    "gpu_memory": "gpu_memory_peak",
}


def figures_of(table: pa.Table) -> tuple[ShardStats, dict[str, str]]:
    """Return the engine's load figures for the block's first shard, and {"engine": "host:pid"}.

    Both are empty if the block has no figures.
    """
    if FIGURES not in table.column_names:
        return ShardStats(), {}
    texts = table[FIGURES].drop_null()
    found = json.loads(texts[0].as_py()) if len(texts) else {}
    return ShardStats.of(found.get("stats", {})), found.get("where", {})


class Node:
    """Measures CPU and memory of this node, and the GPUs that this process may use.

    A call returns cpu and gpu (shares in use), memory and gpu_memory (GiB in use).
    """

    def __init__(self) -> None:
        psutil.cpu_percent(None)  # the first call has nothing to compare with
        self._gpus = nvml.GpuSampler()

    def __call__(self) -> dict[str, float]:
        return {
            "cpu": psutil.cpu_percent(None) / 100,
            "memory": psutil.virtual_memory().used / nvml.GIB,
            **self._gpus(),
        }
