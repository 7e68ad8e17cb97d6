"""`_raybatch/arrangement.json`: the arrangement of engines that a run uses, and why.

Written by put-if-absent before the first shard is inferred. Drivers of the run follow it where it
fits their cluster. If the recorded arrangement is the cost model's choice, a driver instead asks
the cost model again, for its own cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefect_raybatch.ledger.json_record import JsonRecord
from prefect_raybatch.ledger.layout import ARRANGEMENT
from prefect_raybatch.ledger.strict import Count, Number, StrictRecord
from prefect_raybatch.words import counted


@dataclass(frozen=True, order=True)
class Arrangement(StrictRecord):
    """The number of engines that share a GPU, and the `max_num_seqs` of each."""

    engines_per_gpu: Count
    max_num_seqs: Count

    def __str__(self) -> str:
        return f"{counted(self.engines_per_gpu, 'engine')} of {self.max_num_seqs:,} sequences"


@dataclass(frozen=True)
class WorkKey(StrictRecord):
    """The conditions that decide a run's speed, besides the arrangement of its engines.

    Runs with equal conditions can be compared. `model` is a digest of the model's files, `card` the
    GPU's name and memory. `gpus` is the number of GPUs per engine. `cpus` is the number of CPUs per
    GPU, on the node where it is lowest. `grammar` is the backend of the answers' grammar, "" if
    there is none. `settings` is a digest of the vLLM arguments that the job sets. `tokens` are
    lengths in tokens: the shared prefix, the expected answer, and the nine deciles of the rest of
    the prompt.
    """

    model: str
    vllm: str
    card: str
    gpus: Count
    cpus: Number
    grammar: str
    settings: str
    tokens: tuple[Number, ...]


@dataclass(frozen=True)
class ArrangementNote(StrictRecord):
    """The decision of a run on how its engines are arranged, and on a trial of another arrangement.

    Engines are arranged as `incumbent`. In a trial, a fifth of the shards is inferred by engines
    that are arranged as `challenger`; without a trial it is None. `model` is the choice of the cost
    model. `predicted` is the expected rate of the best other arrangement, divided by the
    incumbent's. It is also set if that arrangement is not tried, and 1 if there is none. `why` is
    the reason for the decision. `read` are the run keys of earlier runs with the same work, newest
    first. `by` is the attempt that decided; no other attempt tries the challenger.
    """

    work: WorkKey
    model: Arrangement
    incumbent: Arrangement
    challenger: Arrangement | None
    predicted: Number
    why: str
    read: tuple[str, ...]
    by: str


@dataclass(frozen=True)
class TrialOutcome(StrictRecord):
    """The outcome of trying an arrangement of engines, the challenger, on some shards of a run.

    `gain` says how much faster the challenger was than the run's own arrangement (0.1: 10 %),
    `bound` is its lower limit with 95 % confidence. `pairs` counts the compared shards; `gain` and
    `bound` are None if these were too few. `error` says why the trial failed, or is "".
    """

    pairs: Count
    gain: Number | None = None
    bound: Number | None = None
    error: str = ""


@dataclass(frozen=True)
class ArrangementOutcome(StrictRecord):
    """A run's decision on how its engines are arranged, and what it measured; a part of the report.

    `score` is the GPU-seconds per 1,000 tokens outside of a trial, without the times when engines
    start, fill up and run empty. `busy` is the share of that time in which GPUs did not wait for
    the host. Both are None if unknown. `gpus` is the number of the run's GPUs, `start` the seconds
    from the joined cluster to the first commit. `uncounted` says why later runs must not learn from
    these figures, "" if they may. `has_deaths`: an engine that was not in a trial died.
    """

    decided: ArrangementNote
    gpus: Count
    score: Number | None = None
    busy: Number | None = None
    start: Number = 0.0
    uncounted: str = ""
    has_deaths: bool = False
    trial: TrialOutcome | None = None


_FILE = JsonRecord(ARRANGEMENT, ArrangementNote)
read_arrangement, record_arrangement = _FILE.read, _FILE.put_if_absent
