"""Whole times of short runs by the command line, beside a plain script with vLLM's `LLM`.

    python benchmarks/whole_time.py --works mid:8b:2000,company:8b:20000,short:bert:40000 --runs 3

A work is KIND:SIZE:ROWS, with kinds and sizes as in `gpu.py`, or of `pooling.py` for `short` and
`long`. The input is a Parquet file. Ours is `raybatch run job.yaml --no-prefect` with all sizes as
the package chooses them. The plain script reads the file, calls `LLM.chat` or `LLM.embed` once with
vLLM's default sizes, and writes the answers to a Parquet file. Both run with
VLLM_USE_FLASHINFER_SAMPLER=0, as in `gpu.py`. They take turns, in the order ours, plain, plain,
ours, and so on. The first turn may find empty caches, so it is marked and does not count. With
--cold, each run finds empty caches, since it gets a home folder of its own.

Prints and appends to --out one JSON object a run: `last_row_s`, seconds from the start of the
process until the last answer is there (ours: its shard's files are written), `whole_s` until the
process has ended, and for ours the phases of the start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import gpu
import pooling

POOLED = ("short", "long")
LIMIT = 900  # seconds of one run


def plain(folder: Path) -> None:
    """The script that people write: read, ask, write."""
    import pyarrow.parquet as pq
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    told = json.loads((folder / "plain.json").read_text())
    table = pq.read_table(folder / "in.parquet")
    texts = table["text"].to_pylist()
    llm = LLM(disable_log_stats=True, **told["engine"])
    if (fields := told["sampling"]) is None:
        answers = [one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)]
    else:
        if "structured_outputs" in fields:
            fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
        talks = [gpu.messages(text) for text in texts]
        done = llm.chat(talks, SamplingParams(**fields), use_tqdm=False)
        answers = [one.outputs[0].text for one in done]
    last = time.time()
    pq.write_table(table.append_column("answer", [answers]), folder / "plain.parquet")
    print("LAST", last)


def prepare(work: str, size: str, count: int, folder: Path, args: argparse.Namespace) -> None:
    """Write the input, `job.yaml` for ours and `plain.json` for the plain script."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import yaml

    models = Path(args.models)
    engine: dict[str, Any] = {"load_format": "dummy"}
    if work in POOLED:
        engine["model"] = pooling.make_embedding_model(size, models)
        rows: list[dict[str, Any]] = list(pooling.make_rows(engine["model"], work, count))
        told = {"engine": {**engine, "runner": "pooling"}, "sampling": None}
        engine["task"], sampling, prompt = "embed", {}, {"template": "{text}"}
    else:
        length = gpu.LENGTH.get(work, 1024)
        engine |= {"model": gpu.make_model(size, models), "max_model_len": length}
        rows = gpu.make_rows(work, count)
        sampling = gpu.sampling_of(work, gpu.OUT.get(work, 0))
        prompt = {"system": gpu.SYSTEM, "template": "{text}"}
        told = {"engine": engine, "sampling": sampling}
    if not args.gpus:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        told["engine"] = {**told["engine"], **pooling.on_cpu(args)}
        engine = {**engine, "device": "cpu"}
    pq.write_table(pa.Table.from_pylist(rows), folder / "in.parquet")
    job = {
        "name": "whole-time",
        "source": {"uri": str(folder / "in.parquet")},
        "prompt": prompt,
        "sampling": sampling,
        "engine": engine,
        "output": {"uri": str(folder / "out"), "columns": []},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    (folder / "plain.json").write_text(json.dumps(told))


CACHES = (
    *("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"),
    *("TRITON_CACHE_DIR", "TRITON_HOME"),
)


def run(peer: str, number: int, folder: Path, cold: bool) -> dict[str, Any]:
    """Run a peer once in a process of its own; return its seconds."""
    env = dict(os.environ)
    if cold:
        env = {name: value for name, value in env.items() if name not in CACHES}
        env |= {
            "HOME": tempfile.mkdtemp(dir=folder),
            "TMPDIR": tempfile.mkdtemp(prefix="t", dir=folder),
        }
    key = f"run{number}"
    command = {
        "plain": [__file__, "--plain", str(folder)],
        "ours": [
            *("-m", "prefect_raybatch.cli", "run", str(folder / "job.yaml")),
            *("--run-key", key, "--no-prefect"),
        ],
    }[peer]
    log = folder / f"{peer}{number}.log"
    began = time.time()
    with log.open("w") as stream:
        child = subprocess.Popen(
            [sys.executable, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(LIMIT)
            whole = time.time() - began
        finally:
            gpu.end_all(child)
    text = log.read_text(errors="replace")
    if code:
        return {"error": text[-1500:]}
    if peer == "plain":
        last = next(float(line.split()[1]) for line in text.splitlines() if line[:5] == "LAST ")
        return {"last_row_s": round(last - began, 2), "whole_s": round(whole, 2)}
    (report,) = (folder / "out" / key).rglob("report.json")
    (start,) = json.loads(report.read_text())["starts"]
    phases = {f"start_{name}": value for name, value in start["seconds"].items()}
    return {**ends(folder / "out" / key, began), "whole_s": round(whole, 2), **phases}


def ends(place: Path, began: float) -> dict[str, float]:
    """Seconds from `began` to the end of the first and of the last shard of a run."""
    from prefect_raybatch.ledger.ledger import Ledger
    from prefect_raybatch.storage import open_store

    ledger = Ledger(open_store(str(place)))
    plan = ledger.load_plan()
    assert plan is not None
    times = [commit.stats.ended - began for commit in ledger.every_commit(plan)]
    return {"first_row_s": round(min(times), 2), "last_row_s": round(max(times), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", default="mid:8b:2000,company:8b:20000,short:bert:40000")
    parser.add_argument("--runs", type=int, default=3, help="of each peer that count")
    parser.add_argument("--cold", action="store_true", help="each run finds empty caches")
    parser.add_argument("--gpus", type=int, default=1, help="0: on the CPU")
    parser.add_argument("--models", default="/tmp/raybatch-models")
    parser.add_argument("--out", type=Path, default=Path("whole-time.jsonl"))
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain is not None:
        plain(args.plain)
        return
    for work, size, count in (one.split(":") for one in args.works.split(",")):
        with tempfile.TemporaryDirectory(prefix="wt-", dir="/tmp") as folder:
            prepare(work, size, int(count), Path(folder), args)
            measure((work, size, int(count)), Path(folder), args)


def measure(work: tuple[str, str, int], folder: Path, args: argparse.Namespace) -> None:
    """Run both peers by turns; print each run and the ratio of the medians that count."""
    counted: dict[str, list[float]] = {"plain": [], "ours": []}
    for turn in range(args.cold, args.runs + 1):
        for peer in ("plain", "ours") if turn % 2 else ("ours", "plain"):
            said = dict(zip(("work", "size", "rows"), work, strict=True)) | {"peer": peer}
            device = gpu.device(args.gpus) if args.gpus else f"{os.cpu_count()} CPUs"
            said |= {"turn": turn, "counted": turn > 0, "cold": args.cold, "device": device}
            said |= run(peer, turn, folder, args.cold)
            with args.out.open("a") as out:
                out.write(json.dumps(said) + "\n")
            print(json.dumps(said), flush=True)
            if "error" in said:
                raise SystemExit(f"{peer} failed")
            if turn:
                counted[peer].append(said["last_row_s"])
    if all(counted.values()):
        theirs, ours = median(counted["plain"]), median(counted["ours"])
        print(f"{':'.join(map(str, work))}: plain {theirs:.1f} s, ours {ours:.1f} s, ", end="")
        print(f"ours / plain {ours / theirs:.2f}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
