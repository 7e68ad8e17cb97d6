"""Compares the distributions of a run's answers with those of another run. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prefect_raybatch.ledger.stats import ANSWER_ENDS, ANSWER_LABELS, ANSWER_LENGTHS

NO_LABEL = "none of the labels"
KINDS_OF_COUNTS = {"labels": ANSWER_LABELS, "lengths": ANSWER_LENGTHS, "ends": ANSWER_ENDS}
FAILED_ROWS, PROMPTS = "failures", "prompts"
NULLS, NEW_VALUES = "nulls", "values"  # of the input
KIND_NAMES = {
    "labels": "the labels",
    "lengths": "the lengths of answers",
    "ends": "how answers end",
    FAILED_ROWS: "the failed rows",
}

# A shift is reported if chance alone explains it once in a thousand runs, and if this share of the
# answers moved: with a million rows even a tiny difference is beyond chance.
CHANCE = 0.001
LEAST_MOVED = 0.02
LEAST_ANSWERS = 200  # in each run
LEAST_EXPECTED = 5.0  # answers of a kind in each run; rarer kinds are pooled
CHANGES_NAMED = 3
CHANGES_LEAST = 0.005  # share of a run's answers


def answer_counts(figures: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return {kind: {name: number of answers}} from the summed figures of a run's shards.

    The kinds are "labels", "lengths" (names are ranges of tokens) and "ends" (names are finish
    reasons). Lengths are in ascending order, other names from the most to the least common. Kinds
    that the run does not count are left out.
    """
    counts_by_kind: dict[str, dict[str, float]] = {}
    for kind, prefix in KINDS_OF_COUNTS.items():
        counts = {k.removeprefix(prefix): v for k, v in figures.items() if k.startswith(prefix)}
        if kind == "lengths":
            numbers = sorted(int(name) for name in counts if name.isdigit() and len(name) < 3)
            counts = {tokens_range(number): counts[str(number)] for number in numbers}
        else:
            ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            counts = {name or NO_LABEL: number for name, number in ordered}
        if counts:
            counts_by_kind[kind] = counts
    return counts_by_kind


def tokens_range(bits: int) -> str:
    """Return the range of token counts that have `bits` binary digits, e.g. `4-7` for 3."""
    low, high = (1 << bits) >> 1, (1 << bits) - 1
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


@dataclass(frozen=True)
class Shift:
    """A distribution of a run that differs from earlier runs more than by chance.

    `kind` is labels, lengths, ends, failures, prompts, nulls or values (values new to the input).
    If `runs` is 1, the run is compared with the earlier run `before`. Otherwise it is compared with
    the mean of `runs` earlier runs, of which `before` is the newest.

    `moved` is the size of the difference:

    - for nulls and values, the largest change of a share;
    - for prompts, the relative change of the mean length;
    - for other kinds, half the sum of all changes of shares.

    `chance` is the probability of such a difference by chance. `changes` has the largest changes as
    {name: (share before, share now)}. For prompts it is {"tokens": (mean before, mean now)}.
    """

    kind: str
    before: str
    moved: float
    chance: float
    changes: Mapping[str, tuple[float, float]]
    runs: int = 1

    @property
    def is_drift(self) -> bool:
        """Return whether the run was compared with the mean of several runs, not with one run."""
        return self.runs > 1

    def line(self) -> str:
        """Return e.g. `the labels differ from monday in 12% of answers: Retail 20% -> 31%, ...`."""
        earlier = f"the {self.runs} runs before" if self.is_drift else self.before
        if self.kind == PROMPTS:
            ((usual, now),) = self.changes.values()
            return (
                f"the mean length of prompts differs from {earlier} by {self.moved:.1%}: "
                f"{usual:,.0f} -> {now:,.0f} tokens"
            )
        named = ", ".join(
            f"{name} {before:.1%} -> {now:.1%}" for name, (before, now) in self.changes.items()
        )
        if self.kind == NULLS:
            return f"columns have other shares of missing values than {earlier}: {named}"
        if self.kind == NEW_VALUES:
            return f"columns have other shares of values never seen before than {earlier}: {named}"
        verb = "differs" if self.kind == "ends" else "differ"
        what = KIND_NAMES[self.kind]
        unit = "rows" if self.kind == FAILED_ROWS else "answers"
        return f"{what} {verb} from {earlier} in {self.moved:.1%} of {unit}: {named}"


