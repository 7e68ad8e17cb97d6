"""Nights of a job whose engines' rates were measured, for the rules that learn from them.

The rates and the shares of time in which the GPU was busy are those of benchmarks/results. A night
has shards in engines as a run has them; what it measures is measured by the package's own code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prefect_raybatch.learning.predict import expected_ratio
from prefect_raybatch.learning.rules import ComingRun, EarlierRun, decide, in_trial
from prefect_raybatch.learning.score import PartShards, paired_gain, steady_shards
from prefect_raybatch.ledger.arrangement import (
    Arrangement,
    ArrangementNote,
    ArrangementOutcome,
    TrialOutcome,
    WorkKey,
)
from prefect_raybatch.model.arguments import EngineArguments
from prefect_raybatch.model.memory import Model, describe
from prefect_raybatch.sizing import cost
from prefect_raybatch.sizing.cards import Card, card
from prefect_raybatch.sizing.cost import Tokens
from prefect_raybatch.sizing.engines import (
    ENGINE_GAIN,
    MOST_EXPERTS,
    MOST_TOTAL,
    fewest,
    holds_rows,
)
from prefect_raybatch.sizing.fit import Fit
from prefect_raybatch.sizing.shards import SEQUENCES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NOISE = 0.03  # standard deviation of the logarithm of a rate, per night and per shard
SHARDS = 240
SECONDS = 3600.0  # of a night with the best arrangement
AT_ONCE = 2  # shards in an engine
START = 60.0  # seconds
WORK = WorkKey("model", "0.32.0", "H100, 79.6 GiB", 1, 16.0, "", "settings", (64.0, 24.0))


@dataclass(frozen=True)
class Work:
    """A kind of work: {arrangement: (rows/s, share of time in which the GPU was busy, or None)}."""

    name: str
    model: Model
    card: Card
    row: Tokens
    rates: dict[Arrangement, tuple[float, float | None]]

    def chosen(self) -> Arrangement:
        """What the package chooses, among the measured arrangements whose rows fit."""
        most = MOST_EXPERTS if self.model.sparse else MOST_TOTAL
        best: dict[int, Arrangement] = {}
        for one in sorted(self.rates, key=self.expected_rate):
            if one.max_num_seqs <= most and self.fits(one):
                best[one.engines_per_gpu] = one

        def rate(engines: int) -> float:
            return self.expected_rate(best[engines])

        number = fewest(sorted(best), rate, ENGINE_GAIN)
        return best[number]

    def fits(self, one: Arrangement) -> bool:
        """Say whether the KV cache holds the rows of each engine, as the package estimates it."""
        arguments = EngineArguments(
            max_num_seqs=one.max_num_seqs, max_num_batched_tokens=8192, max_model_len=1024
        )
        fit = Fit(self.model, arguments, self.card.memory, 1024)
        return one.max_num_seqs == SEQUENCES or holds_rows(fit, one.engines_per_gpu, self.row)

    def expected_rate(self, one: Arrangement) -> float:
        engines, seqs = one.engines_per_gpu, one.max_num_seqs
        return cost.rows_per_second(self.model, self.card, self.row, engines, seqs)

    def best(self) -> float:
        return max(rate for rate, _ in self.rates.values())

    def rate(self, one: Arrangement) -> float:
        return self.rates[one][0]

    def slowed(self, factor: float) -> Work:
        return replace(self, rates={a: (r / factor, b) for a, (r, b) in self.rates.items()})


def arranged(text: str) -> Arrangement:
    engines, _, sequences = text.partition("x")
    return Arrangement(int(engines), int(sequences))


def works(dimensions: dict[str, Any]) -> list[Work]:
    """Return the kinds of work that sweep-h100.jsonl measured in several arrangements.

    `dimensions` are the fields of config.json by the size of the model.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in (RESULTS / "sweep-h100.jsonl").read_text().splitlines():
        found = json.loads(line)
        if found.get("rows_s"):
            groups.setdefault((found["size"], found["kind"]), []).append(found)
    made = []
    for (size, kind), lines in groups.items():
        rates = {arranged(f["arrangement"]): (f["rows_s"], f.get("gpu_busy")) for f in lines}
        if len(rates) > 1:
            model = describe({**dimensions[size], "torch_dtype": "bfloat16"}, {})
            made.append(Work(f"{size} {kind}", model, _card(lines[0]), _row(lines[0]), rates))
    return made


