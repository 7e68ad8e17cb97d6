"""How probable the model held each label of `sampling.choice`, from the first step of its answer.

With l(label) the logarithm of the probability that the model gives, after the prompt, to the first
token of a label,

    p(label) = exp(l(label)) / sum over all labels of exp(l(other)),

a softmax over the labels alone: the grammar allows no other answer, and what follows the first
token is then certain, so this is exact where no two labels begin with the same token. Whatever is
added to all logarithms alike cancels out, such as what vLLM's mask took from the other tokens; so
do raw logits in place of logarithms. By vLLM's default (`logprobs_mode: raw_logprobs`) they are
those before temperature and penalties.

Labels that share their first token are refused: their probabilities would take further steps, each
after a prompt of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.model.pinned import DEMO, tokenizer_place, with_tokenizer
from prefect_raybatch.stages.block import Tokenizer, load_tokenizer

ANCHOR = "\n"  # behind it a label is cut into tokens as it is at the start of an answer


@dataclass(frozen=True)
class LabelTokens:
    """The labels of a job and the first token of each."""

    labels: tuple[str, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, labels: Sequence[str]) -> LabelTokens:
        """Raises `ConfigError` naming labels that one step cannot tell apart."""
        tokens: dict[int, str] = {}
        for label in labels:
            token = _first_token(tokenizer, label)
            if token in tokens:
                raise ConfigError(
                    f"output.probabilities: the labels {tokens[token]!r} and {label!r} of "
                    "sampling.choice begin "
                    f"with the same token ({_text(tokenizer, token)!r}), so that the first step of "
                    "an answer cannot tell them apart; reword one, such as with a number or letter "
                    "in front, or leave probabilities out"
                )
            tokens[token] = label
        return cls(tuple(labels), tuple(tokens))

    def asked(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling fields that also ask for the logarithms of these tokens."""
        return {**sampling, "logprob_token_ids": list(self.tokens)}

    def probabilities(self, logarithms: Mapping[int, float]) -> list[tuple[str, float]] | None:
        """The probability of each label, 0 of one without a chance; None where none has any."""
        found = [logarithms.get(token, -math.inf) for token in self.tokens]
        most = max(found)
        if not math.isfinite(most):
            return None
        weights = [math.exp(value - most) for value in found]
        total = math.fsum(weights)
        return [(label, w / total) for label, w in zip(self.labels, weights, strict=True)]


def check_labels(job: BatchJob, model: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for labels that one step cannot tell apart, where the tokenizer lies
    here; else the engine says it before its first row."""
    if not job.output.probabilities:
        return
    source = str(model.get("tokenizer") or model["source"])
    if source == DEMO or Path(source).is_dir():
        place = tokenizer_place(with_tokenizer(model, job.engine))
        LabelTokens.of(load_tokenizer(*place), job.sampling.choice or ())


def _first_token(tokenizer: Tokenizer, label: str) -> int:
    """The first token of an answer that is this label."""
    # Behind an anchor, since some tokenizers put a blank in front of every text, which an answer
    # does not begin with and which they leave out again when they decode.
    before, both = _tokens(tokenizer, ANCHOR), _tokens(tokenizer, ANCHOR + label)
    if before and both[: len(before)] == before and len(both) > len(before):
        return both[len(before)]
    alone = _tokens(tokenizer, label)
    text = _text(tokenizer, alone[0]) if alone else ""
    if text and label.startswith(text):
        return alone[0]
    raise ConfigError(
        f"output.probabilities: the model's tokenizer has no token that the label {label!r} of "
        "sampling.choice begins with; reword it, or leave probabilities out"
    )


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _text(tokenizer: Tokenizer, token: int) -> str:
    (text,) = tokenizer.batch_decode([[token]], skip_special_tokens=False)
    return text
