"""What a classifier could answer: no text is learned and tested, and the bound holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import stats

from prefect_raybatch.distill import classifier as classifiers
from prefect_raybatch.distill import measure
from prefect_raybatch.distill.classifier import Training
from prefect_raybatch.distill.measure import EmbeddedRows, distill
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.sizing import threshold
from prefect_raybatch.sizing.agreement import lower_bound

LABELS = "abc"
TRAINING = Training("encoder", "encoder@1", ("a", "b", "c", "another"), {})
CENTRES = np.array([[1.0, 0.0], [-0.5, 0.9], [-0.5, -0.9]])


@pytest.fixture(autouse=True, scope="module")
def one_strength() -> Iterator[None]:
    """Train once, not once for each strength: test_classifier.py has the choice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classifiers, "STRENGTHS", (10.0,))
        yield


def rows_of(chance: np.random.Generator, rows: int, spread: float = 0.5) -> EmbeddedRows:
    """Return rows with distinct texts, whose vectors lie around the centre of their answer."""
    numbers = chance.integers(3, size=rows)
    vectors = CENTRES[numbers] + spread * chance.normal(size=(rows, 2))
    answers = [LABELS[number] for number in numbers]
    return EmbeddedRows(list(range(rows)), answers, vectors.astype(np.float32))


def distilled(rows: EmbeddedRows, agreement: float = 0.9, seed: int = 1) -> measure.Distilled:
    return distill("n1", rows, agreement, seed, TRAINING)


@settings(max_examples=15, deadline=None)
@given(some.integers(0, 10**6), some.floats(0.05, 1.0), some.sampled_from([0.8, 0.9]))
def test_the_bound_is_the_exact_one_of_the_tested_rows(seed, spread, agreement):
    found = distilled(rows_of(np.random.default_rng(seed), 160, spread), agreement, seed)
    assert (found.learned, found.tested) == (80, 80)
    if found.found is not None:
        wrong = found.found.rows - found.found.agreed
        assert stats.binomtest(80 - wrong, 80, agreement, "greater").pvalue <= 0.05
        exact = stats.beta.ppf(0.05, 80 - wrong, wrong + 1)
        assert found.found.bound == pytest.approx(exact, abs=1e-9) and exact >= agreement
    assert 0 <= found.least_share <= found.share <= 1


def test_in_simulated_runs_the_guarantee_is_broken_at_most_as_often_as_stated(monkeypatch):
    """New rows of the same kind show how often the answers really agree."""
    monkeypatch.setattr(threshold, "lower_bound", cache(lower_bound))
    chance = np.random.default_rng(7)
    broken = answered = shares_broken = 0
    for seed in range(60):
        found = distilled(rows_of(chance, 300), 0.9, seed)
        new = rows_of(chance, 5000)
        chances = found.classifier.probabilities(new.vectors)
        best = np.array(found.classifier.labels)[chances.argmax(axis=1)]
        below = np.inf if found.found is None else found.found.below
        kept = chances.max(axis=1) >= below
        broken += np.mean(~kept | (best == np.array(new.answers))) < 0.9
        answered += found.answered > 0
        shares_broken += kept.mean() < found.least_share
    assert answered == 60
    assert max(broken, shares_broken) <= stats.binom.ppf(0.999, 60, 0.05)


def test_texts_that_repeat_are_not_tested_on_what_was_learned():
    """Answers are noise: only a row that was learned could be answered right for sure."""
    chance = np.random.default_rng(5)
    vectors = np.eye(200, dtype=np.float32)
    answers = [LABELS[number] for number in chance.integers(3, size=200)]
    once = EmbeddedRows([f"t{i}" for i in range(200)], answers, vectors)
    twice = EmbeddedRows([*once.texts] * 2, answers * 2, np.concatenate([vectors] * 2))
    assert distilled(twice) == distilled(once)
    assert distilled(twice).same < 60 and distilled(twice).answered == 0


def test_failed_rows_are_left_out_and_rows_without_a_vector_go_to_the_model():
    rows = rows_of(np.random.default_rng(2), 400, 0.05)
    assert distilled(rows).share == 1 and "no answer" not in "".join(distilled(rows).lines())
    failing = [None if i % 2 else answer for i, answer in enumerate(rows.answers)]
    found = distilled(EmbeddedRows(rows.texts, failing, rows.vectors))
    assert (found.learned, found.tested, found.same, found.unanswered) == (100, 100, 100, 200)
    assert found.share == 1
    assert found.lines()[2].startswith("200 sampled rows got no answer of the run's model")
    # A text is learned or tested by the first of its rows that was answered.
    again = EmbeddedRows([0, *rows.texts], [None, *rows.answers], rows.vectors[[0, *range(400)]])
    assert distilled(again).learned + distilled(again).tested == 400
    vectors = rows.vectors.copy()
    vectors[::2] = np.nan
    found = distilled(EmbeddedRows(rows.texts, rows.answers, vectors))
    assert found.found is not None and found.found.agreed == 200
    assert found.same == found.answered == 200 - found.found.escalated < 130


def test_too_few_rows_and_an_agreement_out_of_range_are_refused():
    chance = np.random.default_rng(1)
    with pytest.raises(ConfigError, match=r"40 rows.*0\.9; at least 57"):
        distilled(rows_of(chance, 40))
    assert distilled(rows_of(chance, 57)).tested == 29
    with pytest.raises(ConfigError, match="between 0 and 1"):
        distilled(rows_of(chance, 100), 1.0)


def test_equal_texts_count_once_and_the_lines_say_so():
    """Half of all rows have one text: what is shown of texts need not hold for them."""
    rows = rows_of(np.random.default_rng(2), 400, 0.05)
    many = EmbeddedRows(
        [*rows.texts, *["same"] * 400],
        [*rows.answers, *["another"] * 400],
        np.concatenate([rows.vectors, np.repeat(rows.vectors[:1], 400, axis=0)]),
    )
    found = distilled(many)
    assert found.learned + found.tested == 401
    text = "\n".join(found.lines())
    assert "of all answers" not in text and "A text that many rows have counts once" in text


def test_lines_name_the_share_its_threshold_and_the_guarantee():
    found = distilled(rows_of(np.random.default_rng(2), 400, 0.05))
    text = "\n".join(found.lines())
    assert "could answer 100.0% of the texts (at least 91.3%, 95% confidence)" in text
    assert "at least 98.51% of the texts have that model's answer (95% confidence)" in text
    assert "weights" not in found.to_dict()
    assert "could answer no text" in replace(found, found=None).lines()[-1]
