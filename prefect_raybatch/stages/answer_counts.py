"""Counts a shard's answers by label, length and finish reason.

The counts are summed over a run, so that a run can be compared with the one before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from prefect_raybatch.ledger.stats import ANSWER_ENDS, ANSWER_LABELS, ANSWER_LENGTHS

MOST_COUNTED_LABELS = 256  # with more labels, lengths are counted instead: a record stays small
LONGEST_REASON, LONGEST_LABEL = 20, 80  # characters


def label_counts(answers: Iterable[str | None], labels: Sequence[str]) -> dict[str, float]:
    """Return {ANSWER_LABELS + label: number of answers}.

    A label is cut to LONGEST_LABEL characters. The label is "" for a missing answer (None), and for
    an answer that is not one of `labels`.
    """
    names = {label: label[:LONGEST_LABEL] for label in labels}
    found = Counter(names.get(answer or "", "") for answer in answers)
    return {f"{ANSWER_LABELS}{name}": float(number) for name, number in found.items()}


def length_counts(
    answers: Iterable[Sequence[Sequence[int]]], reasons: Iterable[str | None]
) -> dict[str, float]:
    """Return the number of answers by length in tokens, and the number of rows by finish reason.

    The keys are ANSWER_LENGTHS + length and ANSWER_ENDS + finish reason. Lengths are grouped by
    their number of binary digits: 4 to 7 tokens count under 3, 8 to 15 under 4. A finish reason of
    None counts under "?".

    `answers` has the token ids of each answer of each row; `reasons` has one finish reason per row.
    """
    lengths = Counter(len(ids).bit_length() for row in answers for ids in row)
    ends = Counter(str(reason or "?")[:LONGEST_REASON] for reason in reasons)
    return {
        **{f"{ANSWER_LENGTHS}{name}": float(number) for name, number in lengths.items()},
        **{f"{ANSWER_ENDS}{name}": float(number) for name, number in ends.items()},
    }
