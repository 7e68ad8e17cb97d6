"""FLOPs and bytes of the tokens that an engine computes, relative to its GPUs' peak. No I/O.

The roofline model (Williams, Waterman and Patterson, CACM 52(4), 2009): work is bound by arithmetic
or by memory, and a GPU that is near neither bound waits for something else.

FLOPs of a token: two for each parameter that it passes through (Kaplan et al., arXiv:2001.08361,
2.1) and, for attention, 4 * layers * heads * head size for each token that it attends to (Chowdhery
et al., arXiv:2204.02311, appendix B: 2N + 4LHQT is its forward pass). The ratio to the peak is that
paper's model FLOPs utilization, MFU. Tokens from the prefix cache count as nothing, because nothing
is computed for them, and the output layer counts for sampled tokens only.

Bytes: the weights once per step, and the KV cache read and written. The ratio to the peak is the
model bandwidth utilization, MBU, of Databricks ("LLM Inference Performance Engineering: Best
Practices", 2023). A mixture of experts counts all its weights, since a full batch uses all of them.
The work of a separate image encoder is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefect_raybatch.model.memory import Model
from prefect_raybatch.sizing.cards import Card


@dataclass(frozen=True)
class Work:
    """The work of an engine, in FLOPs and bytes.

    FLOPs: `layers` per computed token, `head` per sampled token, and `attention` per token attended
    to; `attention_window` is the same for layers that see only the last `window` tokens. Bytes:
    `weights` per step, and `kv` per token of KV cache that is read or written (`kv_window` in those
    layers). `peak_flops` and `peak_bytes` are the most per second that the engine's share of its
    GPUs can do.
    """

    layers: float
    head: float
    attention: float
    attention_window: float
    window: int
    weights: float
    kv: float
    kv_window: float
    peak_flops: float
    peak_bytes: float

    def of_answer(self, prompt: int, cached: int, answers: tuple[int, ...]) -> tuple[float, float]:
        """Return (FLOPs, bytes of KV cache) of one prompt and its answers; weights are not counted.

        `prompt` is its number of tokens, of which `cached` are in the prefix cache; `answers` has
        the number of tokens of each answer.
        """
        fresh = max(0, prompt - cached)
        # A prompt's last token yields the first token of each answer; the last token of an answer
        # is not fed back into the model.
        later = [max(0, length - 1) for length in answers]
        seen = _attended(cached, prompt) + sum(_attended(prompt, prompt + n) for n in later)
        windowed = 0.0
        if self.attention_window:
            windowed = _attended(cached, prompt, self.window)
            windowed += sum(_attended(prompt, prompt + n, self.window) for n in later)
        computed = fresh + sum(later)
        flops = self.layers * computed + self.head * sum(answers)
        flops += self.attention * seen + self.attention_window * windowed
        # The cache is written once per token, and read by each step of an answer and once for a
        # prompt, because a prompt's tokens share the read.
        read = cached + sum(_attended(prompt, prompt + n) for n in later)
        read_window = min(cached, self.window) + sum(
            _attended(prompt, prompt + n, self.window) for n in later
        )
        return flops, self.kv * (computed + read) + self.kv_window * (computed + read_window)


def _attended(first: int, last: int, window: int = 0) -> float:
    """Return the total number of tokens that tokens `first` to `last` - 1 of a text attend to.

    Each attends to itself and to all tokens before it, but to at most `window` tokens (0: no
    limit).
    """
    if window and last > window:
        inside = _attended(first, window) if first < window else 0.0
        return inside + (last - max(first, window)) * window
    return (last * (last + 1) - first * (first + 1)) / 2 if last > first else 0.0


def work_of(model: Model, card: Card, gpus: int = 1, engines_per_gpu: int = 1) -> Work:
    """Return the work of an engine on `gpus` cards that `engines_per_gpu` engines share.

    With fp8 weights, `peak_flops` is the card's fp8 speed if it supports fp8.
    """
    share = gpus / engines_per_gpu
    head = 2.0 * model.vocab * model.hidden
    return Work(
        layers=max(0.0, 2.0 * model.active - head),
        head=head,
        attention=model.attention,
        attention_window=model.attention_window,
        window=model.window,
        weights=float(max(0, model.weights - model.looked_up)),
        kv=float(model.kv_full),
        kv_window=float(model.kv_window),
        peak_flops=card.flops * (2 if model.fp8 and card.fp8 else 1) * share,
        peak_bytes=card.bandwidth * share,
    )
