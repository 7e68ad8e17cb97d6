"""What a row costs an engine and its GPU, and the rate that engines on a GPU reach. Pure.

An engine has one core of Python, which works while the GPU does, up to a part of each step for
which the GPU waits. Engines that share a GPU take turns at it, as clerks share a copier: the
textbook model of a closed queue with n customers, one server and time to think, solved by mean
value analysis. The GPU's time is FLOPs and bytes, one after the other. Where the figures come from,
and how far they agree with what was measured: docs/tuning.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefect_raybatch.job.early_stop import choice_of, label_cap, labels_cut_short, may_ask_rest
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.job.sampling import Sampling
from prefect_raybatch.model.memory import CACHE_BLOCK, Model
from prefect_raybatch.sizing.cards import Card
from prefect_raybatch.sizing.roofline import work_of

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
    """Tokens of a row, estimated before any is seen: those that all prompts begin with, the rest
    of the prompt, and the most that an answer has (None: not known), with the reason. `form`: the
    answer must have a form, such as one of a choice."""

    shared: int
    own: int
    out: int | None
    why: str
    form: bool = False

    @property
    def typical(self) -> int:
        return self.shared + self.own + (self.out or 0)

    @property
    def kept_once(self) -> int:
        """Of those that are shared, what a KV cache keeps once for all rows: whole blocks."""
        return self.shared // CACHE_BLOCK * CACHE_BLOCK

    def kept_each(self, times: int = 1) -> int:
        """Tokens of KV cache that each row takes beside them, of one of which all that is its own
        is `times` as long: what all begin with has one length."""
        own = self.shared - self.kept_once + times * (self.own + (self.out or 0))
        return -(-own // CACHE_BLOCK) * CACHE_BLOCK


FIRST_AND_REST = 2  # tokens of an answer whose first one is asked for: few leave several labels


def tokens(
    prompt: Prompt, sampling: Sampling, row_bytes: float, early: str = "off", caches: bool = True
) -> Tokens:
    """Of a row of `row_bytes` bytes: of input columns, or of its images as they are prepared;
    `early`: how much is asked for of a label (`engine.early_stop`); `caches`: what all prompts
    begin with is computed once, and kept once."""
    first, _, rest = (prompt.template or "").partition("{")
    shared = (len(prompt.system or "") + len(first)) / CHARACTERS
    own = row_bytes / (IMAGE_TOKEN_BYTES if prompt.images.used else CHARACTERS)
    own += len(rest) / CHARACTERS + MARKUP
    if not caches:
        shared, own = 0.0, shared + own
    extra = sampling.model_extra or {}
    form = bool(sampling.choice or extra.get("structured_outputs"))
    return Tokens(round(shared), round(own), *_most_out(prompt, sampling, early), form)


def _most_out(prompt: Prompt, sampling: Sampling, early: str) -> tuple[int | None, str]:
    extra = sampling.model_extra or {}
    given = sampling.given()
    choice = choice_of(given)
    answers = int(extra.get("n") or 1)
    most = sampling.max_tokens
    if choice:
        # Tokens of one character are rare, so that half as many as characters is a safe bound.
        most = min(most, max(len(str(label)) for label in choice) // 2 + 1)
        labels = labels_cut_short(given) if early != "off" else None
        cap = label_cap(labels) if labels else most
        if early == "first_token" and may_ask_rest(given) and min(cap, most) > FIRST_AND_REST:
            return FIRST_AND_REST, "the first token of a choice, and what it leaves open"
        if cap < most:
            return cap * answers, "what decides between the choices"
        return most * answers, "the longest choice"
    if prompt.function:
        return None, "prompt.function may ask for answers of any length"
    return most * answers, "sampling.max_tokens"


def gpu_seconds(model: Model, card: Card, row: Tokens, seqs: int) -> float:
    """The GPU's own time for a row: FLOPs and bytes of its tokens that are not cached, and for each
    token of its answer the weights, shared by `seqs` sequences."""
    out = row.out or 0
    work = work_of(model, card)
    flops, read = work.of_answer(row.shared + row.own, row.shared, (out,))
    read += out * work.weights / seqs
    share = COMPUTE_SHARE * (FP8_GAIN if model.fp8 and card.fp8 else 1.0)
    return flops / (share * card.flops) + read / card.bandwidth


def busy(engines: int, host: float, gpu: float) -> float:
    """Share of its time that the GPU works when so many engines take turns (0 to 1), of which each
    is `host` seconds away from it and then takes `gpu` seconds of it."""
    waiting = rate = 0.0
    for n in range(1, engines + 1):
        answer = gpu * (1 + waiting)
        rate = n / (host + answer)
        waiting = rate * answer
    return rate * gpu


def rows_per_second(model: Model, card: Card, row: Tokens, engines: int, seqs: int) -> float:
    """The steady rate of so many engines on one GPU, each of `seqs` sequences."""
    gpu = gpu_seconds(model, card, row, seqs)
    apart = PLAIN_SECONDS
    if row.form:  # a row is in as many steps as its answer has tokens, and shares them
        apart = FORM_SECONDS + FORM_STEP_SECONDS * (row.out or 0) / seqs
    if engines > 1:
        gpu /= SHARING
    return min(busy(engines, apart, gpu) / gpu, engines / HOST_SECONDS)
