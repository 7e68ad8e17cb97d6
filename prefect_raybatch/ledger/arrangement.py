"""`_raybatch/arrangement.json`: the arrangement of engines that a run uses, and why.

Written by put-if-absent before the first shard is inferred. Drivers of the run follow it where it
fits their cluster; if it is the cost model's choice, they ask the cost model again.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefect_raybatch.ledger.json_record import JsonRecord
from prefect_raybatch.ledger.layout import ARRANGEMENT
from prefect_raybatch.ledger.strict import Count, Number, StrictRecord
from prefect_raybatch.words import counted


@dataclass(frozen=True, order=True)
class Arrangement(StrictRecord):
    """How many engines share a GPU, and the `max_num_seqs` of each."""

    engines_per_gpu: Count
    max_num_seqs: Count

    def __str__(self) -> str:
        return f"{counted(self.engines_per_gpu, 'engine')} of {self.max_num_seqs:,} sequences"


@dataclass(frozen=True)
class WorkKey(StrictRecord):
    """What a run's speed depends on, besides the arrangement of its engines.

    `model` identifies the model's files, `card` is the GPU's name. `gpus` are the GPUs of an
    engine, `cpus` the fewest CPUs per GPU. `grammar` is the backend of the answers' grammar, ""
    without one. `settings` is a digest of the vLLM arguments that the job sets. `tokens` are
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
    """The decision of a run: engines are arranged as `incumbent`, and as `challenger` in a trial.

    `model` is the choice of the cost model. Shards whose number has the remainder TRIAL_FIRST when
    divided by TRIAL_EVERY are the trial's; without a trial, `challenger` is None. `predicted` is
    the challenger's rate divided by the incumbent's, as expected. `why` is the reason for the
    decision, `read` are the keys of the runs that it follows from, newest first. `by` is the
    attempt that decided, and alone tries the challenger.
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
    """What the trial of a challenger showed.

    `gain` is by which share the challenger was faster than the incumbent, `bound` the gain's lower
    limit with 95 % confidence. Both follow from `pairs` shards; they are None if these were too
    few. `error` says why the trial did not work, or "".
    """

    pairs: Count
    gain: Number | None = None
    bound: Number | None = None
    error: str = ""


@dataclass(frozen=True)
class ArrangementOutcome(StrictRecord):
    """A run's decision, and what the run measured with it; a part of the report.

    `score` is the GPU-seconds per 1,000 tokens of the incumbent, start, head and tail excluded.
    `busy` is the share of that time in which its GPUs did not wait for the host. Both are None if
    unknown. `gpus` are the run's GPUs, `start` the seconds until the first commit. `uncounted` says
    why later runs must not learn from these figures, "" if they may. `has_deaths`: an engine of the
    incumbent died.
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
