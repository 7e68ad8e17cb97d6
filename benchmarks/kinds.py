"""Run every kind of engine once on this machine: what a new vLLM or another GPU must pass.

    python benchmarks/kinds.py --out kinds.jsonl
    python benchmarks/kinds.py --only choice,embed,images --rows 100
    python benchmarks/kinds.py --gpus 2 --only tensor-parallel
    python benchmarks/kinds.py --gpus 0 --only choice,regex --rows 20      # a trial on a CPU

Each kind is a small job from its plan to its result, with random weights at the dimensions of real
models, one after the other on one Ray cluster. A line tells whether all rows came back and how long
the job took, its engine's start included. `preload` checks that importing what the engines' fork
server preloads leaves CUDA alone. `tensor-parallel` needs two GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gpu
import pooling
import vision_models
from photos import write_photos

Fields = dict[str, dict[str, Any]]
SCHEMA = {
    "type": "object",
    "properties": {
        "industry": {"type": "string", "enum": gpu.CHOICES},
        "employees": {"type": "integer", "minimum": 1, "maximum": 99_999},
        "public": {"type": "boolean"},
    },
    "required": ["industry", "employees", "public"],
    "additionalProperties": False,
}
CHECK = """
import prefect_raybatch.stages.vllm.preload, sys, torch
assert "vllm" in sys.modules, "the preload did not import vLLM"
assert not torch.cuda.is_initialized(), "the preload initialised CUDA"
"""


@dataclass(frozen=True)
class Kind:
    """One kind of job: its model's folder, and fields by group beside those that all share."""

    model: Callable[[Path], str]
    fields: Fields = field(default_factory=dict)
    gpus: int = 1


def text(size: str) -> Callable[[Path], str]:
    """Return what makes a generating model of `gpu.DIMENSIONS`."""
    return lambda root: gpu.make_model(size, root)


def encoder(labels: int = 0) -> Callable[[Path], str]:
    """Return what makes a BERT: one that embeds, or a classifier of so many labels."""

    def make(root: Path) -> str:
        source = Path(pooling.make_embedding_model("bert", root))
        if not labels:
            return str(source)
        folder = source.with_name(f"{source.name}-{labels}")
        folder.mkdir(exist_ok=True)
        for path in source.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = ["BertForSequenceClassification"]
        config["id2label"] = {str(i): f"label {i}" for i in range(labels)}
        config["label2id"] = {f"label {i}": i for i in range(labels)}
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return make


def adapted(root: Path) -> str:
    model = gpu.make_model("05b", root)
    pooling.make_adapters(model)
    return model


def vision(root: Path) -> str:
    return vision_models.make_model("qwen2.5-vl-3b", root, tiny=False)


GREEDY = {"temperature": 0, "max_tokens": 32}
FREE: Fields = {"sampling": {**GREEDY, "ignore_eos": True}}
CHOICE = {"temperature": 0, "max_tokens": 16, "choice": gpu.CHOICES}
PLAIN: Fields = {"prompt": {"system": None}, "sampling": {}}  # for models that do not generate
KINDS: dict[str, Kind] = {
    "text": Kind(text("05b"), FREE),
    "choice": Kind(text("05b"), {"sampling": CHOICE}),
    "probabilities": Kind(text("05b"), {"sampling": CHOICE, "output": {"probabilities": True}}),
    "regex": Kind(
        text("05b"),
        {
            "sampling": {
                "temperature": 0,
                "max_tokens": 96,
                "structured_outputs": {"regex": gpu.RECORD},
            }
        },
    ),
    "schema": Kind(
        text("05b"),
        {"sampling": {"temperature": 0, "max_tokens": 96}, "output": {"schema_model": SCHEMA}},
    ),
    "logprobs": Kind(text("05b"), {"sampling": {**GREEDY, "ignore_eos": True, "logprobs": 2}}),
    "adapters": Kind(
        adapted, {**FREE, "engine": {"adapters": {}}, "prompt": {"adapter_column": "adapter"}}
    ),
    "fp8": Kind(text("15b"), {**FREE, "engine": {"quantization": "fp8"}}),
    "three-engines": Kind(text("15b"), {**FREE, "engine": {"engines_per_gpu": 3}}),
    "experts": Kind(text("moe"), FREE),
    "8b": Kind(text("8b"), FREE),
    "tensor-parallel": Kind(text("8b"), {**FREE, "engine": {"tensor_parallel_size": 2}}, gpus=2),
    "embed-causal": Kind(
        lambda root: pooling.make_embedding_model("06b", root),
        {**PLAIN, "engine": {"task": "embed"}},
    ),
    "embed": Kind(encoder(), {**PLAIN, "engine": {"task": "embed"}}),
    "classify": Kind(encoder(3), {**PLAIN, "engine": {"task": "classify"}}),
    "score": Kind(
        encoder(1),
        {
            "prompt": {"system": None, "second": "{text}"},
            "sampling": {},
            "engine": {"task": "score"},
        },
    ),
    "images": Kind(
        vision,
        {
            **FREE,
            "prompt": {"template": "Describe it.", "images": {"columns": ["image"]}},
            "engine": {"max_model_len": 4096},
        },
    ),
}


