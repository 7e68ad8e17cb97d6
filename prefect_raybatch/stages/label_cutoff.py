"""Stops generating once the label of a `sampling.choice` is unambiguous.

After `label_cap` tokens (the longest common prefix of two labels in bytes, plus one), an answer has
ended or its bytes begin only one label. So `max_tokens` is lowered to this number, and the label is
completed here, from the bytes that the grammar itself assigns to each token, not from decoded text.
The engine generates the same tokens as without this, but stops sooner. Where the uncapped answer
would have been cut off in the middle of a label, the result has the whole label.

With `engine.early_stop: first_token`, only one token is generated at first. If several labels begin
with it, a second request follows: it has that token appended to the prompt, and a choice of the
remaining texts of these labels. Its grammar starts anew, so it allows the same tokens next as the
grammar of the first request would have allowed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from prefect_raybatch.job.early_stop import label_cap, labels_to_cut_short, may_continue_answer
from prefect_raybatch.spec.engine import EarlyStop
from prefect_raybatch.spec.request import SamplingFields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prefect_raybatch.stages.block import Tokenizer
    from prefect_raybatch.stages.vllm.stepper import Completion, Request

log = logging.getLogger(__name__)

SendRequests = Callable[[Sequence["Request"]], list["Completion"]]


@dataclass
class Labels:
    """The labels of one choice; finds the labels that begin with the tokens of an answer.

    `texts` has the labels by their UTF-8 bytes; `known` caches the results of `remaining_bytes`.
    The methods take an answer's token ids, and the bytes of each of the tokenizer's tokens, by id.
    """

    texts: dict[bytes, str]
    known: dict[tuple[int, ...], list[bytes]] = field(default_factory=dict)

    @classmethod
    def of(cls, labels: Sequence[str]) -> Labels:
        return cls({label.encode(): label for label in labels})

    def remaining_bytes(self, tokens: Sequence[int], token_bytes: Sequence[bytes]) -> list[bytes]:
        """Return the remaining bytes of each label that begins with these tokens."""
        key = tuple(tokens)
        if key not in self.known:
            begun = b"".join(token_bytes[token] for token in key)
            self.known[key] = [t[len(begun) :] for t in self.texts if t.startswith(begun)]
        return self.known[key]

    def decided(self, tokens: Sequence[int], token_bytes: Sequence[bytes]) -> str | None:
        """Return the only label that begins with these tokens; None unless there is exactly one."""
        left = self.remaining_bytes(tokens, token_bytes)
        if len(left) != 1:
            return None
        return self.texts[b"".join(token_bytes[token] for token in tokens) + left[0]]

    def ended(self, tokens: Sequence[int], token_bytes: Sequence[bytes]) -> str | None:
        """Return the label that these tokens spell; None if they spell no label.

        The last token, the end token, is ignored.
        """
        return self.texts.get(b"".join(token_bytes[token] for token in tokens[:-1]))


@dataclass(frozen=True)
class Shortened:
    """A request's sampling fields with a lower max_tokens, and the labels of its choice.

    `again`: only one token is generated, and if several labels begin with it, a further request may
    follow. `whole`: the request's own max_tokens is low enough, so nothing was shortened.
    """

    params: SamplingFields
    labels: Labels
    again: bool
    whole: bool


def grammar_bytes(tokenizer: Tokenizer) -> Sequence[bytes] | None:
    """Return the bytes that xgrammar assigns to each token, by id; None if xgrammar fails."""
    try:
        import xgrammar

        return list(
            xgrammar.TokenizerInfo.from_huggingface(
                cast("PreTrainedTokenizerBase", tokenizer)
            ).decoded_vocab
        )
    except Exception as error:  # then answers are generated in full, which costs only time
        log.warning(
            "labels are generated in full, because the bytes of the tokenizer's tokens are "
            "unknown: %s",
            error,
        )
        return None


class LabelCutoff:
    """Stops generating an answer once it can only be one label, and completes the label.

    `way` is the job's engine.early_stop. `token_bytes` returns the bytes that the engine's grammar
    assigns to each token, by token id, or None if they are not available; it is called when they
    are first needed.
    """

    def __init__(self, way: EarlyStop, token_bytes: Callable[[], Sequence[bytes] | None]) -> None:
        self._way = way
        self._make = token_bytes
        self._bytes: Sequence[bytes] | None = None

    def run(self, ask: SendRequests, requests: Sequence[Request]) -> list[Completion]:
        """Send requests with `ask`, some of them shortened; return answers with complete labels."""
        if self._way == "off" or not requests:
            return ask(requests)
        return self._run(ask, requests, self._way == "first_token")

    def _run(self, ask: SendRequests, requests: Sequence[Request], once: bool) -> list[Completion]:
        """Send requests with `ask`; return one answer for each, with its label complete.

        A request for a label is first sent with the lower `max_tokens` of `_shortened`, where
        `once` is explained. If the generated tokens do not decide a label, further requests follow.
        """
        known: dict[int, Shortened | None] = {}
        for request in requests:
            if id(request.params) not in known:
                known[id(request.params)] = self._shortened(request.params, once)
        short = [known[id(request.params)] for request in requests]
        if not any(short) or not self.ready():
            return ask(requests)
        done = ask([self._short(r, s) for r, s in zip(requests, short, strict=True)])
        made = [self._completed(c, s) for c, s in zip(done, short, strict=True)]
        return self._request_undecided(ask, requests, short, done, made)

    def concerns(self, params: SamplingFields) -> bool:
        """Return whether answers to requests with these fields are shortened."""
        return self._way != "off" and labels_to_cut_short(params) is not None

    def ready(self) -> bool:
        """Return whether labels can be completed; the first call may take up to a second."""
        if self._bytes is None and self._way != "off":
            self._bytes = self._make()
            if self._bytes is None:
                self._way = "off"
        return self._bytes is not None

    def _shortened(self, params: SamplingFields, once: bool) -> Shortened | None:
        """Return shortened fields for requests with these `params`, and the labels of their choice.

        `max_tokens` is lowered to `label_cap`. With `once`, it is lowered to 1 instead if a second
        request could ask for the rest of the label (`may_continue_answer`). A `max_tokens` that is
        lower already is kept.

        Returns None if answers to such requests cannot be cut short.
        """
        labels = labels_to_cut_short(params)
        if labels is None:
            return None
        once = once and may_continue_answer(params)
        most = params.get("max_tokens")
        if most is not None and (type(most) is not int or most < 1):
            return None  # vLLM reports the invalid value
        cap = 1 if once else label_cap(labels)
        whole = most is not None and most <= cap
        fields = params if whole else {**params, "max_tokens": cap}
        return Shortened(fields, Labels.of(labels), once and not whole, whole)

    def _short(self, request: Request, short: Shortened | None) -> Request:
        return request if short is None else replace(request, params=short.params)

    def _completed(self, done: Completion, short: Shortened | None) -> Completion | None:
        """Return the answer `done` with its label complete; None if another request must be sent.

        The answer is returned unchanged if `short` is None, if it failed, or if it was not cut off.
        If the tokens of an answer do not decide a label, the result is None. But if the request was
        not shortened (`short.whole`), the answer is returned unchanged in this case too.
        """
        if short is None or done.error or done.finish_reason != "length":
            return done
        reasons = done.finish_reasons or [done.finish_reason] * len(done.token_ids)
        texts = []
        for tokens, reason in zip(done.token_ids, reasons, strict=True):
            find = short.labels.ended if reason == "stop" else short.labels.decided
            text = find(tokens, self._bytes or ())
            if text is None:
                return done if short.whole else None
            texts.append(text)
        ends = done.finish_reasons and ["stop" for _ in reasons]
        return replace(done, texts=texts, finish_reason="stop", finish_reasons=ends)

    def _request_undecided(
        self,
        ask: SendRequests,
        requests: Sequence[Request],
        short: Sequence[Shortened | None],
        done: Sequence[Completion],
        made: list[Completion | None],
    ) -> list[Completion]:
        """Return `made` with each None replaced by an answer from further requests.

        `done` has the answers as the engine returned them. `made` has the same answers with
        complete labels, and None where the tokens did not decide a label. In place of a None, up to
        three requests are tried: one for the rest of the label, one limited to `label_cap` tokens,
        and the original one.
        """
        todo = [i for i, completion in enumerate(made) if completion is None]
        seconds = {i: rest for i in todo if (rest := self._rest(requests[i], short[i], done[i]))}
        if seconds:
            rests = self._run(ask, list(seconds.values()), False)
            for i, second in zip(seconds, rests, strict=True):
                made[i] = self._joined(done[i], second, short[i])
        for again in (True, False):  # up to label_cap; then the original requests
            left = [i for i in todo if made[i] is None and (s := short[i]) and s.again is again]
            anew = [requests[i] for i in left]
            if left:
                answers = self._run(ask, anew, False) if again else ask(anew)
                for i, answer in zip(left, answers, strict=True):
                    made[i] = answer
        return [completion for completion in made if completion is not None]

    def _rest(self, request: Request, short: Shortened | None, done: Completion) -> Request | None:
        """Return the second request, for the rest of a label that begins with `done`'s only token.

        Its `choice` has the remaining text of each label that begins with that token. None if fewer
        than two labels begin with it, if it ends inside a character, if the row has images, or if
        `short.again` is False.
        """
        if short is None or not short.again or request.features is not None:
            return None  # features say where in the prompt the images are
        (tokens,) = done.token_ids
        left = short.labels.remaining_bytes(tokens, self._bytes or ())
        try:
            choice = [text.decode() for text in left]
        except UnicodeDecodeError:  # the token ends inside a character
            return None
        if len(choice) < 2:
            return None
        params = {**request.params, "structured_outputs": None, "choice": choice}
        if isinstance(most := params.get("max_tokens"), int):
            params["max_tokens"] = most - 1
        return replace(
            request, prompt_token_ids=[*request.prompt_token_ids, *tokens], params=params
        )

    def _joined(
        self, first: Completion, second: Completion, short: Shortened | None
    ) -> Completion | None:
        """Join `first`, an answer of one token, and `second`, the rest of the label, to one answer.

        None if `second` failed or was cut off, or if both together spell no label.
        """
        if short is None or second.error or second.finish_reason != "stop":
            return None
        begun = b"".join((self._bytes or ())[token] for token in first.token_ids[0])
        (tokens,) = second.token_ids
        rest = second.texts[0].encode() if second.texts else self._spelt(tokens)
        text = short.labels.texts.get(begun + rest)
        if text is None:
            return None
        ids = [[*first.token_ids[0], *tokens]]
        return replace(first, token_ids=ids, texts=[text], finish_reason="stop")

    def _spelt(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of an answer's tokens without the last one, its end token."""
        return b"".join((self._bytes or ())[token] for token in tokens[:-1])
