"""How the answers of a run are distributed, and whether that differs from another run. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prefect_raybatch.ledger.stats import ANSWER_ENDS, ANSWER_LABELS, ANSWER_LENGTHS

NO_LABEL = "none of the labels"
KINDS_OF_COUNTS = {"labels": ANSWER_LABELS, "lengths": ANSWER_LENGTHS, "ends": ANSWER_ENDS}
SAID_OF = {"labels": "the labels", "lengths": "the lengths of answers", "ends": "how answers end"}

# A shift is named where chance alone would bring it about once in a thousand nights, and where so
# large a share of the answers is another than the night before: of a million rows, chance explains
# next to nothing, and a person wants to hear of what matters.
CHANCE = 0.001
LEAST_MOVED = 0.02
LEAST_ANSWERS = 200  # of each night
LEAST_EXPECTED = 5.0  # answers of a kind in each night; rarer kinds count together
CHANGES_NAMED = 3
CHANGES_LEAST = 0.005  # of a night's answers


def answer_counts(figures: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return {labels, lengths, ends: {name: answers}} from the summed figures of a run's shards,
    the most common labels and reasons first; kinds that are not counted are left out."""
    made: dict[str, dict[str, float]] = {}
    for kind, prefix in KINDS_OF_COUNTS.items():
        found = {k.removeprefix(prefix): v for k, v in figures.items() if k.startswith(prefix)}
        if kind == "lengths":
            numbers = sorted(int(name) for name in found if name.isdigit() and len(name) < 3)
            found = {tokens_range(number): found[str(number)] for number in numbers}
        else:
            ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
            found = {name or NO_LABEL: number for name, number in ordered}
        if found:
            made[kind] = found
    return made


def tokens_range(bits: int) -> str:
    """Return the lengths in tokens that have so many bits, e.g. `4-7`."""
    low, high = (1 << bits) >> 1, (1 << bits) - 1
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


@dataclass(frozen=True)
class Shift:
    """A distribution of answers that differs from that of `before` (a run key) beyond chance: its
    `kind` (labels, lengths, ends), the share of answers that `moved`, the `chance` of such a
    difference, and the largest changes {name: (share before, share now)}."""

    kind: str
    before: str
    moved: float
    chance: float
    changes: Mapping[str, tuple[float, float]]

    def line(self) -> str:
        """Return e.g. `the labels differ from monday in 12% of answers: Retail 20% -> 31%, ...`."""
        named = ", ".join(
            f"{name} {before:.1%} -> {now:.1%}" for name, (before, now) in self.changes.items()
        )
        verb = "differs" if self.kind == "ends" else "differ"
        what = SAID_OF[self.kind]
        return f"{what} {verb} from {self.before} in {self.moved:.1%} of answers: {named}"


def shifts(
    now: Mapping[str, Mapping[str, float]],
    before: Mapping[str, Mapping[str, float]],
    before_key: str,
) -> tuple[Shift, ...]:
    """Return each kind of counts that both runs have and that differs beyond chance."""
    found = (_shift(kind, now.get(kind, {}), before.get(kind, {}), before_key) for kind in SAID_OF)
    return tuple(shift for shift in found if shift is not None)


def comparable(
    now: Mapping[str, Mapping[str, float]], before: Mapping[str, Mapping[str, float]]
) -> bool:
    """Return whether two runs count a kind of answers alike, and each has enough of them."""
    return any(
        min(sum(now[kind].values()), sum(before[kind].values())) >= LEAST_ANSWERS
        for kind in SAID_OF
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
    largest = sorted(shares.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    named = [item for item in largest if abs(item[1][1] - item[1][0]) >= CHANGES_LEAST]
    return Shift(kind, before_key, moved, chance, dict(named[:CHANGES_NAMED]))


def chance_of(one: list[float], other: list[float]) -> float:
    """Return the probability that two samples of the same distribution differ at least this much: a
    G-test of the two rows of counts (Sokal and Rohlf, Biometry, 17.4). 1 if there is nothing to
    compare."""
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
    """Return the probability that a chi-square variable with `freedom` degrees of freedom is at
    least `value`, by its finite sums (Abramowitz and Stegun, 26.4.4 and 26.4.5)."""
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
