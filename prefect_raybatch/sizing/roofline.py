"""FLOPs and bytes of the tokens that an engine computes, against what its GPUs could do. Pure.

The roofline of Williams, Waterman and Patterson (CACM 52(4), 2009): work is bound by arithmetic or
by memory, and a GPU that is near neither bound waits for something else.

FLOPs of a token: two for each parameter that it goes through (Kaplan et al., arXiv:2001.08361, 2.1)
and, for attention, 4 * layers * heads * head size for each token that it attends to (Chowdhery et
al., arXiv:2204.02311, appendix B: 2N + 4LHQT is its forward pass). Their ratio to the peak is that
paper's model FLOPs utilization, MFU: tokens that the prefix cache gives count for nothing, since
nothing is computed for them, and the output layer counts for sampled tokens alone.

Bytes: the weights once a step and the KV cache that is read and written; their ratio to the peak is
the model bandwidth utilization, MBU, of Databricks ("LLM Inference Performance Engineering: Best
Practices", 2023). Of a mixture of experts all weights count, since a full batch goes through all.
What images take in an encoder of their own is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefect_raybatch.model.memory import Model
from prefect_raybatch.sizing.cards import Card


@dataclass(frozen=True)
class Work:
    """What tokens cost an engine. FLOPs: `layers` a token that is computed, `head` a token that is
    sampled, `attention` for each token that one attends to (`attention_window`: in layers that see
    the last `window` tokens). Bytes: `weights` a step, `kv` a token of KV cache (`kv_window`).
    `peak_flops` and `peak_bytes`: what the engine's share of its GPUs does in a second at most."""

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
        """(FLOPs, bytes without weights) of a prompt of which so many tokens were cached, and of
        its answers of so many tokens each."""
        fresh = max(0, prompt - cached)
        # A prompt's last token gives the first of each answer, whose own last one is computed by
        # none.
        later = [max(0, length - 1) for length in answers]
        seen = _attended(cached, prompt) + sum(_attended(prompt, prompt + n) for n in later)
        windowed = 0.0
        if self.attention_window:
            windowed = _attended(cached, prompt, self.window)
            windowed += sum(_attended(prompt, prompt + n, self.window) for n in later)
        computed = fresh + sum(later)
        flops = self.layers * computed + self.head * sum(answers)
        flops += self.attention * seen + self.attention_window * windowed
        # The cache is written a token, read by each step of an answer, and once for a prompt: a
        # prompt's tokens share what they read.
        read = cached + sum(_attended(prompt, prompt + n) for n in later)
        read_window = min(cached, self.window) + sum(
            _attended(prompt, prompt + n, self.window) for n in later
        )
        return flops, self.kv * (computed + read) + self.kv_window * (computed + read_window)


def _attended(first: int, last: int, window: int = 0) -> float:
    """Tokens that those from `first` (counted from 0) up to `last`, without it, attend to in all:
    each to itself and all before, at most `window` of them (0: any number)."""
    if window and last > window:
        inside = _attended(first, window) if first < window else 0.0
        return inside + (last - max(first, window)) * window
    return (last * (last + 1) - first * (first + 1)) / 2 if last > first else 0.0


def work_of(model: Model, card: Card, gpus: int = 1, engines_per_gpu: int = 1) -> Work:
    """Of an engine on `gpus` of these cards, which it shares with others; of weights in fp8 the
    peak is that of fp8, where the card has it."""
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