def job_of(kind: Kind, args: argparse.Namespace, folder: Path) -> Any:
    """Return the kind's job over rows that it writes to the folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from prefect_raybatch import BatchJob

    model = kind.model(Path(args.models))
    given = {
        group: dict(kind.fields.get(group, {}))
        for group in ("prompt", "sampling", "engine", "output")
    }
    if "images" in given["prompt"]:
        uri = str(write_photos(folder / "photos", args.rows))
    else:
        rows = gpu.make_rows("company", args.rows)
        for at, row in enumerate(rows):
            row["adapter"] = pooling.ADAPTERS[at % len(pooling.ADAPTERS)]
        pq.write_table(pa.Table.from_pylist(rows), folder / "in.parquet")
        uri = f"{folder}/in.parquet"
    if "adapters" in given["engine"]:
        given["engine"]["adapters"] = pooling.make_adapters(model)
    prompt = {"system": gpu.SYSTEM, "template": "{text}", **given["prompt"]}
    engine = {
        "model": model,
        "load_format": "dummy",
        "replicas": max(1, args.gpus) // kind.gpus or 1,
    }
    if not args.gpus:
        engine["device"] = "cpu"
    if given["engine"].get("task") is None:
        engine["max_model_len"] = 1024
    return BatchJob.from_dict(
        {
            "name": "kinds",
            "source": {"uri": uri},
            "prompt": {name: value for name, value in prompt.items() if value is not None},
            "sampling": given["sampling"],
            "engine": {**engine, **given["engine"]},
            "output": {"uri": f"{folder}/out", "columns": [], **given["output"]},
        }
    )


def run_kind(kind: Kind, args: argparse.Namespace) -> dict[str, Any]:
    """Run the kind's job; return how many rows were answered and the seconds it took."""
    from prefect_raybatch.api import finalize_run, infer_run, plan_run

    with tempfile.TemporaryDirectory() as folder:
        job = job_of(kind, args, Path(folder))
        began = time.time()
        run = plan_run(job, "kinds")
        report = finalize_run(job, run, infer_run(job, run))
        return {
            "rows": args.rows,
            "answered": report.good,
            "seconds": round(time.time() - began, 1),
            "failures": {reason: count for reason, count in report.failures.items()},
        }


def check_preload() -> dict[str, Any]:
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, check=False, timeout=300
    )
    last = "" if not done.returncode else done.stderr.strip().splitlines()[-1]
    return {"seconds": round(time.time() - began, 1), **({"error": last} if last else {})}


def versions() -> str:
    return f"vLLM {pooling.engine_version()}, torch {version('torch')}, Ray {version('ray')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="kinds, separated by commas; all that the GPUs allow")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--gpus", type=int, default=1, help="0: on the CPU")
    parser.add_argument("--limit", type=float, default=560, help="seconds; then no kind is begun")
    parser.add_argument("--models", default="/tmp/raybatch-models")
    parser.add_argument("--out", default="kinds.jsonl")
    args = parser.parse_args()
    if not args.gpus:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    began, failed = time.time(), []
    device = gpu.device(args.gpus) if args.gpus else f"CPU, {os.cpu_count()} cores"
    about = {"date": f"{date.today()}", "device": device, "versions": versions()}
    fitting = [name for name, kind in KINDS.items() if kind.gpus <= max(1, args.gpus)]
    wanted = args.only.split(",") if args.only else ["preload", *fitting]
    unknown = set(wanted) - {"preload", *KINDS}
    if unknown:
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if set(wanted) - {"preload"}:
        pooling.begin(args)
    for name in wanted:
        if time.time() - began > args.limit:
            print(f"{name}: not begun within {args.limit:g} s")
            failed.append(name)
            continue
        try:
            result = check_preload() if name == "preload" else run_kind(KINDS[name], args)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        passed = not result.get("error") and result.get("answered") == result.get("rows")
        if not passed:
            failed.append(name)
        with open(args.out, "a", encoding="utf-8") as file:
            file.write(json.dumps({**about, "kind": name, "passed": passed, **result}) + "\n")
        print(f"{name}: {'passed' if passed else 'FAILED'} {result}", flush=True)
    with contextlib.suppress(Exception):
        import ray

        ray.shutdown()
    print(
        f"{len(wanted) - len(failed)} of {len(wanted)} kinds passed: {about['versions']}, {device}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
