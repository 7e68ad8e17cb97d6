"""Estimates the host and GPU time of a row, and rows per second of engines on one GPU. No I/O.

An engine works in steps. In a step the host (an engine's Python on one core) schedules all
sequences, takes their tokens and, where answers follow a grammar, advances each grammar and fills
its mask; the GPU computes meanwhile, as far as it can. Engines that share a GPU are modelled as a
closed queue with n customers, one server and think time, solved by mean value analysis. GPU time is
the time for FLOPs plus that for bytes. docs/decisions/cost-model.md compares the model with
measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefect_raybatch.model.memory import CACHE_BLOCK, Model
from prefect_raybatch.sizing.cards import Card
from prefect_raybatch.sizing.roofline import work_of
from prefect_raybatch.spec.sizes import Grammar, RowSpec

CHARACTERS = 4  # per token, roughly
# Bytes of a prepared image per token, roughly: Qwen2-VL and similar models make a token of 28 x 28
# pixels in two frames, three colours and bfloat16. Others take 1,200 (PaliGemma) to 24,000 bytes
# (SmolVLM).
IMAGE_TOKEN_BYTES = 28 * 28 * 2 * 3 * 2
MARKUP = 8  # tokens that a chat template adds to a row


@dataclass(frozen=True)
class Constants:
    """Constants of the cost model, in seconds unless another unit is given.

    Host time: `host_step` per step, `host_sequence` per sequence in a step, `host_text` per
    detokenized token, `host_row` per row. Added per sequence in a step: `host_experts` for a
    mixture of experts, `host_grammar` with an xgrammar grammar, `host_guidance` with a guidance
    grammar.

    GPU time: `gpu_step` per step, in addition to FLOPs and bytes. `compute` is the share of a
    card's dense 16-bit FLOPs that is reached; it is multiplied by `fp8` if card and weights are
    fp8. With several engines on a GPU, its speed is multiplied by `sharing`.

    Host and GPU overlap, except for a share of the smaller of their times: `apart`, or
    `apart_grammar` if answers follow a grammar.
    """

    host_step: float
    host_sequence: float
    host_experts: float
    host_grammar: float
    host_guidance: float
    host_text: float
    host_row: float
    apart: float
    apart_grammar: float
    gpu_step: float
    compute: float
    sharing: float
    fp8: float = 1.3  # by one measured arrangement of engines


# By benchmarks/fit.py, of 90 rates in benchmarks/results: sweep-h100.jsonl with vLLM 0.32, and with
# vLLM 0.26 steady-8b-h200.jsonl, steady-h100.jsonl, record-15b.jsonl and record-8b.jsonl. `sharing`
# and `apart_grammar` are those of 8B models, which keep a GPU busy by themselves. No answer was
# detokenized.
FITTED = Constants(
    host_step=7.04e-3,
    host_sequence=36.6e-6,
    host_experts=37.1e-6,
    host_grammar=35.2e-6,
    host_guidance=90.0e-6,
    host_text=0.0,
    host_row=0.363e-3,
    apart=0.0,
    apart_grammar=0.294,
    gpu_step=0.745e-3,
    compute=0.642,
    sharing=0.931,
)


@dataclass(frozen=True)
class Tokens:
    """Estimated tokens of a row's prompt and of its answers.

    `shared` is the prefix that all prompts have in common, `own` the rest of the prompt. `out` is
    the most tokens that all answers to the row together may have, and `why` is the reason for it.
    `mean` is the expected number of answer tokens; 0 says that it equals `out`. `form` is the
    backend of the grammar that answers follow, "" without a grammar. `text` says that vLLM
    detokenizes the answer.
    """

    shared: int
    own: int
    out: int
    why: str
    form: Grammar = ""
    text: bool = False
    mean: float = 0.0

    @classmethod
    def of(cls, row: RowSpec, row_bytes: float) -> Tokens:
        """Estimate the tokens of a row with `row_bytes` bytes in its columns or prepared images."""
        shared = row.shared_characters / CHARACTERS
        own = row_bytes / (IMAGE_TOKEN_BYTES if row.images else CHARACTERS)
        own += row.own_characters / CHARACTERS + MARKUP
        if not row.caches:
            shared, own = 0.0, shared + own
        out, why = row.out, row.out_why
        return cls(round(shared), round(own), out, why, row.form, row.text, row.expected)

    @property
    def expected(self) -> float:
        """Return the expected tokens of all answers to the row."""
        return self.mean or self.out

    @property
    def typical(self) -> int:
        return self.shared + self.own + self.out

    @property
    def cached_once(self) -> int:
        """Return how many shared tokens the KV cache keeps once for all rows: whole blocks only."""
        return self.shared // CACHE_BLOCK * CACHE_BLOCK

    def cached_per_row(self, times: int = 1) -> int:
        """Return the tokens of KV cache that each row takes besides `cached_once`, in whole blocks.

        Counts the row's own prompt and answers, multiplied by `times`. Adds the end of the shared
        prefix that is too short to fill a block.
        """
        own = self.shared - self.cached_once + times * (self.own + self.out)
        return -(-own // CACHE_BLOCK) * CACHE_BLOCK


def gpu_seconds(model: Model, card: Card, row: Tokens, seqs: float) -> float:
    """Return the GPU seconds that a row takes if a step has `seqs` sequences.

    Counts the FLOPs and bytes of the row's uncached tokens. A step also takes a fixed time and
    reads the weights. These are divided among its `seqs` sequences, and each answer token counts
    one such part. A step of a mixture of experts reads all weights, but a token is computed by its
    own experts only.
    """
    out = row.expected
    work = work_of(model, card)
    flops, read = work.of_answer(row.shared + row.own, row.shared, (round(out),))
    read += out * work.weights / seqs
    share = FITTED.compute * (FITTED.fp8 if model.fp8 and card.fp8 else 1.0)
    return flops / (share * card.flops) + read / card.bandwidth + FITTED.gpu_step * out / seqs


def host_seconds(model: Model, row: Tokens, seqs: float) -> float:
    """Return the CPU seconds that a row takes in its engine if a step has `seqs` sequences."""
    grammar = {"": 0.0, "xgrammar": FITTED.host_grammar, "guidance": FITTED.host_guidance}
    each = FITTED.host_sequence + grammar[row.form]
    each += FITTED.host_text if row.text else 0.0
    each += FITTED.host_experts if model.sparse else 0.0
    return FITTED.host_row + row.expected * (each + FITTED.host_step / seqs)


def busy(engines: int, host: float, gpu: float) -> float:
    """Return the share of time (0 to 1) in which a GPU that `engines` engines share is busy.

    Each engine alternates between `host` seconds without the GPU and `gpu` seconds on it.
    """
    waiting = rate = 0.0
    for n in range(1, engines + 1):
        answer = gpu * (1 + waiting)
        rate = n / (host + answer)
        waiting = rate * answer
    return rate * gpu


def engine_seconds(
    model: Model, card: Card, row: Tokens, engines: int, seqs: float
) -> tuple[float, float]:
    """Return the seconds (without the GPU, on it) that a row takes in one of `engines` engines."""
    gpu, host = gpu_seconds(model, card, row, seqs), host_seconds(model, row, seqs)
    apart = FITTED.apart_grammar if row.form else FITTED.apart
    away = max(host, gpu) + apart * min(host, gpu) - gpu
    return away, gpu / FITTED.sharing if engines > 1 else gpu


def rows_per_second(model: Model, card: Card, row: Tokens, engines: int, seqs: float) -> float:
    """Return the rows per second of `engines` engines on one GPU, with `seqs` sequences in each."""
    away, gpu = engine_seconds(model, card, row, engines, seqs)
    return busy(engines, away, gpu) / gpu
