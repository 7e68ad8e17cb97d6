"""Peers and us side by side on captions of photos, on one GPU of one machine.

    python benchmarks/images.py --out images.jsonl                  # all 16 runs, about 40 minutes
    python benchmarks/images.py --answers 32 --sizes 225 --out images.jsonl           # one case
    python benchmarks/images.py --peers ours --rows 20000 --out images.jsonl
    python benchmarks/images.py --answers 32 --sizes 225 --rows 1500,6000 --warm
    python benchmarks/images.py --tiny --rows 48 --answers 8 --peers ours,vllm   # on a CPU, a check

Photos are JPEG files of 640x480 and 1024x768 in Parquet, made here, no two alike. The model has the
dimensions of Qwen2.5-VL-3B-Instruct and random weights (load_format="dummy"), so speed is real and
answers are not; temperature 0.3, end tokens ignored. A case is a number of tokens out and a size of
images: 225x225, bicubic, or `none`, as the files have it. Each peer is a process of its own, one
after the other:

  ours           the job of flows/image_captions.yaml as it comes: plan_run, infer_run, finalize_run
                 (ours@2: with two engines a GPU)
  raydata        `ray.data.llm` as its guide has it: batches of 16, its multimodal stage
  raydata-tuned  the same with what `ours` chose for its engine (else --seqs, --batched-tokens),
                 batches of 64 and four processes in its multimodal stage
  vllm           `LLM.chat` over the whole list, photos decoded before it in the same timed call

Needs vLLM 0.26 or later, Ray 2.60, what prefect_raybatch needs, and for Qwen2.5-VL a torchvision
that fits torch (vLLM's module of it imports it); where there is none, --family idefics3-2b takes
the dimensions of SmolVLM-Instruct.

images_s is the steady rate, as in gpu.py. vllm: rows over the seconds of decoding and of the call,
after a warm-up with other photos. raydata: between the 10th and the 90th percentile row. Ours: all
rows from the first shard's entry into an engine to the last shard's end. gpu is the share of that
time in which the GPU was busy (NVML), cpu that of the machine's cores, memory_gib the most of the
machine's memory in use meanwhile.

Rows of `ray.data.llm` leave its last stage in bursts, so its images_s says little. With two numbers
of rows each peer has a rate that is measured alike: the rows between them over the seconds between
the two runs, process start to last row. --warm has each peer run WARM rows before, for its caches.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gpu

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
START = time.time()
JOB = Path(__file__).parents[1] / "flows" / "image_captions.yaml"
ROWS = {("225", 32): 10_000, ("225", 256): 5000, ("none", 32): 3000, ("none", 256): 3000}
WARM = 64  # photos before the timed call of `vllm`, none of them timed; rows of a warming run
WARMED: set[tuple[str, str, int]] = set()
CHOSEN = ("max_num_seqs", "max_num_batched_tokens")  # of the engine, by `ours`
CPU_ENGINE = {"enforce_eager": True, "dtype": "float32"}
COLUMNS = ("images_s", "gpu", "cpu", "memory_gib", "first_row_s", "prompt_tokens")


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    return {"temperature": 0.3, "max_tokens": args.answer, "ignore_eos": True}


def engine_of(args: argparse.Namespace) -> dict[str, Any]:
    """What every peer's engine is given."""
    given = {"load_format": "dummy", "max_model_len": 8192}
    return {**given, "max_model_len": 2048, **CPU_ENGINE} if args.tiny else given


def prompt_of(prompt: Any, image: Any) -> list[dict[str, Any]]:
    """The messages of the job, with a decoded image."""
    text = {"type": "text", "text": prompt.template}
    parts = [{"type": "image_pil", "image_pil": image}, text]
    return [{"role": "system", "content": prompt.system}, {"role": "user", "content": parts}]


def decoded(data: bytes, size: str) -> Any:
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    side = int(size) if size != "none" else 0
    return image.resize((side, side), Image.Resampling.BICUBIC) if side else image


def job_of(args: argparse.Namespace, model: str, data: str, out: str) -> Any:
    from prefect_raybatch import BatchJob

    job = BatchJob.from_yaml(JOB).to_dict()
    job["source"]["uri"], job["output"]["uri"] = data, out
    side = None if args.size == "none" else [int(args.size)] * 2
    job["prompt"]["images"]["resize"] = side
    job["sampling"] |= sampling_of(args)
    job["engine"] |= {"model": model, **engine_of(args)}
    if "@" in args.peer:
        job["engine"]["engines_per_gpu"] = int(args.peer.partition("@")[2])
    return BatchJob.from_dict(job)


