"""Cost of a row for an engine and its GPU, and the rate that engines on one GPU reach. Pure.

An engine has one core of Python that works while the GPU does, except for a part of each step in
which the GPU waits for it. Engines that share a GPU are modelled as a closed queue with n
customers, one server and think time, solved by mean value analysis. GPU time is FLOPs and bytes,
one after the other. docs/decisions/cost-model.md gives the sources of the figures and compares them
with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefect_raybatch.model.memory import CACHE_BLOCK, Model
from prefect_raybatch.sizing.cards import Card
from prefect_raybatch.sizing.roofline import work_of
from prefect_raybatch.spec.sizes import RowSpec

# Seconds of Python a row of a short answer on the engine's core: three engines of a 0.5B.
HOST_SECONDS = 0.47e-3
# Of a row, and of each step whatever the rows in it, in which neither works while the other does.
# Where answers have a form, vLLM waits for each token before it knows the next mask: one engine of
# an 8B gave 1,102 rows/s of six tokens with 256 sequences, 1,817 of one token with 1,024.
FORM_SECONDS, FORM_STEP_SECONDS = 0.11e-3, 5.7e-3
PLAIN_SECONDS = 0.03e-3  # a row, where they have none
COMPUTE_SHARE = 0.63  # of a card's dense 16-bit FLOPs, by 50 arrangements on H200s
SHARING = 0.93  # of that speed, where processes take turns at a GPU: 0.92 to 0.95 in four kinds
FP8_GAIN = 1.3  # times that, where card and weights are of fp8: one arrangement
CHARACTERS = 4  # a token, roughly
# Of a prepared image, roughly: 28 x 28 pixels of two frames and three colours in bfloat16, which
# Qwen2-VL and its kin make a token of. Others take 1,200 (PaliGemma) to 24,000 (SmolVLM).
IMAGE_TOKEN_BYTES = 28 * 28 * 2 * 3 * 2
MARKUP = 8  # tokens that a chat template adds to a row


@dataclass(frozen=True)
class Tokens:
    """Estimated tokens of a row: shared prefix, rest of the prompt, and longest answer.

    `out` is None if unknown, with the reason in `why`. `form`: the answer must have a form, such as
    one of several choices.
    """

    shared: int
    own: int
    out: int | None
    why: str
    form: bool = False

    @classmethod
    def of(cls, row: RowSpec, row_bytes: float) -> Tokens:
        """Estimate the tokens of a row with `row_bytes` of input columns or prepared images."""
        shared = row.shared_characters / CHARACTERS
        own = row_bytes / (IMAGE_TOKEN_BYTES if row.images else CHARACTERS)
        own += row.own_characters / CHARACTERS + MARKUP
        if not row.caches:
            shared, own = 0.0, shared + own
        return cls(round(shared), round(own), row.out, row.out_why, row.form)

    @property
    def typical(self) -> int:
        return self.shared + self.own + (self.out or 0)

    @property
    def kept_once(self) -> int:
        """Return the shared tokens that a KV cache keeps once for all rows: whole blocks."""
        return self.shared // CACHE_BLOCK * CACHE_BLOCK

    def kept_each(self, times: int = 1) -> int:
        """Return the tokens of KV cache that each row takes in addition.

        Its own part is `times` as long; the shared prefix has one length.
        """
        own = self.shared - self.kept_once + times * (self.own + (self.out or 0))
        return -(-own // CACHE_BLOCK) * CACHE_BLOCK


def gpu_seconds(model: Model, card: Card, row: Tokens, seqs: int) -> float:
    """Return the seconds that a row takes of the GPU.

    FLOPs and bytes of its tokens that are not cached, and for each token of its answer the weights,
    shared by `seqs` sequences.
    """
    out = row.out or 0
    work = work_of(model, card)
    flops, read = work.of_answer(row.shared + row.own, row.shared, (out,))
    read += out * work.weights / seqs
    share = COMPUTE_SHARE * (FP8_GAIN if model.fp8 and card.fp8 else 1.0)
    return flops / (share * card.flops) + read / card.bandwidth


def busy(engines: int, host: float, gpu: float) -> float:
    """Return the share of time (0 to 1) for which the GPU works for `engines` engines.

    Each spends `host` seconds away from it and then `gpu` seconds on it, in turns.
    """
    waiting = rate = 0.0
    for n in range(1, engines + 1):
        answer = gpu * (1 + waiting)
        rate = n / (host + answer)
        waiting = rate * answer
    return rate * gpu


def rows_per_second(model: Model, card: Card, row: Tokens, engines: int, seqs: int) -> float:
    """Return the steady rate of `engines` on one GPU, each with `seqs` sequences at once."""
    gpu = gpu_seconds(model, card, row, seqs)
    apart = PLAIN_SECONDS
    if row.form:  # a row is in as many steps as its answer has tokens, and shares them
        apart = FORM_SECONDS + FORM_STEP_SECONDS * (row.out or 0) / seqs
    if engines > 1:
        gpu /= SHARING
    return min(busy(engines, apart, gpu) / gpu, engines / HOST_SECONDS)
