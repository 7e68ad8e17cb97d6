"""Estimates how much longer the shared prefixes of prompts would be in another order. Pure.

The other order may be that of the fields in the template, or that of all rows of the run. The
estimate uses sampled rows: a field with few distinct values, put first, is computed once for many
rows. The number of distinct prefixes in all rows is extrapolated from how many occur once and twice
in the sample (R. K. Colwell et al., "Models and estimators linking individual-based and
sample-based rarefaction, extrapolation and comparison of assemblages", Journal of Plant Ecology 5,
2012, equation 9). Lengths are in characters, taken as proportional to tokens.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefect_raybatch.spec.request import PromptSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.stages.block import Row
from prefect_raybatch.words import counted

MOST_FIELDS = 8  # of a template; distinct values of each subset are counted
LEAST_SAMPLED = 100  # rows
WORTH = 0.1  # share of a prompt's tokens below which no change is advised
USUAL_SHARD = 4000  # rows of a large run's shard if the job sets none
TWICE = 5  # values seen twice that are needed; with fewer, new ones go on at the same rate


@dataclass(frozen=True)
class TemplateCells:
    """The fields of a prompt template, in the template's order, and their sampled values.

    `sizes` has the mean characters of each field, including the template text just before it.
    `around` has the characters of the system prompt and of the template text after the last field.
    `values` has a tuple for each sampled row, with one value per field.
    """

    fields: tuple[str, ...]
    sizes: tuple[float, ...]
    around: tuple[float, float]  # system prompt, text after the last field
    values: Sequence[tuple[object, ...]]

    @classmethod
    def of(cls, prompt: PromptSpec, rows: Sequence[Row]) -> TemplateCells | None:
        """Return the cells of the sampled `rows`, or None if no order can be estimated.

        No order can be estimated in each of these cases: there are under 100 rows; the prompt has
        images or no template; the template has no field, more than 8 fields or a field twice.
        """
        if prompt.template is None or prompt.images is not None or len(rows) < LEAST_SAMPLED:
            return None
        parts = list(string.Formatter().parse(prompt.template))
        fields = tuple(name for _, name, _, _ in parts if name is not None)
        if not fields or len(set(fields)) < len(fields) or len(fields) > MOST_FIELDS:
            return None
        values = [tuple(row.get(name) for name in fields) for row in rows]
        literals = [len(text) for text, name, _, _ in parts if name is not None]
        means = (np.mean([len(str(row[i])) for row in values]) for i in range(len(fields)))
        sizes = tuple(a + float(b) for a, b in zip(literals, means, strict=True))
        tail = sum(len(text) for text, name, _, _ in parts if name is None)
        return cls(fields, sizes, (float(len(prompt.system or "")), float(tail)), values)

    def shared(self, rows: int) -> tuple[float, float, tuple[str, ...]]:
        """Estimate (share now, best share, best order of the fields) for `rows` random rows.

        A share is the fraction of all prompt characters that a prefix cache saves, because the
        prompt of another row begins with the same text. The first share is for the fields in the
        template's order, the second for the fields in the best order.
        """
        count = len(self.fields)
        distinct = [self._distinct(held, rows) for held in range(1 << count)]
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for held in range(1, 1 << count):
            last = (f for f in range(count) if held >> f & 1)
            best.append(
                min(
                    (
                        best[held ^ 1 << f][0] + distinct[held] * self.sizes[f],
                        (*best[held ^ 1 << f][1], f),
                    )
                    for f in last
                )
            )
        now = sum(distinct[(2 << f) - 1] * self.sizes[f] for f in range(count))
        whole = rows * (sum(self.sizes) + sum(self.around))
        rest = self.around[0] + distinct[-1] * self.around[1]
        order = tuple(self.fields[f] for f in best[-1][1])
        return 1 - (now + rest) / whole, 1 - (best[-1][0] + rest) / whole, order

    def _distinct(self, held: int, rows: int) -> float:
        """Estimate how many distinct combinations of values some fields have in `rows` rows.

        Bit i of `held` chooses field i.
        """
        chosen = [f for f in range(len(self.fields)) if held >> f & 1]
        if not chosen:
            return 1.0
        return estimate_distinct(
            Counter(tuple(row[f] for f in chosen) for row in self.values), rows
        )


def estimate_distinct(seen: Counter[tuple[object, ...]], rows: int) -> float:
    """Estimate the number of distinct values in `rows` rows from a sample of them.

    `seen` has the number of sampled rows with each value.
    """
    counts = np.array(list(seen.values()))
    sample, found = int(counts.sum()), len(counts)
    if rows <= sample:
        return float((1 - (1 - rows / sample) ** counts).sum())
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    more = rows - sample
    if twice < TWICE:
        return found + more * once / sample
    unseen = once**2 / (2 * twice)
    return found + unseen * (1 - (1 - once / (sample * unseen + once)) ** more) if once else found


def prefix_hints(
    spec: RunSpec, rows: int, sampled: Sequence[Row], tokens: float
) -> tuple[str, ...]:
    """Return a line for each change of order that would make prompts share longer prefixes.

    `rows` is the number of input rows, `tokens` the mean prompt length. A change is left out if it
    saves under a tenth of a prompt. Returns () for pooling tasks and if requests are not sorted
    (`spec.engine.sort`). Also returns () if no order can be estimated from the `sampled` rows (see
    `TemplateCells.of`).
    """
    if spec.engine.model.pools or not spec.engine.sort:
        return ()
    cells = TemplateCells.of(spec.prompt, sampled)
    if cells is None:
        return ()
    shard = min(rows, spec.sizes.rows_per_shard or USUAL_SHARD)
    reach = rows if spec.reuse.has_requests_phase else shard
    now, best, order = cells.shared(reach)
    far, far_best, _ = cells.shared(rows)
    where = (
        "over the run"
        if spec.reuse.has_requests_phase
        else f"in a shard of {counted(shard, 'row')}"
    )
    hints = []

    def told(before: float, after: float) -> str:
        return (
            f"about {after:.0%} of a prompt's {tokens:,.0f} tokens in place of {before:.0%} "
            f"({tokens * (1 - after):,.0f} to compute, not {tokens * (1 - before):,.0f})"
        )

    if best - now >= WORTH:
        names = ", ".join(f"{{{name}}}" for name in order)
        more = f", with engine.order: run {far_best:.0%}" if far_best - best >= WORTH else ""
        hints.append(
            f"prompt.template: with its fields in the order {names} rows would share "
            f"{told(now, best)} {where}{more}; another prompt may be answered otherwise"
        )
    if far - now >= WORTH:
        hints.append(
            f"engine.order: run would share {told(now, far)}, if the beginnings of the prompts do "
            "not fit into the KV cache together: rows that begin alike lie in many shards"
        )
    return tuple(hints)
