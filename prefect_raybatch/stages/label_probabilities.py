"""Computes the probability of each label of `sampling.choice` at the tokens where labels diverge.

An answer must be one of the labels, so at each of its tokens the model chooses among those that
continue some label. With l(token) the log probability of a token after the prompt and the answer so
far,

    p(label) = product over the places where labels diverge of
               exp(l(its next token)) / sum over all labels' next tokens of exp(l(other)),

a softmax over the tokens that are allowed there. Where only one token is allowed, its probability
is 1.

This is exact, because a constant that is added to all log probabilities at a place cancels out. So
it does not matter that vLLM's mask removes the probability of all other tokens, nor whether l is a
log probability or a raw logit. By default (`logprobs_mode: raw_logprobs`), vLLM reports log
probabilities before temperature and penalties.

The request for the answer provides the log probabilities of its first token. Each later place takes
one more request for one token. Its prompt ends with the tokens that the labels have in common; the
prompt before them is in the prefix cache. A label that is a prefix of another diverges from it at
the end token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.model.pinned import DEMO, PinnedModel, tokenizer_place, with_arguments
from prefect_raybatch.spec.engine import ModelRequest
from prefect_raybatch.spec.request import SamplingFields
from prefect_raybatch.stages.block import Tokenizer, load_tokenizer

ANCHOR = "\n"  # text after which a label has the same tokens as at the start of an answer


@dataclass(frozen=True)
class Fork:
    """A place where labels diverge: the answer's tokens before it, and the possible next ones."""

    before: tuple[int, ...]
    tokens: tuple[int, ...]

    def shares(self, told: Mapping[int, float]) -> dict[int, float] | None:
        """Return {possible next token: probability}; the probabilities sum to 1.

        `told` has the log probabilities that vLLM reported, by token id. A possible token that was
        not reported has probability 0. None if no possible token was reported.
        """
        found = [told.get(token, -math.inf) for token in self.tokens]
        most = max(found)
        if not math.isfinite(most):
            return None
        weights = [math.exp(value - most) for value in found]
        total = math.fsum(weights)
        return {token: w / total for token, w in zip(self.tokens, weights, strict=True)}


@dataclass(frozen=True)
class LabelTokens:
    """The labels of a job and the tokens of each (`paths`).

    The tokens of a label that is the beginning of another label include the end token.
    """

    labels: tuple[str, ...]
    paths: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, labels: Sequence[str]) -> LabelTokens:
        """Tokenize the labels. Raises `ConfigError` if their probabilities cannot be computed:

        - a label has no tokens;
        - two labels have the same tokens;
        - a label's tokens begin those of another label, and the tokenizer has no end token.
        """
        paths: dict[tuple[int, ...], str] = {}
        for label in labels:
            path = _path(tokenizer, label)
            if path in paths:
                raise ConfigError(
                    f"output.probabilities: the labels {paths[path]!r} and {label!r} of "
                    "sampling.choice have the same tokens, so they cannot be told apart. Reword "
                    "one, or remove output.probabilities"
                )
            paths[path] = label
        ends = {path[:at] for path in paths for at in range(len(path))} & paths.keys()
        if ends and tokenizer.eos_token_id is None:
            raise ConfigError(
                f"output.probabilities: the label {paths[min(ends)]!r} of sampling.choice is the "
                "beginning of another, and the model's tokenizer has no end token to tell them "
                "apart. Reword one, or remove output.probabilities"
            )
        end = tokenizer.eos_token_id
        whole = ((*path, end) if path in ends and end is not None else path for path in paths)
        return cls(tuple(labels), tuple(whole))

    @cached_property
    def forks(self) -> tuple[Fork, ...]:
        """Return the places where labels diverge, sorted by the number of tokens before them."""
        following: dict[tuple[int, ...], dict[int, None]] = {}
        for path in self.paths:
            for at, token in enumerate(path):
                following.setdefault(path[:at], {})[token] = None
        made = [Fork(at, tuple(tokens)) for at, tokens in following.items() if len(tokens) > 1]
        return tuple(sorted(made, key=lambda fork: (len(fork.before), fork.before)))

    @property
    def later(self) -> tuple[Fork, ...]:
        """Return the forks after the first token; each one takes a further request per row."""
        return tuple(fork for fork in self.forks if fork.before)

    def with_logprobs(self, sampling: SamplingFields) -> SamplingFields:
        """Return sampling fields that ask also for log probabilities of the labels' first tokens.

        They are unchanged if all labels have the same first token.
        """
        first = [fork for fork in self.forks if not fork.before]
        return {**sampling, **({"logprob_token_ids": list(first[0].tokens)} if first else {})}

    def further_requests(self, sampling: SamplingFields) -> list[tuple[list[int], SamplingFields]]:
        """Return (tokens to append to the prompt, sampling fields) of each later fork's request."""
        usual = {"temperature": sampling.get("temperature", 0.0), "max_tokens": 1}
        return [
            (list(fork.before), {**usual, "logprob_token_ids": list(fork.tokens)})
            for fork in self.later
        ]

    def probabilities(
        self, first: Mapping[int, float], later: Sequence[Mapping[int, float]] = ()
    ) -> list[tuple[str, float]] | None:
        """Return (label, probability) for each label; None if a fork has no reported token.

        `first` has log probabilities by token id for the answer's first token, `later` has them for
        the token at each later fork, in the order of `self.later`.
        """
        told = dict(zip(self.later, later, strict=True))
        shares: dict[tuple[int, ...], dict[int, float]] = {}
        for fork in self.forks:
            found = fork.shares(told.get(fork, first))
            if found is None:
                return None
            shares[fork.before] = found
        return [
            (label, math.prod(shares[p[:at]][p[at]] for at in range(len(p)) if p[:at] in shares))
            for label, p in zip(self.labels, self.paths, strict=True)
        ]


def check_labels(labels: Sequence[str], model_request: ModelRequest, pinned: PinnedModel) -> None:
    """Raise `ConfigError` for labels that `LabelTokens.of` refuses.

    Does nothing if the tokenizer is not on this machine: then the engine reports such labels before
    its first row.
    """
    if not labels:
        return
    source = str(pinned.get("tokenizer") or pinned["source"])
    if source == DEMO or Path(source).is_dir():
        place = tokenizer_place(with_arguments(pinned, model_request))
        LabelTokens.of(load_tokenizer(*place), labels)


def _path(tokenizer: Tokenizer, label: str) -> tuple[int, ...]:
    """Return the tokens of the answer `label`; raise `ConfigError` for a label without tokens."""
    # Tokenized after an anchor, because some tokenizers put a blank in front of every text. An
    # answer does not begin with that blank, and decoding drops it.
    before, both = _tokens(tokenizer, ANCHOR), _tokens(tokenizer, ANCHOR + label)
    if before and both[: len(before)] == before and len(both) > len(before):
        return tuple(both[len(before) :])
    alone = _tokens(tokenizer, label)
    text = _text(tokenizer, alone[0]) if alone else ""
    if text and label.startswith(text):
        return tuple(alone)
    raise ConfigError(
        "output.probabilities: the model's tokenizer has no token that begins the label "
        f"{label!r} of sampling.choice. Reword it, or remove output.probabilities"
    )


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _text(tokenizer: Tokenizer, token: int) -> str:
    (text,) = tokenizer.batch_decode([[token]], skip_special_tokens=False)
    return text
