"""A linear classifier over embeddings: trains it, applies it, and reads and writes its JSON file.

It is a multinomial logistic regression with the objective and the minimizer (L-BFGS of scipy) of
scikit-learn's `LogisticRegression`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from prefect_raybatch.errors import ConfigError, CorruptRun
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.ledger.strict import Count, Number, StrictRecord, read_json
from prefect_raybatch.storage import open_store

CLASSIFIER_FORMAT = 2
LARGEST_FILE = 64 << 20  # bytes: 1,000 labels of 4,096 numbers each take about 50 MB
STRENGTHS = (1.0, 10.0, 100.0)  # tried for C; embeddings of length 1 need large ones
EVERY = 5  # every fifth training row serves to choose among the strengths
DECIMALS = 6  # of the weights in the file; tests use the rounded weights too
MOST_STEPS = 1000
GRADIENT = 1e-4  # largest component at which the minimizer ends, as in scikit-learn


# Parts of a job's fingerprint that decide the vector of a row, besides the encoder's weights.
VECTOR_FIELDS = (
    *("prompt.template", "prompt.on_null", "prompt.on_too_long", "prompt.special_tokens_in_rows"),
    *("engine.max_model_len", "engine.adapters", "engine"),
    *("output.normalize", "output.vector_type"),
)


@dataclass(frozen=True)
class Training(StrictRecord):
    """The record of what a classifier was trained on; a job that uses it must have the same values.

    `encoder` is the embedding model's name in the job that embedded the rows, and `identity` its
    commit or the hash of its files. `choice` are the labels in `sampling.choice`. `fields` is {job
    field: value} for the fields that determine the embeddings (VECTOR_FIELDS).
    """

    encoder: str
    identity: str
    choice: tuple[str, ...]
    fields: dict[str, Any]

    @classmethod
    def of(
        cls, encoder: str, identity: str, choice: Sequence[str], parts: Mapping[str, Any]
    ) -> Training:
        """Return the record of a training with these values.

        `parts` are the parts of the fingerprint of the job that embedded the rows, by field.
        """
        return cls(encoder, identity, tuple(choice), _vector_fields(parts))

    def check_fields(self, name: str, parts: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if a job's embeddings would differ from those of the training.

        `parts` are the parts of the job's fingerprint, by field; `name` is the classifier's file.
        """
        fields = _vector_fields(parts)
        for field in VECTOR_FIELDS:
            trained, given = self.fields.get(field), fields.get(field)
            if trained != given:
                raise ConfigError(
                    f"{field}: {name} was trained with {_short(trained)}, and the job embeds with "
                    f"{_short(given)}. Set the same, or train a classifier with raybatch distill"
                )

    def check_choice(self, name: str, choice: Sequence[str]) -> None:
        """Raise `ConfigError` if the labels in a job's `choice` differ from the training's.

        `name` is the classifier's file.
        """
        for label in (*self.choice, *choice):
            if (label in self.choice) != (label in choice):
                where = "the job" if label in self.choice else name
                raise ConfigError(
                    f"sampling.choice: {where} lacks the label {_short(label)}. Use the labels "
                    "that the classifier was trained on, or train one with raybatch distill"
                )

    def check_encoder(self, name: str, model: str, identity: str | None) -> None:
        """Raise `ConfigError` if a job's embedding model is not the one of the training.

        `name` is the classifier's file and `model` the job's model. `identity` is the model's
        commit or the hash of its files. If a Hugging Face name is not pinned yet, `identity` is
        None, and only the names of the models are compared.
        """
        named = identity is None and self.identity.startswith(f"{model}@")
        if named or identity == self.identity:
            return
        raise ConfigError(
            f"engine.model: {name} was trained on vectors of "
            f"{_pinned(self.encoder, self.identity)}, and the job names "
            f"{_pinned(model, identity)}. Set engine.model and engine.revision to that "
            "encoder, or train a classifier with raybatch distill"
        )


def _pinned(model: str, identity: str | None) -> str:
    """Return a model's name for an error, with its commit or the hash of its files if known."""
    if identity is None:
        return model
    return identity if "@" in identity else f"{model} (files {identity[:16]})"


