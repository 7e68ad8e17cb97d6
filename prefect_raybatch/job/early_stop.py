"""Decides when an answer to `sampling.choice` can be cut short: once only one label is possible.

The grammar of a choice accepts a token only if its bytes continue one of the labels, so each token
of an answer either ends it or adds at least one byte of a label. After

    cap = (bytes of the longest common prefix of two labels) + 1

tokens, an answer has ended, or its bytes occur in only one label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

# Sampling fields beside which an answer may be cut short. Any other may look at later tokens, end
# an answer by itself or change what is written of it.
ALLOWED_BESIDE = frozenset(
    [
        *("temperature", "top_p", "top_k", "min_p", "max_tokens", "n", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("choice", "structured_outputs", "logprob_token_ids", "detokenize"),
        *("skip_special_tokens", "spaces_between_special_tokens"),
    ]
)
# Engine arguments with which more than the grammar decides the tokens of an answer.
NOT_BESIDE = ("reasoning_parser", "logits_processors", "speculative_config")
# Penalties, and their neutral values: a second request would not count the first one's tokens.
PENALTIES = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}


def may_stop_early(arguments: Mapping[str, Any]) -> bool:
    """Return whether answers may be cut short in an engine with these vLLM arguments.

    This needs xgrammar's grammar (backend auto or xgrammar). None of the arguments in NOT_BESIDE
    may be set, because they could also decide which tokens are allowed.
    """
    forms = arguments.get("structured_outputs_config") or {}
    backend = forms.get("backend") if isinstance(forms, Mapping) else str(forms)
    backend = arguments.get("guided_decoding_backend") or backend or "auto"
    return backend in ("auto", "xgrammar") and not any(arguments.get(n) for n in NOT_BESIDE)


def labels_to_cut_short(fields: Mapping[str, Any]) -> Sequence[str] | None:
    """Return the labels of a request whose answer may be cut short once only one label is possible.

    `fields` are the request's sampling fields. Returns None if they do not ask for a label, or if
    another field needs the whole answer.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    labels = _labels(given)
    if labels is None or not given.keys() <= ALLOWED_BESIDE:
        return None
    if given.get("skip_special_tokens", True) is not True or given.get("detokenize"):
        return None
    return labels


def may_continue_answer(fields: Mapping[str, Any]) -> bool:
    """Return whether a second request could continue an answer that was cut short.

    `fields` are the request's sampling fields. False with several answers, a seed or penalties.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if given.get("n", 1) != 1 or "seed" in given:
        return False
    return all(given.get(name, no) == no for name, no in PENALTIES.items())


def label_cap(labels: Sequence[str]) -> int:
    """Return a number of tokens after which an answer has ended or fits only one of the labels.

    It is an upper bound that holds for every tokenizer; often fewer tokens are enough.
    """
    texts = sorted({label.encode() for label in labels})
    return 1 + max((_shared(one, other) for one, other in pairwise(texts)), default=0)


def _shared(one: bytes, other: bytes) -> int:
    """Return the length in bytes of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def choice_of(given: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the allowed answers in a request's sampling fields; None if these do not list any.

    They are in `choice` or `structured_outputs.choice`.
    """
    form = given.get("structured_outputs")
    in_form = form.get("choice") if isinstance(form, Mapping) else None
    return given.get("choice") or in_form


def _labels(given: Mapping[str, Any]) -> Sequence[str] | None:
    """Return the labels in a request's sampling fields, or None.

    Returns None if the fields list no labels, if another structured output constrains the answer,
    or if a label is no text.
    """
    form = given.get("structured_outputs")
    if form is not None and not (isinstance(form, Mapping) and set(form) == {"choice"}):
        return None
    labels = choice_of(given)
    whole = isinstance(labels, list | tuple) and all(isinstance(label, str) for label in labels)
    return labels if labels and whole else None
