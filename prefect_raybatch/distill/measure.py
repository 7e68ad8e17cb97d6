"""Trains a classifier on half of the rows, and measures which of the other half it could answer.

The threshold is found as for a cascade (`sizing/threshold.py`). Of rows with equal texts only one
is used, so that no text is both learned and tested. There is no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from prefect_raybatch.distill.classifier import Classifier, Training, check_can_train, train
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.sizing.agreement import (
    CONFIDENCE,
    comparable_rows,
    least_sample,
    unanswered_text,
)
from prefect_raybatch.sizing.threshold import TestedThreshold, find_threshold, thresholds
from prefect_raybatch.words import counted


@dataclass(frozen=True)
class EmbeddedRows:
    """Rows of a run: their texts, answers (None: the row failed), and embeddings of the texts.

    `vectors` is float32[rows, dimension]; NaN for a row that could not be embedded.
    """

    texts: Sequence[Hashable]
    answers: Sequence[str | None]
    vectors: np.ndarray

    def taken(self, at: Sequence[int]) -> EmbeddedRows:
        """Return the rows at these indexes."""
        places = np.asarray(at, np.int64)
        return EmbeddedRows(
            [self.texts[i] for i in at], [self.answers[i] for i in at], self.vectors[places]
        )

    @property
    def embedded(self) -> np.ndarray:
        """Return bool[rows]: whether each row has an embedding."""
        return np.asarray(np.isfinite(self.vectors).all(axis=1))


@dataclass(frozen=True)
class Distilled:
    """A classifier trained on answers of `run`, and which rows it could answer itself.

    It was trained on `learned` rows and tested on `tested` other rows, all with distinct texts. For
    `same` of the tested rows, its most probable label is the answer of the run. Suppose it answers
    the rows whose most probable label has a probability of at least `found.below`, and the run's
    model answers the others. Then at least the share `agreement` of texts keeps the run's answer,
    with `confidence` (0 to 1). `found` is None if no such threshold exists. `unanswered` sampled
    rows failed in the run.
    """

    run: str
    classifier: Classifier
    agreement: float
    confidence: float
    learned: int
    tested: int
    same: int
    found: TestedThreshold | None
    unanswered: int = 0

    @property
    def answered(self) -> int:
        """Return how many tested rows the classifier could answer."""
        return 0 if self.found is None else self.found.rows - self.found.escalated

    @property
    def share(self) -> float:
        """Return the share of the tested texts that the classifier could answer, from 0 to 1."""
        return self.answered / self.tested

    @property
    def least_share(self) -> float:
        """Return a lower confidence limit of `share` for all distinct texts of the run.

        The limit holds for all thresholds at once, which is needed because the tested rows
        themselves were used to choose the threshold. It is the one-sided inequality of Dvoretzky,
        Kiefer and Wolfowitz, with the constant of P. Massart (1990).
        """
        margin = math.sqrt(-math.log(1 - self.confidence) / (2 * self.tested))
        return max(0.0, self.share - margin)

    def lines(self) -> list[str]:
        """Return sentences for the user that describe the outcome."""
        made = [
            f"learned {len(self.classifier.labels):,} labels from "
            f"{counted(self.learned, 'distinct text')}",
            f"of {counted(self.tested, 'other text')}, the classifier gave {self.same:,} the "
            f"answer of the run ({self.same / self.tested:.1%})",
        ]
        if failed := unanswered_text(self.unanswered, "sampled row", "the run's model"):
            made.append(f"{failed}, so these were neither learned nor tested")
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
            "unanswered": self.unanswered,
            "answered": self.answered,
            "share": self.share,
            "least_share": self.least_share,
            "found": None if self.found is None else asdict(self.found),
        }


def check_agreement(agreement: float) -> None:
    """Raise `ConfigError` unless the agreement is between 0 and 1, both excluded."""
    if not 0 < agreement < 1:
        raise ConfigError(f"--agreement {agreement:g} must be between 0 and 1. Example: 0.95")


def check_rows(rows: int, agreement: float) -> None:
    """Raise `ConfigError` if half of `rows` rows are too few to test for the agreement."""
    need = least_sample(agreement, CONFIDENCE)
    if rows - rows // 2 < need:
        raise ConfigError(
            f"{counted(rows, 'row')} with distinct texts cannot show an agreement of "
            f"{agreement:g}; at least {2 * need - 1:,} are needed, half of them to test. Lower "
            "--agreement, raise --sample, or name a larger run"
        )


def halves(texts: Sequence[Hashable], seed: int) -> tuple[list[int], list[int]]:
    """Return (indexes of the rows to learn from, indexes of the rows to test).

    Of rows with equal texts, only the first is used. `seed` decides which half a text is in.
    """
    first: dict[Hashable, int] = {}
    for at, text in enumerate(texts):
        first.setdefault(text, at)
    places = np.array(list(first.values()), np.int64)
    order = places[np.random.default_rng(seed).permutation(len(places))]
    half = len(order) // 2
    return order[:half].tolist(), order[half:].tolist()


def check_texts(
    texts: Sequence[Hashable], answers: Sequence[str | None], agreement: float, seed: int
) -> int:
    """Return how many of these rows `distill` would test; call it before they are embedded.

    Rows without an answer are left out. Of rows with equal texts, only the first counts.
    `agreement` is the share of texts that must keep the run's answer; `seed` decides which rows are
    tested. Both are as in `distill`. Raises `ConfigError` if too few rows are left to test for
    `agreement`, or if the rows to learn from have fewer than two different answers.
    """
    answered = np.flatnonzero(comparable_rows(answers)).tolist()
    learned, tested = halves([texts[at] for at in answered], seed)
    check_rows(len(learned) + len(tested), agreement)
    check_can_train([answers[answered[at]] for at in learned])
    return len(tested)


def distill(
    run: str, rows: EmbeddedRows, agreement: float, seed: int, training: Training
) -> Distilled:
    """Train a classifier on half of the rows; measure which rows of the other half it could answer.

    Rows that failed in `run` are left out. A tested row without an embedding counts as one that the
    classifier cannot answer. `seed` decides which rows are learned. `training` is the record for
    the classifier's file. Raises `ConfigError` for too few rows, and if all answers to learn from
    are equal.
    """
    check_agreement(agreement)
    answered = comparable_rows(rows.answers)
    unanswered = int((~answered).sum())
    rows = rows.taken(np.flatnonzero(answered).tolist())
    check_texts(rows.texts, rows.answers, agreement, seed)
    learned, tested = map(rows.taken, halves(rows.texts, seed))
    number = len(tested.texts)
    usable = np.flatnonzero(learned.embedded).tolist()
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
        unanswered=unanswered,
    )
