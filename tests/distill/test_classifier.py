"""The classifier: it is scikit-learn's, and its file is only data."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

from prefect_raybatch.distill import classifier as classifiers
from prefect_raybatch.distill.classifier import Classifier, Training, fit, train
from prefect_raybatch.errors import ConfigError

TRAINING = Training("encoder", "encoder@1", ("a", "b", "c"), {"prompt.template": "{text}"})


def blobs(seed: int, rows: int, size: int, labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return unit vectors around a centre for each label, and the numbers of their labels."""
    chance = np.random.default_rng(seed)
    centres = chance.normal(size=(labels, size))
    numbers = chance.integers(labels, size=rows)
    vectors = centres[numbers] + chance.normal(size=(rows, size))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32), numbers


# `LogisticRegression(C=..., tol=1e-10, max_iter=10000)` of scikit-learn 1.9.1 over blobs(3, 60, 4,
# 3): coef_, and intercept_ without its mean, which changes no probability.
OF_SCIKIT_LEARN: dict[float, tuple[list[list[float]], list[float]]] = {
    1.0: (
        [
            [1.0663, -1.6544, 1.2707, 0.0503],
            [-0.6994, -0.3744, -2.3417, -0.0016],
            [-0.3669, 2.0288, 1.0711, -0.0487],
        ],
        [0.1367, -0.1306, -0.0061],
    ),
    100.0: (
        [
            [2.0523, -4.6288, 5.3645, 2.5569],
            [-2.4466, -2.4821, -8.9406, -1.3874],
            [0.3943, 7.1108, 3.5761, -1.1695],
        ],
        [1.7364, -1.3746, -0.3617],
    ),
}


@pytest.mark.parametrize("strength", OF_SCIKIT_LEARN)
def test_weights_are_those_of_scikit_learn(strength, monkeypatch):
    monkeypatch.setattr(classifiers, "GRADIENT", 1e-7)
    weights, bias = fit(*blobs(3, 60, 4, 3), 3, strength)
    coef, intercept = OF_SCIKIT_LEARN[strength]
    assert weights == pytest.approx(np.array(coef), abs=1e-3)
    assert bias - bias.mean() == pytest.approx(np.array(intercept), abs=1e-3)


def trained(seed: int = 3) -> tuple[Classifier, np.ndarray, list[str]]:
    vectors, numbers = blobs(seed, 200, 4, 3)
    answers = ["abc"[number] for number in numbers]
    return train(vectors, answers, TRAINING), vectors, answers


def test_probabilities_are_the_softmax_of_the_stored_numbers_and_name_the_right_labels():
    made, vectors, answers = trained()
    scores = vectors.astype(float) @ np.array(made.weights).T + np.array(made.bias)
    chances = made.probabilities(vectors)
    assert chances == pytest.approx(softmax(scores, axis=1), abs=1e-12)
    best = [made.labels[at] for at in chances.argmax(axis=1)]
    assert np.mean(np.array(best) == np.array(answers)) > 0.8


def test_the_strength_is_the_one_with_the_least_loss_on_every_fifth_row(monkeypatch):
    vectors, _ = blobs(3, 200, 4, 3)
    noise = ["ab"[number] for number in np.random.default_rng(1).integers(2, size=200)]
    weak, strong = (train(vectors, noise, TRAINING) for _ in range(2))
    assert weak == strong
    monkeypatch.setattr(classifiers, "STRENGTHS", (1.0,))
    least = train(vectors, noise, TRAINING)
    assert weak == least, "labels that are noise are learned least"


def test_a_file_holds_the_same_classifier():
    made, vectors, _ = trained()
    again = Classifier.from_bytes(made.to_bytes(), "c.json")
    assert again == made
    assert (again.probabilities(vectors) == made.probabilities(vectors)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "format 1 is not 2"),
        ({"labels": ["a", "b"]}, "differ in number"),
        ({"labels": ["a", "b", "a"]}, "names a label twice"),
        ({"labels": [], "weights": [], "bias": []}, "two labels"),
        ({"weights": [[1.0], [1.0, 2.0], [3.0]]}, "differ in length"),
        ({"weights": [[], [], []]}, "differ in length"),
        ({"weights": [["x"], [1.0], [1.0]]}, r"weights\.0\.0"),
        ({"training": {}}, r"training"),
        ({"training": asdict(TRAINING) | {"choice": ["a", "b"]}}, r"training\.choice lacks"),
        ({"training": asdict(TRAINING) | {"code": 1}}, "unknown fields training.code"),
        ({"code": "import os"}, "unknown fields code"),
    ],
)
def test_a_file_of_another_form_is_refused(change: dict[str, Any], message: str):
    value = json.loads(trained()[0].to_bytes()) | change
    with pytest.raises(ConfigError, match=rf"(?s)c\.json.*{message}.*raybatch distill"):
        Classifier.from_bytes(json.dumps(value).encode(), "c.json")


@pytest.mark.parametrize("data", [b"\x80\x04N.", b"{", b"[]", b'{"bias": [NaN]}'])
def test_what_is_no_json_object_is_refused(data: bytes):
    with pytest.raises(ConfigError, match=r"c\.json"):
        Classifier.from_bytes(data, "c.json")


def test_a_file_beyond_the_limit_is_not_parsed(monkeypatch):
    monkeypatch.setattr(classifiers, "LARGEST_FILE", 10)
    with pytest.raises(ConfigError, match="at most 10"):
        Classifier.from_bytes(b"x" * 11, "c.json")


def test_vectors_of_another_encoder_are_refused():
    with pytest.raises(ConfigError, match=r"4 numbers, and these have 5.*encoder"):
        trained()[0].probabilities(np.zeros((1, 5), np.float32))


def test_equal_answers_teach_nothing():
    vectors, _ = blobs(3, 20, 4, 3)
    with pytest.raises(ConfigError, match=r"all 20 answers.*'a'"):
        train(vectors, ["a"] * 20, TRAINING)
    with pytest.raises(ConfigError, match="no answer to learn from"):
        train(vectors[:0], [], TRAINING)