def short_text(shift: Shift) -> str:
    """Describe a shift of a run's answers in a few words, e.g. `12.0% of labels differ`."""
    by = {PROMPTS: "prompts", NULLS: "missing values", NEW_VALUES: "new values"}
    if shift.kind in by:
        return f"{by[shift.kind]} by {shift.moved:.1%}"
    return f"{shift.moved:.1%} of {shift.kind} differ"


def shifts(
    now: Mapping[str, Mapping[str, float]],
    before: Mapping[str, Mapping[str, float]],
    before_key: str,
) -> tuple[Shift, ...]:
    """Return the kinds of answers whose distributions differ beyond chance between two runs.

    `now` is the `answer_counts` of the run, `before` that of an earlier run with run key
    `before_key`. A kind is not compared if one of the runs counts too few answers of it.
    """
    each = (_shift(k, now.get(k, {}), before.get(k, {}), before_key) for k in KINDS_OF_COUNTS)
    return tuple(shift for shift in each if shift is not None)


def comparable(
    now: Mapping[str, Mapping[str, float]], before: Mapping[str, Mapping[str, float]]
) -> bool:
    """Return whether two runs both count enough answers of some kind to be compared.

    `now` and `before` are their `answer_counts`.
    """
    return any(
        min(sum(now[kind].values()), sum(before[kind].values())) >= LEAST_ANSWERS
        for kind in KINDS_OF_COUNTS
        if kind in now and kind in before
    )


def _shift(
    kind: str, now: Mapping[str, float], before: Mapping[str, float], before_key: str
) -> Shift | None:
    total_now, total_before = sum(now.values()), sum(before.values())
    if min(total_now, total_before) < LEAST_ANSWERS:
        return None
    names = list(dict.fromkeys([*before, *now]))
    shares = {n: (before.get(n, 0.0) / total_before, now.get(n, 0.0) / total_now) for n in names}
    moved = sum(abs(b - a) for a, b in shares.values()) / 2
    chance = chance_of([before.get(n, 0.0) for n in names], [now.get(n, 0.0) for n in names])
    if moved < LEAST_MOVED or chance >= CHANCE:
        return None
    return Shift(kind, before_key, moved, chance, largest_changes(shares))


def largest_changes(shares: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Return the up to three entries of `shares`, {name: (before, now)}, that changed most.

    The largest change comes first; very small changes are left out.
    """
    largest = sorted(shares.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    named = [item for item in largest if abs(item[1][1] - item[1][0]) >= CHANGES_LEAST]
    return dict(named[:CHANGES_NAMED])


def chance_of(one: list[float], other: list[float]) -> float:
    """Return the probability that two samples of one distribution differ as much as these do.

    `one` and `other` are the counts of the same names. It is a G-test (Sokal and Rohlf, Biometry,
    17.4), in which rare names are pooled. Returns 1 if there is nothing to compare.
    """
    total, sums = sum(one) + sum(other), (sum(one), sum(other))
    if not all(sums):
        return 1.0
    columns, rare = [], [0.0, 0.0]
    for pair in zip(one, other, strict=True):
        if sum(pair) * min(sums) / total < LEAST_EXPECTED:
            rare = [rare[0] + pair[0], rare[1] + pair[1]]
        else:
            columns.append(pair)
    if sum(rare):
        columns.append((rare[0], rare[1]))
    statistic = 2 * sum(
        count * math.log(count * total / (sum(pair) * row))
        for pair in columns
        for count, row in zip(pair, sums, strict=True)
        if count
    )
    return chi_square_tail(statistic, len(columns) - 1)


def chi_square_tail(value: float, freedom: int) -> float:
    """Return P(X >= value) of a chi-square variable with `freedom` degrees of freedom.

    Uses the finite sums of Abramowitz and Stegun, 26.4.4 and 26.4.5.
    """
    if freedom < 1 or value <= 0:
        return 1.0
    half = value / 2
    if freedom % 2:
        tail = math.erfc(math.sqrt(half))
        powers = [k + 0.5 for k in range((freedom - 1) // 2)]
    else:
        tail, powers = 0.0, [float(k) for k in range(freedom // 2)]
    # In logarithms: the factors alone may be too large or too small for a number.
    terms = (math.exp(p * math.log(half) - half - math.lgamma(p + 1)) for p in powers)
    return min(1.0, tail + sum(terms))
