"""Fit the constants of the cost model to measured rates, and say how far the model is off.

    python benchmarks/fit.py [--refit] [--each] [FILE ...]

The rates are those of `benchmarks/sweep.py` (by default `results/sweep-*.jsonl`) and
`results/steady-8b-h200.jsonl`. Whole runs of `benchmarks/gpu.py` are compared; of those in the
files FITTED_RUNS, the steady part is fitted to. With --refit it prints constants that come nearest:
the least squares of the logarithms of rates, and of how busy the GPU was with one engine. --each
prints every point.

At the end it prints, for each kind of work of a sweep, the best arrangement that was measured, the
one that the model takes among those measured, and what that reached of the best.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from gpu import DIMENSIONS

from prefect_raybatch.model.memory import Model, describe
from prefect_raybatch.sizing import cost
from prefect_raybatch.sizing.cards import Card, card
from prefect_raybatch.sizing.cost import Constants, Tokens

RESULTS = Path(__file__).parent / "results"
BUSY_WEIGHT = 0.3  # of the share of time that the GPU was busy, beside the logarithm of a rate
LEAST_WARM = 0.9  # windows that began earlier hold answers that were cut short
SHARES = ("apart", "apart_grammar", "sharing", "compute")  # at most 1
# Of one arrangement; of 8B models, which keep a GPU busy by themselves.
KEPT = ("fp8", "sharing", "apart_grammar")
FITTED_RUNS = ("record-15b", "record-8b")  # files of whole runs of work that no sweep measured
# Until it was as large as the vocabulary, xgrammar searched all unused ids for each token.
SMALL_TOKENIZER = 22e-6


@dataclass(frozen=True)
class Point:
    """A measured rate. `kind` is its work, `fitted` whether constants may be fitted to it."""

    kind: str
    size: str
    card: Card
    row: Tokens
    engines: int
    seqs: float
    arrangement: str
    rate: float
    busy: float | None
    fitted: bool
    small: bool = False
    quantization: str | None = None

    @property
    def model(self) -> Model:
        return model_of(self.size, self.quantization)

    def predicted(self) -> tuple[float, float]:
        """Return (rows/s, share of time that the GPU is busy) by the model."""
        used = cost.FITTED
        if self.small:
            slow = used.host_grammar + SMALL_TOKENIZER
            cost.FITTED = replace(used, host_grammar=slow)
        try:
            rate = cost.rows_per_second(self.model, self.card, self.row, self.engines, self.seqs)
        finally:
            cost.FITTED = used
        gpu = cost.gpu_seconds(self.model, self.card, self.row, self.seqs)
        return rate, min(1.0, rate * gpu / (1.0 if self.engines == 1 else used.sharing))


@cache
def model_of(size: str, quantization: str | None) -> Model:
    given = {} if quantization is None else {"quantization": quantization}
    return describe({**DIMENSIONS[size], "torch_dtype": "bfloat16"}, given)


def points(paths: Sequence[Path]) -> Iterator[Point]:
    for path in paths:
        for line in path.read_text().splitlines():
            found = json.loads(line)
            kind = card(found.get("device", ""))
            if kind is None or found.get("size") not in DIMENSIONS or found.get("mps"):
                continue
            if "arrangement" in found:
                yield from sweep_point(found, kind)
            elif "small_tokenizer" in found:
                yield steady_point(found, kind)
            elif found.get("running") and found.get("gpus") == 1 and found.get("engines_a_gpu"):
                yield run_point(found, kind, path.stem)


def tokens(found: dict[str, Any], cached: float, grammar: str) -> Tokens:
    out = float(found["output_tokens"])
    return Tokens(
        round(cached),
        round(found["prompt_tokens"] - cached),
        max(1, round(out)),
        "",
        grammar,  # type: ignore[arg-type]
        bool(found.get("text")),
        out,
    )


def sweep_point(found: dict[str, Any], kind: Card) -> Iterator[Point]:
    """Yield the point of a line of sweep.py, none for what failed or began too early."""
    # Of a schema's answers no length is known beforehand, so they do not begin as in mid-run.
    by_steps = "by_steps" in found and found["form"] != "json"
    rate = found["by_steps"] if by_steps else found.get("rows_s")
    if not rate or "running" not in found or (by_steps and found["warm"] < LEAST_WARM):
        return
    yield Point(
        kind=found["kind"],
        size=found["size"],
        card=kind,
        row=tokens(found, found["cached_tokens"], found["backend"] if found["form"] else ""),
        engines=int(found["arrangement"].partition("x")[0]),
        seqs=found["running"] if by_steps else found["seqs_step"],
        arrangement=found["arrangement"],
        rate=rate,
        busy=found.get("gpu_busy"),
        fitted=found["fitted"],
    )


def steady_point(found: dict[str, Any], kind: Card) -> Point:
    grammar = "xgrammar" if found["form"] else ""
    row = tokens(found, found["cached_tokens"], grammar)
    name = f"{row.own} in, {row.out} out{', ' + found['form'] if found['form'] else ''}"
    arrangement = f"{found['engines']}x{found['seqs']}"
    return Point(
        *(name, found["size"], kind, row, found["engines"], found["seqs"], arrangement),
        *(found["rows_s"], found.get("gpu_busy"), True, found["small_tokenizer"]),
    )


def run_point(found: dict[str, Any], kind: Card, name: str) -> Point:
    """Return the point of a whole run, head and tail included unless constants are fitted to it."""
    grammar = "xgrammar" if found["work"] in ("company", "record") else ""
    row = tokens(found, found["cached_share"] * found["prompt_tokens"], grammar)
    engines, seqs = found["engines_a_gpu"], found["sequences"]
    small = bool(grammar) and found["date"] < "2026-11-26"
    fitted = name in FITTED_RUNS
    # The model knows no head and no tail: almost a third of a run of 12,000 rows on a 0.5B model.
    rate = found["steady_rows_s"] if fitted else found["rows_s"]
    return Point(
        *(f"run {name}", found["size"], kind, row, engines, seqs, f"{engines}x{seqs:.0f}"),
        *(rate, found.get("gpu"), fitted, small, found.get("quantization")),
    )


def loss(found: Sequence[Point], constants: Constants) -> float:
    """Return the sum of squares that is minimized; sets the constants."""
    cost.FITTED = constants
    total = 0.0
    for point in found:
        rate, busy = point.predicted()
        total += math.log(rate / point.rate) ** 2
        if point.busy is not None and point.engines == 1:
            total += BUSY_WEIGHT * (busy - point.busy) ** 2
    return total


def refit(found: Sequence[Point]) -> Constants:
    """Return the constants nearest to the points, by descent along one of them at a time."""
    names = [field.name for field in fields(Constants) if field.name not in KEPT]
    best, step = cost.FITTED, 0.4
    least = loss(found, best)
    while step > 0.01:
        before = least
        for name in names:
            for factor in (1 - step, 1 + step):
                value = max(getattr(best, name), 1e-7) * factor
                tried = replace(best, **{name: min(value, 1.0) if name in SHARES else value})
                if (now := loss(found, tried)) < least:
                    best, least = tried, now
        if least > before * 0.999:
            step /= 2
    cost.FITTED = best
    return best


def show_errors(found: Sequence[Point], each: bool) -> None:
    """Print how far the model is off, for the points of each kind and size."""
    groups: dict[tuple[bool, str, str], list[float]] = {}
    for point in sorted(found, key=lambda point: (point.kind, point.size, point.arrangement)):
        rate, busy = point.predicted()
        off = rate / point.rate - 1
        groups.setdefault((point.fitted, point.kind, point.size), []).append(off)
        if each:
            seen = "" if point.busy is None else f" GPU busy {point.busy:.2f} ({busy:.2f})"
            print(
                f"{point.kind:28} {point.size:4} {point.arrangement:8} {point.rate:8.1f} "
                f"({rate:8.1f}) {off:+.0%}{seen}"
            )
    for fitted in (True, False):
        all_off = [abs(off) for key, offs in groups.items() if key[0] == fitted for off in offs]
        if all_off:
            what = "fitted to" if fitted else "not fitted to"
            mean, most = sum(all_off) / len(all_off), max(all_off)
            print(f"{len(all_off)} {what}: off by {mean:.1%} in the mean, {most:.0%} at most")


def show_choices(found: Sequence[Point]) -> None:
    """Print the best measured arrangement of each kind beside the model's choice among them."""
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in found:
        if not point.kind.startswith("run "):  # they differ in more than their arrangement
            groups.setdefault((point.size, point.kind), []).append(point)
    for (size, kind), group in sorted(groups.items()):
        if len({point.arrangement for point in group}) > 1:
            best = max(group, key=lambda point: point.rate)
            taken = max(group, key=lambda point: point.predicted()[0])
            one = max((p.rate for p in group if p.engines == 1), default=math.nan)
            print(
                f"{size:4} {kind:28} best {best.arrangement:8} {best.rate:8.1f}, by the model "
                f"{taken.arrangement:8} {taken.rate / best.rate:.2f} of it, "
                f"{taken.rate / one:.2f} of one engine's best"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--refit", action="store_true")
    parser.add_argument("--each", action="store_true")
    args = parser.parse_args()
    found = list(points(args.files or sorted(RESULTS.glob("*.jsonl"))))
    if not found:
        raise SystemExit("no rates in these files; benchmarks/sweep.py measures some")
    if args.refit:
        for name, value in asdict(refit([point for point in found if point.fitted])).items():
            print(f"    {name}={value:.3g},")
    show_errors(found, args.each)
    show_choices(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
