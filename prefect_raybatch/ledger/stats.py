"""Measurements of a shard in the stages, and how measurements of several shards are combined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from prefect_raybatch.ledger.strict import Number

# Prefixes of figures that count answers: by label, by the number of bits of their length in tokens,
# and by the reason why they ended. The figures are in `others`, which are summed.
ANSWER_LABELS, ANSWER_LENGTHS, ANSWER_ENDS = "answers.label.", "answers.bits.", "answers.end."
# Prefixes of figures that count input rows: those with a null in a column, those with a value, and
# those with a certain value (prefix, column, separator AND_VALUE, digest of the value).
INPUT_NULLS, INPUT_FILLED, INPUT_VALUES = "inputs.null.", "inputs.filled.", "inputs.value."
AND_VALUE = "\x1f"
# Figures that count rows whose first answer a cascade compared with the larger model's; those of
# them with equal answers; rows that the larger model was to check, but did not answer.
CHECKED, AGREED, UNANSWERED = "cascade.checked", "cascade.agreed", "cascade.unanswered"
# Figures that count rows that the larger model of a cascade decided: answered, and failed.
LARGER_ANSWERED, LARGER_FAILED = "cascade.answered", "cascade.failed"
_Value = TypeVar("_Value", str, bytes)
MOST_COUNTED = 64  # values of a column beyond which rare ones are dropped
MOST_NAMES = 8192  # figures in memory beyond which rare values of columns are dropped

SUM, FIRST, LAST = "sum", "first", "last"
MEAN, PEAK = "mean", "peak"  # a mean is weighted by the `samples` behind it


def _folded(rule: str) -> Any:
    return field(default=None, metadata={"fold": rule})


@dataclass(frozen=True)
class ShardStats:
    """Measurements of one shard, or of several combined. Unknown ones are None.

    The metadata of each field says how it is combined: sum, first, last, mean or peak. `started`
    and `ended` are seconds since 1970: the first and last moment in the shard's engine and finish
    stages. `read_s` to `finish_s` are the seconds in each stage. `cut_off` counts rows whose answer
    reached max_tokens, `cut_off_structured` those with structured output. `deduplicated` counts
    rows that took the answer of an equal request in the shard, `truncated` rows whose prompt was
    cut. `reused` to `asked` count rows of a run that reuses answers, by the source of the answer;
    `saved_tokens` are the tokens of reused and merged rows. `flops` to `idle_s` are the engine's
    work since it finished the previous shard, and the work its GPUs could have done in that time
    (stages/meter.py); several shards are in an engine at once, so only the sums are meaningful. The
    fields from `samples` on describe the engine and its node while the shard was in it
    (stages/load.py). `others` are figures with other names, which are summed: answers and input
    rows counted by value, and measurements of a newer version.
    """

    rows: float | None = _folded(SUM)
    prompt_tokens: float | None = _folded(SUM)
    cached_tokens: float | None = _folded(SUM)
    output_tokens: float | None = _folded(SUM)
    cut_off: float | None = _folded(SUM)
    cut_off_structured: float | None = _folded(SUM)
    deduplicated: float | None = _folded(SUM)
    reused: float | None = _folded(SUM)
    merged: float | None = _folded(SUM)
    asked: float | None = _folded(SUM)
    saved_tokens: float | None = _folded(SUM)
    truncated: float | None = _folded(SUM)
    started: float | None = _folded(FIRST)
    ended: float | None = _folded(LAST)
    read_s: float | None = _folded(SUM)
    prepare_s: float | None = _folded(SUM)
    engine_s: float | None = _folded(SUM)
    finish_s: float | None = _folded(SUM)
    flops: float | None = _folded(SUM)
    moved_bytes: float | None = _folded(SUM)
    peak_flops: float | None = _folded(SUM)
    peak_bytes: float | None = _folded(SUM)
    steps: float | None = _folded(SUM)
    up_s: float | None = _folded(SUM)
    idle_s: float | None = _folded(SUM)
    samples: float | None = _folded(SUM)
    running: float | None = _folded(MEAN)
    waiting: float | None = _folded(MEAN)
    sequences: float | None = _folded(MEAN)
    kv_cache: float | None = _folded(MEAN)
    steps_per_s: float | None = _folded(MEAN)
    node_cpu: float | None = _folded(MEAN)
    gpu: float | None = _folded(MEAN)
    kv_cache_peak: float | None = _folded(PEAK)
    node_memory_peak: float | None = _folded(PEAK)
    gpu_memory_peak: float | None = _folded(PEAK)
    others: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, float]) -> ShardStats:
        """Build from the {name: value} of `to_dict`; unknown names go into `others`."""
        if values.keys() <= _RULES.keys():
            known, others = values, {}
        else:
            known = {name: value for name, value in values.items() if name in _RULES}
            others = {name: value for name, value in values.items() if name not in _RULES}
        # Not by __init__: it sets a frozen record field by field, which takes 14 us of a resume's
        # 60 a shard, and this takes 1.
        made = object.__new__(cls)
        made.__dict__.update(_UNKNOWN, **known, others=others)
        return made

    def to_dict(self) -> dict[str, float]:
        """Return the known measurements by name, as JSON in records."""
        known = self.__dict__
        found = {name: known[name] for name in _RULES if known[name] is not None}
        return {**found, **self.others} if self.others else found

    def figures(self) -> dict[str, float]:
        """Return the known means and peaks of the engine and its node, rounded for display."""
        found = ((name, getattr(self, name)) for name in (*MEANS, *PEAKS))
        return {name: round(value, 4) for name, value in found if value is not None}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        values = handler.generate_schema(dict[str, Number])
        return core_schema.no_info_after_validator_function(cls.of, values)


_RULES: Mapping[str, str] = MappingProxyType(
    {one.name: one.metadata["fold"] for one in fields(ShardStats) if one.metadata}
)
_UNKNOWN: Mapping[str, None] = dict.fromkeys(_RULES)


def _named(*rules: str) -> tuple[str, ...]:
    return tuple(name for name, rule in _RULES.items() if rule in rules)


MEANS, PEAKS, _SUMS = _named(MEAN), _named(PEAK), _named(SUM)
_CHOSEN: Mapping[str, Callable[[float, float], float]] = {
    **dict.fromkeys(_named(FIRST), min),
    **dict.fromkeys(_named(LAST, PEAK), max),
}


class StatsFold:
    """Combines the measurements of shards, which are added one by one, in bounded memory.

    An unknown measurement (None) of a shard is left out, e.g. from the mean.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._means: dict[str, tuple[float, float]] = {}  # weighted sum, weight
        self._most_names = MOST_NAMES

    def add(self, stats: ShardStats) -> None:
        known, values = stats.__dict__, self._values
        for name in _SUMS:
            value = known[name]
            if value is not None:
                values[name] = values.get(name, 0) + value
        for name, choose in _CHOSEN.items():
            value = known[name]
            if value is not None:
                values[name] = choose(values.get(name, value), value)
        weight = 1.0 if stats.samples is None else stats.samples
        for name in MEANS:
            value = known[name]
            if value is not None:
                total, weights = self._means.get(name, (0, 0))
                self._means[name] = (total + value * weight, weights + weight)
        for name, value in stats.others.items():
            values[name] = values.get(name, 0) + value
        if len(values) > self._most_names:
            self._values = without_rare_values(values)
            self._most_names = max(MOST_NAMES, 2 * len(self._values))

    def result(self) -> ShardStats:
        """Return the combined measurements."""
        means = {name: total / (weight or 1.0) for name, (total, weight) in self._means.items()}
        return ShardStats.of({**self._values, **means})