def _card(found: dict[str, Any]) -> Card:
    known = card(found["device"])
    assert known is not None
    return known


def _row(found: dict[str, Any]) -> Tokens:
    cached, out = found["cached_tokens"], found["output_tokens"]
    form = found["backend"] if found["form"] else ""
    own = round(found["prompt_tokens"] - cached)
    return Tokens(round(cached), own, max(1, round(out)), "", form, False, out)


@dataclass
class Series:
    """The nights of a job, newest first, and what each did: `rates` are rows/s in all, start apart.

    `model` is the choice of the cost model.
    """

    work: Work
    model: Arrangement
    random: np.random.Generator
    runs: list[EarlierRun] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    @property
    def rows(self) -> float:
        return SECONDS * self.work.best()

    def decide(self, work: Work | None = None, key: WorkKey = WORK) -> ArrangementNote:
        kind = work or self.work
        coming = ComingRun(
            work=key,
            model=self.model,
            fits=kind.rates.__contains__,
            expect=partial(expected_ratio, kind.model, kind.card, kind.row),
            in_flight=lambda one: one.engines_per_gpu * AT_ONCE,
            rows=round(self.rows),
            gpus=1,
            trial_shards=sum(map(in_trial, range(SHARDS))),
        )
        return decide(coming, self.runs, "attempt")

    def night(
        self,
        work: Work | None = None,
        key: WorkKey = WORK,
        change: Callable[[EarlierRun], EarlierRun] = lambda run: run,
    ) -> EarlierRun:
        """Run a night, with the rates of `work`; `change` changes what is recorded of it."""
        kind, note = work or self.work, self.decide(work, key)
        noise = float(np.exp(self.random.normal(0, NOISE)))
        numbers = np.arange(SHARDS)
        mask = np.array([in_trial(n) for n in numbers]) & (note.challenger is not None)
        gone = [self._part(kind, note.incumbent, numbers[~mask], noise)]
        gain = trial = None
        own = steady_shards(gone[0])
        if note.challenger is not None:
            gone.append(self._part(kind, note.challenger, numbers[mask], noise))
            gain = paired_gain(steady_shards(gone[1]), own)
            trial = TrialOutcome(gain.pairs, gain.gain, gain.bound)
        seconds = sum(float(part.ended.max() - part.started.min()) for part in gone)
        rate = self.rows / seconds
        busy = kind.rates[note.incumbent][1]
        outcome = ArrangementOutcome(note, 1, own.score(1), busy, START, trial=trial)
        run = change(EarlierRun(f"night-{len(self.runs)}", note, outcome, rows_per_gpu_s=rate))
        self.runs.insert(0, run)
        self.rates.append(rate * noise)
        return run

    def _part(
        self, work: Work, one: Arrangement, numbers: Sequence[int] | np.ndarray, noise: float
    ) -> PartShards:
        """Send shards through engines that take the next one when one ends."""
        slots = np.zeros(one.engines_per_gpu * AT_ONCE) + 1e9
        seconds = self.rows / SHARDS / work.rate(one) * len(slots) * noise
        # Engines do not take in their first shards at once.
        slots += np.linspace(0, seconds, len(slots), endpoint=False)
        spread = np.exp(self.random.normal(0, NOISE, len(numbers)))
        started, ended = np.zeros(len(numbers)), np.zeros(len(numbers))
        for at in range(len(numbers)):
            slot = int(slots.argmin())
            started[at] = slots[slot]
            slots[slot] += seconds * spread[at]
            ended[at] = slots[slot]
        return PartShards(np.asarray(numbers), started, ended, np.full(len(numbers), 4e5))