def peer_ours(args: argparse.Namespace, model: str, data: str) -> dict[str, Any]:
    from prefect_raybatch.api import finalize_run, infer_run, plan_run
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster import sizes as sized
    from prefect_raybatch.compile.job import size_spec
    from prefect_raybatch.ledger.ledger import Ledger
    from prefect_raybatch.storage import open_store

    with tempfile.TemporaryDirectory() as folder:
        job = job_of(args, model, data, f"{folder}/out")
        _init_ray(args)
        run = plan_run(job, "bench")
        progress = infer_run(job, run)
        ends = gpu.shards_of(progress)
        report = finalize_run(job, run, progress)
        over = time.time()
        if report.good != args.rows:
            raise SystemExit(f"{report.good} of {args.rows} rows: {report.failures}")
        ledger = Ledger(open_store(run.uri))
        plan = ledger.load_plan()
        if plan is None:
            raise SystemExit("the plan is gone")
        size = sized.for_attempt(size_spec(job), plan, cluster.capacity())
        chosen = size.arguments.vllm()
        sums = progress.tally.stats.to_dict()
        return {
            "images_s": report.rows / progress.tally.busy_seconds,
            "total_s": over - START,
            "window": [min(s for s, _, _ in ends), max(e for _, e, _ in ends)],
            "first_row_s": min(end for _, end, _ in ends) - START,
            "prompt_tokens": sums["prompt_tokens"] / args.rows,
            "output_tokens": sums["output_tokens"] / args.rows,
            "steady_images_s": report.steady_rows_per_s,
            "shards": report.shards,
            "engines": size.pool.engines,
            **{name: sums[name] for name in ("prepare_s", "engine_s", "finish_s")},
            **{name: chosen[name] for name in CHOSEN if name in chosen},
            **report.figures,
        }


def peer_raydata(
    args: argparse.Namespace, model: str, data: str, tuned: bool = False
) -> dict[str, Any]:
    import ray
    from ray.data.llm import (
        PrepareMultimodalStageConfig,
        build_processor,
        vLLMEngineProcessorConfig,
    )

    from prefect_raybatch import BatchJob

    _init_ray(args)
    asked, size, sampling = BatchJob.from_yaml(JOB).prompt, args.size, sampling_of(args)
    engine = engine_of(args) | {"limit_mm_per_prompt": {"image": 1}}
    if tuned:
        engine |= {"max_num_seqs": args.seqs, "max_num_batched_tokens": args.batched_tokens}
    on_cpu: dict[str, Any] = {"placement_group_config": {"bundle_per_worker": {"CPU": 1}}}
    config = vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs=engine,
        batch_size=64 if tuned else 16,
        concurrency=(1, 1) if tuned else 1,
        prepare_multimodal_stage=PrepareMultimodalStageConfig(
            enabled=True, concurrency=(4, 4) if tuned and not args.tiny else None
        ),
        log_engine_metrics=False,
        **(on_cpu if args.tiny else {}),
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "messages": prompt_of(asked, decoded(row["image"]["bytes"], size)),
            "sampling_params": sampling,
        },
        postprocess=lambda row: {
            "at": time.time(),
            "asked": row["num_input_tokens"],
            "out": row["num_generated_tokens"],
        },
    )
    rows = processor(ray.data.read_parquet(data)).take_all()
    over = time.time()
    if len(rows) != args.rows:
        raise SystemExit(f"{len(rows)} of {args.rows} rows came back")
    at = sorted(row["at"] for row in rows)
    low, high = int(0.1 * len(at)), int(0.9 * len(at)) - 1
    return {
        "images_s": (high - low) / (at[high] - at[low]),
        "total_s": over - START,
        "window": [at[low], at[high]],
        "first_row_s": at[0] - START,
        "prompt_tokens": sum(row["asked"] for row in rows) / len(rows),
        "output_tokens": sum(row["out"] for row in rows) / len(rows),
    }


def peer_tuned(args: argparse.Namespace, model: str, data: str) -> dict[str, Any]:
    return peer_raydata(args, model, data, tuned=True)