def _vector_fields(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return {field: JSON value} of VECTOR_FIELDS, from the parts of a fingerprint."""
    found: dict[str, Any] = json.loads(dump({n: parts[n] for n in VECTOR_FIELDS if n in parts}))
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-30:]}"


@dataclass(frozen=True)
class Measured(StrictRecord):
    """The result of testing a classifier after its training on the run with key `run`.

    It learned from `learned` texts. For `same` of `tested` other texts, its label was the run's
    answer. `trained` is the time when the embedding run finished, in seconds since 1970; the time
    of training itself would make equal trainings write different files.
    """

    run: str
    trained: Number
    learned: Count
    tested: Count
    same: Count


@dataclass(frozen=True)
class Classifier(StrictRecord):
    """A linear classifier: weights and bias for each of its labels.

    It takes embeddings that are made as `training` says. `measured` is the result of its test, None
    if it was never tested. `format` is the version of the file format.
    """

    format: int
    training: Training
    labels: tuple[str, ...]
    weights: tuple[tuple[Number, ...], ...]
    bias: tuple[Number, ...]
    measured: Measured | None = None

    @property
    def size(self) -> int:
        """Return the dimension of the vectors that it takes."""
        return len(self.weights[0])

    def probabilities(self, vectors: np.ndarray) -> np.ndarray:
        """Return the probability of each label (float64[rows, labels]); each row adds up to 1.

        Raises `ConfigError` for vectors of another length.
        """
        if vectors.shape[1] != self.size:
            raise ConfigError(
                f"the classifier takes vectors of {self.size:,} numbers, and these have "
                f"{vectors.shape[1]:,}. Use the encoder that it was trained with, "
                f"{self.training.encoder}"
            )
        weights, bias = self._arrays
        return _softmax(vectors.astype(np.float64) @ weights.T + bias)

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.weights, np.float64), np.array(self.bias, np.float64)

    def to_bytes(self) -> bytes:
        """Return the classifier as JSON; raise `ConfigError` if it is too large to be read."""
        value = asdict(self)
        data = dump({n: item for n, item in value.items() if n != "measured" or item is not None})
        if len(data) > LARGEST_FILE:
            raise ConfigError(
                f"the classifier would have {len(data):,} bytes, and at most {LARGEST_FILE:,} are "
                "read. Name an encoder with shorter vectors, or a run with fewer labels"
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Classifier:
        """Return the classifier in `data`; raise `ConfigError` if it is invalid or too large.

        `name` is the file in errors. The file may come from an untrusted source: it is parsed as
        JSON and no code in it is run.
        """
        if len(data) > LARGEST_FILE:
            raise ConfigError(
                f"{name} has {len(data):,} bytes, and a classifier at most {LARGEST_FILE:,}. Name "
                "a file of raybatch distill"
            )
        try:
            made = read_json(_RECORD, data, name)
        except CorruptRun as error:
            raise ConfigError(f"{error}. Write the file anew with raybatch distill") from None
        sizes = {len(row) for row in made.weights}
        wrong = {
            f"format {made.format} is not {CLASSIFIER_FORMAT}": made.format != CLASSIFIER_FORMAT,
            "it needs two labels or more": len(made.labels) < 2,
            "labels names a label twice": len(set(made.labels)) < len(made.labels),
            "training.choice lacks one of its labels": not (
                set(made.labels) <= set(made.training.choice)
            ),
            "weights, bias and labels differ in number": not (
                len(made.labels) == len(made.weights) == len(made.bias)
            ),
            "the weights of its labels differ in length": len(sizes) != 1 or 0 in sizes,
        }
        for fault, is_wrong in wrong.items():
            if is_wrong:
                raise ConfigError(
                    f"{name} is no classifier: {fault}. Write the file anew with raybatch distill"
                )
        return made


_RECORD = TypeAdapter(Classifier)


def classifier_identity(data: bytes) -> str:
    """Return the SHA-256 of a classifier's file, by which a plan identifies it."""
    return hashlib.sha256(data).hexdigest()


def read_file(uri: str, options: Mapping[str, object]) -> bytes:
    """Return the bytes of the file that `engine.classifier` names: local, or in an object store.

    `options` are the options of the store. Raises `ConfigError` if the file is missing or too
    large.
    """
    folder, _, name = uri.rpartition("/")
    if not name:
        raise ConfigError(f"engine.classifier: {uri} is a folder. Name a file of raybatch distill")
    store = open_store(folder or ("/" if uri.startswith("/") else "."), dict(options) or None)
    try:
        return store.read(name, LARGEST_FILE)
    except FileNotFoundError:
        raise ConfigError(
            f"engine.classifier: no file {uri}. Restore the file, or correct the path"
        ) from None
    except CorruptRun as error:
        raise ConfigError(f"engine.classifier: {error}. Name a file of raybatch distill") from None


def check_can_train(answers: Sequence[str | None]) -> None:
    """Raise `ConfigError` if scipy is missing, or if the answers have fewer than two labels.

    None stands for a row that failed and is ignored.
    """
    _scipy_optimize()
    labels = {answer for answer in answers if answer is not None}
    if not labels:
        raise ConfigError("no answer to learn from. Name a run with answers")
    if len(labels) < 2:
        raise ConfigError(
            f"all {len(answers):,} answers to learn from are {labels.pop()!r}, so there is nothing "
            "to tell apart. Name a run with several answers, or raise --sample"
        )


def train(vectors: np.ndarray, answers: Sequence[str], training: Training) -> Classifier:
    """Train a classifier on rows with these vectors and answers; return it.

    First, a classifier is trained with each of STRENGTHS (`strength` of `fit`) on four of every
    five rows. The strength with the least log loss on the other rows is used to train the final
    classifier on all rows. `training` is the record for the file. Raises `ConfigError` if all
    answers are equal, or if scipy is missing.
    """
    check_can_train(answers)
    labels, numbers = np.unique(np.array(answers, dtype=object), return_inverse=True)
    choosing = np.arange(len(numbers)) % EVERY == EVERY - 1
    strength = STRENGTHS[0]
    if choosing.any():
        losses = []
        for value in STRENGTHS:
            weights, bias = fit(vectors[~choosing], numbers[~choosing], len(labels), value)
            chances = _softmax(vectors[choosing] @ weights.T + bias)
            chance = chances[np.arange(len(chances)), numbers[choosing]]
            losses.append(-np.log(np.maximum(chance, 1e-300)).mean())
        strength = STRENGTHS[int(np.argmin(losses))]
    weights, bias = fit(vectors, numbers, len(labels), strength)
    return Classifier(
        CLASSIFIER_FORMAT,
        training,
        tuple(str(label) for label in labels),
        tuple(tuple(row) for row in np.round(weights, DECIMALS).tolist()),
        tuple(np.round(bias, DECIMALS).tolist()),
    )


def fit(
    vectors: np.ndarray, numbers: np.ndarray, labels: int, strength: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return (weights[labels, dimension], bias[labels]) of the logistic regression.

    `numbers` has the index of each row's label; there are `labels` labels. The weights and bias
    minimize `strength` times the sum of the rows' log losses, plus half the sum of the squared
    weights. So a larger `strength` is a weaker penalty (C of scikit-learn); the bias has none.
    """
    optimize = _scipy_optimize()
    rows, size = vectors.shape
    x = vectors.astype(np.float64)
    target = np.zeros((rows, labels))
    target[np.arange(rows), numbers] = 1.0
    scale = 1.0 / (strength * rows)  # loss and penalty are divided by strength times rows

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights, bias = flat[: labels * size].reshape(labels, size), flat[labels * size :]
        scores = x @ weights.T + bias
        scores -= scores.max(axis=1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        error = (np.exp(logs) - target) / rows
        value = -(logs * target).sum() / rows + 0.5 * scale * (weights * weights).sum()
        gradient = error.T @ x + scale * weights
        return float(value), np.concatenate([gradient.ravel(), error.sum(axis=0)])

    options = {"maxiter": MOST_STEPS, "gtol": GRADIENT, "ftol": 1e-12}
    start = np.zeros(labels * (size + 1))
    found = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=options).x
    return found[: labels * size].reshape(labels, size), found[labels * size :]


def _scipy_optimize() -> Any:
    """Return scipy's minimizers; raise `ConfigError` if scipy is not installed."""
    try:
        from scipy import optimize
    except ImportError:
        raise ConfigError(
            'training a classifier needs scipy. pip install "prefect-raybatch[distill]"'
        ) from None
    return optimize


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))
