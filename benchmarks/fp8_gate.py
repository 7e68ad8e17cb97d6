"""What the trial of `try-fp8` costs and what fp8 brings: a run with it, and runs without.

    python benchmarks/fp8_gate.py --work mid --rows 3600 --out fp8_gate.jsonl
    python benchmarks/fp8_gate.py --work company --rows 20000 --min-agreement 0.3
    python benchmarks/fp8_gate.py --model demo --rows 2000 --field kv_cache_dtype --only try

On a GPU with random weights at the dimensions of a Llama (gpu.py makes them), so that speed is real
and answers are not: two precisions of random weights agree far less often than those of a trained
model, and the decision is what --min-agreement makes it. `--model demo` is the bundled model with
its own task on a CPU, where vLLM has no fp8 weights but an fp8 KV cache.

Each is a process of its own: `try` is the run with try-fp8, `stored` and `fp8` the same run with
the decision made by hand. trial_s is the whole trial, tried_s of it the fp8 engine's, starts
included; `itself` the share of rows that the stored model answers alike when asked again in another
order, which no precision can be expected to beat.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gpu

MODES = ("try", "stored", "fp8")


def job_of(args: argparse.Namespace, folder: str) -> Any:
    """The job of a mode, its input written."""
    from prefect_raybatch import BatchJob

    more: dict[str, Any] = {}
    if args.mode != "stored":
        more[args.field] = "try-fp8" if args.mode == "try" else "fp8"
    if args.model == "demo":
        value = demo_job(args.rows, folder, args.device)
    else:
        model = gpu.make_model(args.model, Path(args.models))
        value = gpu.job_of(args, model, "auto", folder).to_dict()
    value["engine"] = {**value["engine"], **more}
    value["limits"] = {"min_agreement": args.min_agreement}
    return BatchJob.from_dict(value)


def demo_job(rows: int, folder: str, device: str) -> dict[str, Any]:
    """The bundled model's own task."""
    from prefect_raybatch.demo import LABELS, SYSTEM, TEMPLATE
    from prefect_raybatch.demo.customers import write_customers

    write_customers(f"{folder}/in.csv", rows)
    return {
        "name": "fp8-gate",
        "source": {"uri": f"{folder}/in.csv"},
        "prompt": {"system": SYSTEM, "template": TEMPLATE},
        "sampling": {"max_tokens": 16, "choice": list(LABELS)},
        "engine": {"model": "demo", "device": device, "replicas": 1},
        "output": {"uri": f"{folder}/out", "columns": []},
    }


def one(args: argparse.Namespace) -> dict[str, Any]:
    """A run of a mode: its rates, and what its trial came to."""
    from prefect_raybatch.api import finalize_run, infer_run, plan_run
    from prefect_raybatch.runs.precision import decision_text

    with tempfile.TemporaryDirectory() as folder:
        job = job_of(args, folder)
        gpu.init_ray(**({"num_cpus": 4} if args.device == "cpu" else {}))
        began = time.time()
        run = plan_run(job, "bench")
        progress = infer_run(job, run)
        report = finalize_run(job, run, progress)
        found: dict[str, Any] = {
            "good": report.good,
            "whole_s": time.time() - began,
            "rows_s": report.rows / progress.tally.busy_seconds,
            "steady_rows_s": report.steady_rows_per_s,
            **report.roofline,
        }
        if (note := report.precision) is not None:
            print(decision_text(note), file=sys.stderr)
            for tried in note.tries:
                for row in tried.disagreeing[:5]:
                    print(f"row {row.row}: {row.stored!r} | {row.tried!r}", file=sys.stderr)
            last = note.tries[-1]
            found |= {
                "decided": dict(note.decided) or "stored",
                "sample": last.rows,
                "agreement": last.agreement,
                "bound": last.bound,
                "itself": note.itself,
                "trial_s": note.seconds,
                "tried_s": last.seconds,
                "trial_error": last.error,
            }
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="8b", choices=(*gpu.DIMENSIONS, "demo"))
    parser.add_argument("--device", choices=("cpu", "gpu"), help="by default a CPU for demo alone")
    parser.add_argument("--work", choices=gpu.WORK, default="mid")
    parser.add_argument("--rows", type=int, default=3600)
    parser.add_argument("--field", choices=("quantization", "kv_cache_dtype"))
    parser.add_argument("--min-agreement", type=float, default=0.99)
    parser.add_argument("--only", default=",".join(MODES), help="modes, with commas")
    parser.add_argument("--limit", type=float, default=420, help="seconds a mode may take")
    parser.add_argument("--models", default="/tmp/raybatch-models")
    parser.add_argument("--out", default="fp8_gate.jsonl")
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.field = args.field or "quantization"
    args.device = args.device or ("cpu" if args.model == "demo" else "gpu")
    # what gpu.py's job is made by
    args.gpus, args.tensor_parallel, args.seqs, args.more = 1, 1, 0, None
    args.batched_tokens, args.quantization = 16384, None
    if args.mode:
        print("RESULT", json.dumps(one(args)), flush=True)
        return 0
    failed = 0
    for mode in args.only.split(","):
        given = [
            f"--{n}={getattr(args, n)}"
            for n in ("model", "work", "rows", "field", "models", "device")
        ]
        command = [__file__, *given, f"--min-agreement={args.min_agreement}", f"--mode={mode}"]
        log = Path(args.out).with_name(f"fp8-{args.model}-{args.work}-{mode}.log")
        found = gpu.run_apart(command, log, args.limit)
        failed += "error" in found
        row = {"mode": mode, "model": args.model, "work": args.work, "rows": args.rows, **found}
        with Path(args.out).open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(json.dumps(row)[:1800], flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