def peer_vllm(args: argparse.Namespace, model: str, data: str) -> dict[str, Any]:
    import pyarrow.parquet as pq
    from photos import photo
    from vllm import LLM, SamplingParams

    from prefect_raybatch import BatchJob

    asked = BatchJob.from_yaml(JOB).prompt
    limits = {"limit_mm_per_prompt": {"image": 1}}
    llm = LLM(model=model, disable_log_stats=True, **engine_of(args), **limits)
    params = SamplingParams(**sampling_of(args))
    others = range(10**9, 10**9 + min(WARM, args.rows))
    warm = [prompt_of(asked, decoded(photo(n), args.size)) for n in others]
    llm.chat(warm, params, use_tqdm=False)
    files = pq.read_table(data, columns=["image"])["image"].combine_chunks().field("bytes")
    first = time.time() - START
    began = time.time()
    talks = [prompt_of(asked, decoded(one.as_py(), args.size)) for one in files]
    read = time.time()
    answers = llm.chat(talks, params, use_tqdm=False)
    ended = time.time()
    return {
        "images_s": args.rows / (ended - began),
        "total_s": ended - START,
        "window": [began, ended],
        "first_row_s": first,
        "images_s_of_the_call": args.rows / (ended - read),
        "prompt_tokens": sum(len(a.prompt_token_ids) for a in answers) / args.rows,
        "output_tokens": sum(len(a.outputs[0].token_ids) for a in answers) / args.rows,
    }


PEERS = {
    "ours": peer_ours,
    "raydata": peer_raydata,
    "raydata-tuned": peer_tuned,
    "vllm": peer_vllm,
}