def common_values(counts: Mapping[_Value, float], rows: float) -> dict[_Value, float]:
    """Return `counts` without rare values, or all of them if there are at most 64 (MOST_COUNTED).

    `counts` is {value of a column: rows with it}, `rows` the number of rows with any value. A value
    is rare if fewer than rows / 64 rows have it.
    """
    if len(counts) <= MOST_COUNTED:
        return dict(counts)
    return {value: number for value, number in counts.items() if number * MOST_COUNTED >= rows}


def values_by_column(figures: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return {column: {digest of a value: rows}} of the common values of input columns.

    `common_values` says which values are common. `figures` are `ShardStats.others` of all shards,
    summed.
    """
    counts: dict[str, dict[str, float]] = {}
    for name, number in figures.items():
        if name.startswith(INPUT_VALUES):
            column, _, value = name.removeprefix(INPUT_VALUES).partition(AND_VALUE)
            counts.setdefault(column, {})[value] = number
    common = {
        column: common_values(values, figures.get(f"{INPUT_FILLED}{column}", 0.0))
        for column, values in counts.items()
    }
    return {column: values for column, values in common.items() if values}


def without_rare_values(figures: Mapping[str, float]) -> dict[str, float]:
    """Return `figures` without the counts of rare values of input columns (see `common_values`).

    This bounds the memory of a `StatsFold` if each shard has other values, as in a sorted input.
    """
    kept = {name: number for name, number in figures.items() if not name.startswith(INPUT_VALUES)}
    for column, values in values_by_column(figures).items():
        kept |= {f"{INPUT_VALUES}{column}{AND_VALUE}{value}": n for value, n in values.items()}
    return kept


def fold_stats(parts: Iterable[ShardStats]) -> ShardStats:
    """Return the measurements of all parts combined."""
    fold = StatsFold()
    for part in parts:
        fold.add(part)
    return fold.result()
