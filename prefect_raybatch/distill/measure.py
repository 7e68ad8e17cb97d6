"""Trains a classifier on half of the rows, and measures on the others what it could answer. Pure.

The threshold is found as that of a cascade (`sizing/threshold.py`). Rows with equal texts count
once, so that no text is both learned and tested.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from prefect_raybatch.distill.classifier import Classifier, Training, train
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.sizing.agreement import CONFIDENCE, least_sample
from prefect_raybatch.sizing.threshold import TestedThreshold, find_threshold, thresholds
from prefect_raybatch.words import counted


@dataclass(frozen=True)
class EmbeddedRows:
    """Rows of a run: their texts, their answers (None: failed), and their vectors.

    `vectors` is float32[rows, numbers]; a row of NaN could not be embedded.
    """

    texts: Sequence[Hashable]
    answers: Sequence[str | None]
    vectors: np.ndarray

    def distinct(self) -> EmbeddedRows:
        """Return the first row of each text."""
        first: dict[Hashable, int] = {}
        for at, text in enumerate(self.texts):
            first.setdefault(text, at)
        return self.taken(list(first.values()))

    def taken(self, at: Sequence[int]) -> EmbeddedRows:
        """Return the rows at these places."""
        places = np.asarray(at, np.int64)
        return EmbeddedRows(
            [self.texts[i] for i in at], [self.answers[i] for i in at], self.vectors[places]
        )

    @property
    def embedded(self) -> np.ndarray:
        """Return which rows have a vector (bool)."""
        return np.asarray(np.isfinite(self.vectors).all(axis=1))


@dataclass(frozen=True)
class Distilled:
    """A classifier, and what it could answer of the run that it was trained on.

    `learned` and `tested` rows have distinct texts and none in common; to `same` of the tested ones
    the most probable label is the answer of the run. `found` is the lowest probability at which the
    classifier may answer, None if there is none.
    """

    run: str
    classifier: Classifier
    agreement: float
    confidence: float
    learned: int
    tested: int
    same: int
    found: TestedThreshold | None

    @property
    def answered(self) -> int:
        """Return how many tested rows the classifier could answer."""
        return 0 if self.found is None else self.found.rows - self.found.escalated

    @property
    def share(self) -> float:
        """Return the share of the tested texts that the classifier could answer."""
        return self.answered / self.tested

    @property
    def least_share(self) -> float:
        """Return the lower confidence limit of that share of all distinct texts.

        It holds for all thresholds at once, since the tested rows chose one (the inequality of
        Dvoretzky, Kiefer and Wolfowitz, one-sided, with the constant of P. Massart, 1990).
        """
        margin = math.sqrt(-math.log(1 - self.confidence) / (2 * self.tested))
        return max(0.0, self.share - margin)

    def lines(self) -> list[str]:
        """Return the outcome in sentences."""
        made = [
            f"learned {len(self.classifier.labels):,} labels from "
            f"{counted(self.learned, 'distinct text')}",
            f"of {counted(self.tested, 'other text')}, the classifier gave {self.same:,} the "
            f"answer of the run ({self.same / self.tested:.1%})",
        ]
        if self.found is None or not self.answered:
            return [
                *made,
                f"it could answer no text and keep {self.agreement:g} of the answers as they are "
                f"({self.confidence:.0%} confidence). Lower --agreement, raise --sample, or try "
                "another encoder",
            ]
        escalated = self.found.escalated
        return [
            *made,
            f"it could answer {self.share:.1%} of the texts (at least {self.least_share:.1%}, "
            f"{self.confidence:.0%} confidence)"
            + (f": those with a probability of {self.found.below:g} or more" if escalated else ""),
            f"if the model of the run answers the others, at least {self.found.bound:.2%} of the "
            f"texts have that model's answer ({self.confidence:.0%} confidence). A text that many "
            "rows have counts once here, and this says nothing about whether answers are right",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without the weights."""
        classifier = self.classifier
        return {
            "run": self.run,
            "encoder": classifier.training.encoder,
            "labels": list(classifier.labels),
            "agreement": self.agreement,
            "confidence": self.confidence,
            "learned": self.learned,
            "tested": self.tested,
            "same": self.same,
            "answered": self.answered,
            "share": self.share,
            "least_share": self.least_share,
            "found": None if self.found is None else asdict(self.found),
        }


def check_agreement(agreement: float) -> None:
    """Raise `ConfigError` for a share that no sample can show."""
    if not 0 < agreement < 1:
        raise ConfigError(f"--agreement {agreement:g} must be between 0 and 1. Example: 0.95")


def check_rows(rows: int, agreement: float) -> None:
    """Raise `ConfigError` if half of `rows` rows cannot show the agreement."""
    need = least_sample(agreement, CONFIDENCE)
    if rows - rows // 2 < need:
        raise ConfigError(
            f"{counted(rows, 'row')} with distinct texts cannot show an agreement of "
            f"{agreement:g}; at least {2 * need - 1:,} are needed, half of them to test. Lower "
            "--agreement, raise --sample, or name a larger run"
        )


def distill(
    run: str, rows: EmbeddedRows, agreement: float, seed: int, training: Training
) -> Distilled:
    """Train on half of the rows, and measure on the others.

    A failed row counts as one with another answer, and a row without a vector as one that the
    classifier leaves to the model. `seed` decides which rows train. Raises `ConfigError` for too
    few rows, and for answers that are all equal.
    """
    check_agreement(agreement)
    rows = rows.distinct()
    order = np.random.default_rng(seed).permutation(len(rows.texts))
    half = len(order) // 2
    learned, tested = rows.taken(order[:half].tolist()), rows.taken(order[half:].tolist())
    number = len(tested.texts)
    check_rows(len(order), agreement)
    usable = [
        i for i, good in enumerate(learned.embedded) if good and learned.answers[i] is not None
    ]
    answers = [str(learned.answers[i]) for i in usable]
    classifier = train(learned.vectors[usable], answers, training)
    sureness, agrees = np.full(number, -np.inf), np.zeros(number, bool)
    embedded = np.flatnonzero(tested.embedded)
    if len(embedded):
        chances = classifier.probabilities(tested.vectors[embedded])
        sureness[embedded] = chances.max(axis=1)
        for at, best in zip(embedded.tolist(), chances.argmax(axis=1).tolist(), strict=True):
            agrees[at] = classifier.labels[best] == tested.answers[at]
    return Distilled(
        run=run,
        classifier=classifier,
        agreement=agreement,
        confidence=CONFIDENCE,
        learned=len(usable),
        tested=number,
        same=int(agrees.sum()),
        found=find_threshold(sureness, agrees, agreement, CONFIDENCE, thresholds("probability")),
    )