def _init_ray(args: argparse.Namespace) -> None:
    import ray

    names = (
        "PYTHONPATH",
        "VLLM_USE_FLASHINFER_SAMPLER",
        "HF_HUB_OFFLINE",
        "VLLM_CPU_KVCACHE_SPACE",
    )
    passed = {name: os.environ[name] for name in names if name in os.environ}
    ray.init(
        num_cpus=10
        if args.tiny
        else None,  # ray.data.llm waits for ever with fewer than its stages
        include_dashboard=False,
        logging_level="warning",
        log_to_driver=bool(os.environ.get("RAYBATCH_BENCH_LOG")),
        runtime_env={"env_vars": passed},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False


class Watch:
    """Samples (time, GPU, CPU, GiB of memory) of this machine while a peer is at work."""

    def __init__(self) -> None:
        import psutil

        from prefect_raybatch.nvml import GpuSampler

        self._use, self._psutil = GpuSampler(), psutil
        self._samples: list[tuple[float, float | None, float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._psutil.cpu_percent()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.5):
            gpu = self._use().get("gpu")
            cpu, memory = self._psutil.cpu_percent() / 100, self._psutil.virtual_memory()
            self._samples.append((time.time(), gpu, cpu, memory.used / 2**30))

    def between(self, began: float, ended: float) -> dict[str, float]:
        found = [s for s in self._samples if began <= s[0] <= ended]
        if not found:
            return {}
        busy = [gpu for _, gpu, _, _ in found if gpu is not None]
        return {
            **({"gpu": sum(busy) / len(busy)} if busy else {}),
            "cpu": sum(cpu for _, _, cpu, _ in found) / len(found),
            "memory_gib": max(memory for *_, memory in found),
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--answers", default="32,256", help="tokens out, a case each")
    parser.add_argument("--sizes", default="225,none", help="side of the images, or none")
    parser.add_argument("--rows", default="", help="a number, or two; by default by the case")
    parser.add_argument("--warm", action="store_true", help=f"each peer runs {WARM} rows before")
    parser.add_argument("--family", default="qwen2.5-vl-3b")
    parser.add_argument("--tiny", action="store_true", help="tiny dimensions on a CPU, for a check")
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--limit", type=float, default=420, help="seconds a peer may take")
    parser.add_argument("--folder", default="/tmp/raybatch-images", help="for models and photos")
    parser.add_argument("--out", default="images.jsonl")
    for name in ("--peer", "--size", "--data"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rows = int(args.rows or 0) if args.peer else args.rows
    from vision_models import FAMILIES, make_model, trouble

    if args.family not in FAMILIES:
        parser.error(f"--family: {', '.join(FAMILIES)}")
    model = make_model(args.family, Path(args.folder), args.tiny)
    if args.peer:
        if args.tiny:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        peer = PEERS[args.peer.partition("@")[0]]
        print("RESULT", json.dumps(peer(args, model, args.data)), flush=True)
        return 0
    if why := trouble(args.family):
        parser.error(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the peer at work too
    found = [row for case in _cases(args) for row in _case(args, *case)]
    _table(found)
    _between(found)
    return 1 if any("error" in row for row in found) else 0


def _cases(args: argparse.Namespace) -> list[tuple[str, int, int]]:
    """(size, tokens out, rows)."""
    wanted = [(s, int(a)) for s in args.sizes.split(",") for a in args.answers.split(",")]
    given = [int(rows) for rows in args.rows.split(",") if rows]
    return [(s, a, rows) for s, a in wanted for rows in given or [ROWS.get((s, a), 3000)]]


def _case(args: argparse.Namespace, size: str, answer: int, rows: int) -> list[dict[str, Any]]:
    from photos import write_photos

    data = write_photos(Path(args.folder) / "photos", rows)
    about = {
        "date": f"{date.today()}",
        "device": _device(args),
        "versions": f"vLLM {_vllm()}, Ray {version('ray')}",
        "command": f"python benchmarks/images.py {' '.join(sys.argv[1:])}",
        "family": f"{args.family}{', tiny' if args.tiny else ''}",
    }
    made: list[dict[str, Any]] = []
    for peer in args.peers.split(","):
        chosen = next((row for row in made if row["peer"] == "ours"), {})
        if args.warm and (peer, size, answer) not in WARMED:
            WARMED.add((peer, size, answer))
            few = write_photos(Path(args.folder) / "photos", WARM)
            _run(
                args, {"peer": peer, "size": size, "answer": answer, "rows": WARM}, f"{few}", chosen
            )
        row = {"peer": peer, "size": size, "answer": answer, "rows": rows, **about}
        row |= _run(args, row, f"{data}", chosen)
        made.append(row)
        with open(args.out, "a") as out:
            out.write(json.dumps(row) + "\n")
        print(json.dumps(row)[:1500], flush=True)
    return made


def _run(
    args: argparse.Namespace, row: dict[str, Any], data: str, chosen: dict[str, Any]
) -> dict[str, Any]:
    """A peer in a process of its own. `chosen`: what `ours` was measured with."""
    given = [f"--{name}={row[name]}" for name in ("peer", "size", "answer", "rows")]
    given += [f"--data={data}", f"--family={args.family}", f"--folder={args.folder}"]
    given.append(f"--seqs={int(chosen.get('max_num_seqs') or args.seqs)}")
    batched = int(chosen.get("max_num_batched_tokens") or args.batched_tokens)
    given.append(f"--batched-tokens={batched}")
    given += ["--tiny"] if args.tiny else []
    log = Path(args.out).with_name(f"images-{row['size']}-{row['answer']}-{row['peer']}.log")
    with log.open("w") as stream, Watch() as watch:
        command = [sys.executable, __file__, *given]
        # In a session of its own: engines that outlive a peer would be measured with the next.
        child = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            child.wait(args.limit)
        except subprocess.TimeoutExpired:
            return {"error": f"took over {args.limit:.0f} s"}
        finally:
            gpu.end_all(child)
    text = log.read_text(errors="replace")
    for line in text.splitlines():
        if line.startswith("RESULT "):
            found = json.loads(line.removeprefix("RESULT "))
            found |= watch.between(*found.pop("window"))
            return {name: round(value, 3) for name, value in found.items()}
    return {"error": text[-1200:]}


def _device(args: argparse.Namespace) -> str:
    if args.tiny:
        return f"no GPU, {os.cpu_count()} CPUs"
    return gpu.device(1)


def _vllm() -> str:
    try:
        return version("vllm")
    except ImportError:
        return version("vllm-cpu")


def _table(rows: list[dict[str, Any]]) -> None:
    """Each case's peers, and how many times as fast as `raydata` they are."""
    print(f"\n{'size':>5} {'out':>4} {'peer':14}", *(f"{n:>13}" for n in COLUMNS), "  of raydata")
    for row in rows:
        start = f"{row['size']:>5} {row['answer']:>4} {row['peer']:14}"
        if "error" in row:
            print(start, "failed:", row["error"].strip().splitlines()[-1][:90])
            continue
        case = (row["size"], row["answer"])
        base = next(
            (r for r in rows if r["peer"] == "raydata" and (r["size"], r["answer"]) == case), {}
        )
        share = f"{row['images_s'] / base['images_s']:12.2f}" if base.get("images_s") else ""
        shown = (f"{row[n]:13.2f}" if n in row else " " * 13 for n in COLUMNS)
        print(start, *shown, share)


def _between(rows: list[dict[str, Any]]) -> None:
    """The rate between two runs of a peer that differ in their number of rows alone."""
    runs: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "total_s" in row:
            runs.setdefault((row["size"], row["answer"], row["peer"]), []).append(row)
    found = {}
    for case, made in runs.items():
        less, more = min(made, key=_rows_of), max(made, key=_rows_of)
        if less is not more and more["total_s"] > less["total_s"]:
            seconds = more["total_s"] - less["total_s"]
            found[case] = (more["rows"] - less["rows"]) / seconds
    for (size, answer, peer), rate in found.items():
        base = found.get((size, answer, "raydata"))
        share = f", {rate / base:.2f} of raydata" if base else ""
        print(f"{size} {answer} {peer}: {rate:.1f} images/s between its two runs{share}")


def _rows_of(row: dict[str, Any]) -> int:
    return int(row["rows"])


if __name__ == "__main__":
    sys.exit(main())
