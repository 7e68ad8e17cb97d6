"""Peers and us side by side on GPUs, with random weights at real dimensions.

    python benchmarks/gpu.py --sizes 8b,05b --rows 60000 --gpus 1 --out gpu.jsonl
    python benchmarks/gpu.py --work varied --rows 2000 --peers vllm,vllm@none,auto --out gpu.jsonl
    python benchmarks/gpu.py --sizes 70b --gpus 4 --tensor-parallel 4 --quantization fp8 \
        --peers auto

Work, greedy in all cases:
  company    a company's industry from its name: about 104 prompt tokens, one of nine choices
  long       512 tokens out for each of short prompts, end tokens ignored
  varied     the same with 128 to 512 tokens out, another number for each row
  mixed      lognormal lengths, of about 450 prompt tokens and 45 out on average
  prefix     256 prefixes of about 512 tokens, shuffled, with a short ending; 128 tokens out
  record     a JSON record held by a regular expression, from a text of 150 words
  triage     about 150 prompt tokens of which half are shared, 24 tokens out
  mid        about 370 prompt tokens, 64 tokens out
  rag        about 2,000 prompt tokens, 32 tokens out

Weights are random (load_format="dummy") at the dimensions of a Llama of that size,
so speed is real and answers are not. Each peer is a process of its own, one after the other.

  vllm       the synchronous `LLM.chat` over the whole list
  raydata    `ray.data.llm` as its guides configure it: all its stages on, no checkpoint
  raydata3   the same with three engines on a GPU
  ours       plan_run, infer_run, finalize_run with commits on, one engine a GPU; `ours3`:
             three engines a GPU
  auto       the same with all sizes as the package chooses them
  nocommit   the same as `auto` with our stages alone: no pieces, no commits, no result
  resume     `auto` stopped after 90 % of its rows and resumed

With --mps all of them run on CUDA's Multi-Process Service (mps.py), which concerns engines that
share a GPU.

`vllm@512` has another max_num_seqs than --seqs, `vllm@none` what vLLM takes when none is given;
`vllm+3` has max_tokens 3, as far as decides between the choices of the company work; `auto+off` and
`auto+first_token` have that `engine.early_stop`.

`gpu_page.py` makes the page of figures from what --out got.

mfu is the share of the GPUs' peak (16-bit FLOPs of the data sheet; fp8 with --quantization fp8)
that the tokens of the rows take at rows_s, alike for all peers: prompts without what an endless
prefix cache would give, and the tokens that the peer generated. ours also has mfu_seen and the
other shares of its report, which count what its engines really computed, over the whole run.

rows_s is the steady rate. vllm: rows over the time of one call after a warm-up. raydata: between
the 10th and the 90th percentile row. Ours: all rows from the first shard's entry into an engine to
the last shard's end, head and tail included. So none counts engine start. first_row_s is from the
start of the work to the first answer (ours: to the first committed shard), so it holds imports and
engine start. whole_s is from the start of the process to the last row, for ours with the result
written. compile_cache is "empty" before a cold start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zlib import crc32

import mps

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
START = time.time()

CHOICES = [
    "Law Firm",
    "Healthcare",
    "Technology",
    "Retail",
    "Consulting",
    "Manufacturing",
    "Finance",
    "Real Estate",
    "Other",
]
SYSTEM = (
    "You are a helpful assistant that infers company industries. Based on the company name "
    f"provided, output only the industry category. Choose from: {', '.join(CHOICES)}."
)
ASK = "What industry is this company in: {Company}"
DIMENSIONS = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "15b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "moe": {  # half of the layers of Qwen3-30B-A3B
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
    },
    "05b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 32000,
    },
}
# Tokens of an answer, at most.
OUT = {
    "long": 512,
    "varied": 512,
    "mixed": 256,
    "prefix": 128,
    "triage": 24,
    "mid": 64,
    "rag": 32,
}
# One record as JSON text: three words of a list, a number, a flag and a share.
RECORD = (
    r'\{"industry": "(law|health|technology|retail|consulting|finance|other)", '
    r'"size": "(small|medium|large)", "region": "(north|south|east|west)", '
    r'"employees": [1-9][0-9]{0,4}, "public": (true|false), "confidence": 0\.[0-9]{2}\}'
)
RECORD_WORDS, RECORD_TOKENS = 150, 96  # words of a row, and the most tokens of its answer
WORK = ("company", "record", *OUT)
# Words of a row of its own, of about 2.8 tokens each, beside the system message.
OWN_WORDS = {"triage": 20, "mid": 100, "rag": 670}
LENGTH = {"company": 256, "mixed": 2560, "rag": 4096}  # max_model_len, where it is not 1024
WORDS = [
    "Acme",
    "Stone",
    "River",
    "Health",
    "Legal",
    "Tech",
    "Steel",
    "Green",
    "Blue",
    "North",
    "Harbor",
    "Prime",
    "Data",
    "Bio",
    "Capital",
    "Home",
]
# What `auto` is told: the rest is for the package to choose.
CHOSEN = ("load_format", "max_model_len", "quantization", "tensor_parallel_size")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(size: str, root: Path) -> str:
    """Writes a config and a tokenizer; no weights."""
    folder = root / size
    if (folder / "config.json").exists():
        return str(folder)
    from transformers import LlamaConfig, Qwen3MoeConfig

    kind, name = (LlamaConfig, "LlamaForCausalLM")
    if size == "moe":
        kind, name = (Qwen3MoeConfig, "Qwen3MoeForCausalLM")
    tokenizer = kept_tokenizer(DIMENSIONS[size]["vocab_size"], root)
    config = kind(
        max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
        **DIMENSIONS[size],
    )
    config.architectures = [name]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def kept_tokenizer(size: int, root: Path) -> Any:
    """Return a tokenizer of that many tokens, trained once and kept in `root`."""
    from transformers import PreTrainedTokenizerFast

    folder = root / f"tokenizer-{size}"
    if not (folder / "tokenizer.json").exists():
        marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        make_tokenizer(TEMPLATE, marks, size).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


CORPUS_BYTES = 80 << 20


def make_tokenizer(template: str, special: list[str], size: int = 32000) -> Any:
    """Return a tokenizer of exactly `size` tokens, trained on Python files of this environment. A
    turn of a chat ends with <|im_end|>.

    It must be as large as the model's vocabulary where answers follow a grammar: xgrammar lists the
    ids that no token has and searches them for each accepted token, 21 to 28 us instead of 0.8 with
    32,000 tokens in a vocabulary of 128,256.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train(_corpus(Path(torch.__file__).parents[1]), trainer)
    if bpe.get_vocab_size() != size:
        raise SystemExit(f"the corpus gave {bpe.get_vocab_size():,} of {size:,} tokens")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def _corpus(folder: Path) -> list[str]:
    """Return Python files below the folder, of many packages, of `CORPUS_BYTES` in all."""
    paths = sorted(
        folder.rglob("*.py"), key=lambda path: crc32(str(path.relative_to(folder)).encode())
    )
    files, held = [], 0
    for path in paths:
        if held < CORPUS_BYTES:
            files.append(str(path))
            held += path.stat().st_size
    return files


def make_rows(work: str, count: int) -> list[dict[str, Any]]:
    """The input: `text` is the user message, `out` the tokens to generate (0: the choice)."""
    draw = random.Random(7)

    def words(many: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(many))

    if work == "company":
        kinds = ("LLC", "Inc", "Group", "PLC")
        names = (f"{words(2)} {draw.randint(1, 10**6)} {draw.choice(kinds)}" for _ in range(count))
        return [{"text": ASK.format(Company=name), "out": 0} for name in names]
    if work == "record":
        return [
            {"text": f"{draw.randint(1, 10**9)} {words(RECORD_WORDS)}", "out": 0}
            for _ in range(count)
        ]
    if work == "prefix":
        prefixes = [words(180) for _ in range(256)]  # the tokenizer makes about 512 tokens of it
        return [
            {"text": f"{draw.choice(prefixes)} {draw.randint(1, 10**9)} {words(8)}", "out": 128}
            for _ in range(count)
        ]
    if work in OWN_WORDS:
        return [
            {"text": f"{draw.randint(1, 10**9)} {words(OWN_WORDS[work])}", "out": OUT[work]}
            for _ in range(count)
        ]
    if work == "mixed":  # lognormal: about 450 tokens in and 45 out on average

        def long(mean: float, most: int) -> int:
            return min(most, 1 + round(draw.lognormvariate(math.log(mean) - 0.32, 0.8)))

        return [
            {"text": f"{draw.randint(1, 10**9)} {words(long(130, 700))}", "out": long(45, 256)}
            for _ in range(count)
        ]
    least = 128 if work == "varied" else 512
    return [{"text": words(30), "out": draw.randint(least, 512)} for _ in range(count)]


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def sampling_of(work: str, out: int) -> dict[str, Any]:
    if work == "record":
        held = {"structured_outputs": {"regex": RECORD}}
        return {"temperature": 0, "max_tokens": RECORD_TOKENS, **held}
    if not out:
        return {"temperature": 0, "max_tokens": 16, "structured_outputs": {"choice": CHOICES}}
    return {"temperature": 0, "max_tokens": out, "ignore_eos": True}


def ask(row: dict[str, Any]) -> dict[str, Any]:
    """prompt.function of the kinds of work whose sampling differs by row."""
    return {"messages": messages(row["text"]), "sampling": {"max_tokens": row["out"]}}


def engine_arguments(args: argparse.Namespace, engines: int = 1) -> dict[str, Any]:
    shared: dict[str, Any] = {
        "load_format": "dummy",
        "max_model_len": LENGTH.get(args.work, 1024),
        "max_num_batched_tokens": args.batched_tokens,
    }
    if args.seqs:
        shared["max_num_seqs"] = args.seqs
    if args.quantization:
        shared["quantization"] = args.quantization
    if args.tensor_parallel > 1:
        shared["tensor_parallel_size"] = args.tensor_parallel
    if engines > 1:  # engines that share a GPU must not measure its free memory at the same time
        return {**shared, "gpu_memory_utilization": 0.9, "kv_cache_memory_bytes": 12 << 30}
    return {**shared, "gpu_memory_utilization": 0.9}


def peer_vllm(args: argparse.Namespace, model: str) -> dict[str, float]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(model=model, disable_log_stats=True, **engine_arguments(args))
    rows = make_rows(args.work, args.rows)
    made: dict[int, Any] = {}
    for out in {row["out"] for row in rows}:
        fields = sampling_of(args.work, out) | ({"max_tokens": int(args.more)} if args.more else {})
        if "structured_outputs" in fields:
            fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
        made[out] = SamplingParams(**fields)
    params = [made[row["out"]] for row in rows]
    talks = [messages(row["text"]) for row in rows]
    warm = time.time()
    llm.chat(talks[:512], params[:512], use_tqdm=False)
    llm.reset_prefix_cache()
    first = time.time() - START
    began = time.time()
    done = llm.chat(talks, params, use_tqdm=False)
    took = time.time() - began
    tokens = sum(len(answer.token_ids) for one in done for answer in one.outputs)
    return {
        "rows_s": args.rows / took,
        "first_row_s": first,
        "output_tokens": tokens / args.rows,
        "whole_s": began + took - START,
        "warmup_s": began - warm,
    }


def peer_raydata(args: argparse.Namespace, model: str, engines: int = 1) -> dict[str, float]:
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    init_ray()
    rows = make_rows(args.work, args.rows)
    share: dict[str, Any] = {}
    if engines > 1:
        bundle = {"GPU": round(1 / engines - 0.005, 2), "CPU": 1}
        share = {"placement_group_config": {"bundle_per_worker": bundle}}
    count = args.gpus * engines
    config = vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={"disable_log_stats": True, **engine_arguments(args, engines)},
        batch_size=256,
        concurrency=(count, count),
        log_engine_metrics=False,
        **share,
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "messages": messages(row["text"]),
            "sampling_params": sampling_of(args.work, row["out"]),
        },
        postprocess=lambda row: {"at": time.time(), "out": row["num_generated_tokens"]},
    )
    dataset = ray.data.from_items(rows).repartition(128)
    done = processor(dataset).take_all()
    at = sorted(row["at"] for row in done)
    if len(at) != args.rows:
        raise SystemExit(f"{len(at)} of {args.rows} rows came back")
    low, high = int(0.1 * len(at)), int(0.9 * len(at)) - 1
    return {
        "rows_s": (high - low) / (at[high] - at[low]),
        "first_row_s": at[0] - START,
        "whole_s": at[-1] - START,
        "output_tokens": sum(row["out"] for row in done) / args.rows,
    }


def job_of(args: argparse.Namespace, model: str, engines: int | str, folder: str) -> Any:
    """The work as a job of ours, its input written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from prefect_raybatch import BatchJob

    rows = make_rows(args.work, args.rows)
    pq.write_table(pa.Table.from_pylist(rows), f"{folder}/in.parquet")
    own = args.work in OUT
    arguments = engine_arguments(args)
    if engines != 1:  # left to the package
        del arguments["gpu_memory_utilization"]
    if engines == "auto":
        arguments = {name: value for name, value in arguments.items() if name in CHOSEN}
    prompt = {"function": "gpu:ask"} if own else {"system": SYSTEM, "template": "{text}"}
    return BatchJob.from_dict(
        {
            "name": "gpu-benchmark",
            "source": {"uri": f"{folder}/in.parquet"},
            "prompt": prompt,
            "sampling": sampling_of(args.work, OUT[args.work] if own else 0),
            "engine": {
                "model": model,
                "replicas": args.gpus // args.tensor_parallel,
                "engines_per_gpu": engines,
                **({"early_stop": args.more} if args.more else {}),
                **arguments,
            },
            "output": {"uri": f"{folder}/out", "columns": []},
        }
    )


def peer_ours(args: argparse.Namespace, model: str, engines: int | str = 1) -> dict[str, float]:
    from prefect_raybatch.api import finalize_run, infer_run, plan_run

    with tempfile.TemporaryDirectory() as folder:
        job = job_of(args, model, engines, folder)
        run = plan_run(job, "bench")
        progress = infer_run(job, run)
        first = min(progress.tally.series.ended) - START
        began = time.time()
        report = finalize_run(job, run, progress)
        if report.good != args.rows:
            raise SystemExit(f"{report.good} of {args.rows} rows: {report.failures}")
        sums = progress.tally.stats.to_dict()
        return {
            "rows_s": report.rows / progress.tally.busy_seconds,
            "steady_rows_s": report.steady_rows_per_s,
            "first_row_s": first,
            "finalize_s": time.time() - began,
            "whole_s": time.time() - START,
            "shards": report.shards,
            "engines_a_gpu": _packed(job, run),
            "engine_task_s": sums["engine_s"],
            "prepare_task_s": sums["prepare_s"],
            "finish_task_s": sums["finish_s"],
            "prompt_tokens": sums["prompt_tokens"] / args.rows,
            "output_tokens": sums["output_tokens"] / args.rows,
            "cached_share": sums["cached_tokens"] / sums["prompt_tokens"],
            "middle_rows_s": middle(shards_of(progress)),
            "driver_cpu_s": time.process_time(),
            **{f"start_{name}": value for name, value in report.starts[-1].seconds.items()},
            **{("mfu_seen" if n == "mfu" else n): v for n, v in report.roofline.items()},
            **report.figures,
            **{f"node_{name}": value for name, value in report.nodes[0].figures.items()},
        }


def shards_of(progress: Any) -> list[tuple[float, float, int]]:
    """(started, ended, rows) of each shard, as they were committed."""
    started, ended, rows = progress.tally.series.times()
    return list(zip(started.tolist(), ended.tolist(), map(int, rows), strict=True))


def middle(ends: list[tuple[float, float, int]]) -> float:
    """Rows a second of the shards that ended in the middle 70 % of the time: no head, no tail."""
    first, last = min(start for start, _, _ in ends), max(end for _, end, _ in ends)
    low, high = first + 0.15 * (last - first), first + 0.85 * (last - first)
    return sum(rows for _, end, rows in ends if low <= end < high) / (high - low)


def peer_nocommit(args: argparse.Namespace, model: str) -> dict[str, float]:
    from variants import without_commits

    with tempfile.TemporaryDirectory() as folder:
        job = job_of(args, model, "auto", folder)
        init_ray()
        done = [receipt.stats.to_dict() for receipt in without_commits(job)]
    if sum(stats["rows"] for stats in done) != args.rows:
        raise SystemExit("rows are missing")
    began, ended = min(s["started"] for s in done), max(s["ended"] for s in done)
    first = min(s["ended"] for s in done)
    tokens = sum(stats["output_tokens"] for stats in done) / args.rows
    return {
        "rows_s": args.rows / (ended - began),
        "first_row_s": first - START,
        "whole_s": ended - START,
        "output_tokens": tokens,
    }


def peer_resume(args: argparse.Namespace, model: str) -> dict[str, float]:
    from variants import resumed

    with tempfile.TemporaryDirectory() as folder:
        job = job_of(args, model, "auto", folder)
        init_ray()
        return resumed(job)


def _packed(job: Any, run: Any) -> int:
    """Engines on a GPU, as they were chosen."""
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster import sizes as sized
    from prefect_raybatch.compile.job import cluster_spec, size_spec
    from prefect_raybatch.ledger.ledger import Ledger
    from prefect_raybatch.storage import open_store

    ledger = Ledger(open_store(run.uri))
    plan = ledger.load_plan()
    if plan is None:
        raise SystemExit("the plan is gone")
    have = cluster.this_machine(cluster_spec(job))
    return sized.for_attempt(size_spec(job), plan, have).pool.engines_per_gpu


PEERS = {
    "vllm": (peer_vllm, 1),
    "raydata": (peer_raydata, 1),
    "raydata3": (peer_raydata, 3),
    "ours": (peer_ours, 1),
    "ours2": (peer_ours, 2),
    "ours3": (peer_ours, 3),
    "ours4": (peer_ours, 4),
    "ours5": (peer_ours, 5),
    "ours6": (peer_ours, 6),
    "auto": (peer_ours, "auto"),
    "nocommit": (peer_nocommit, 1),
    "resume": (peer_resume, 1),
}


def init_ray(**options: Any) -> None:
    import ray

    names = ("PYTHONPATH", "VLLM_USE_FLASHINFER_SAMPLER", "HF_HUB_OFFLINE", mps.PIPES)
    passed = {name: os.environ[name] for name in names if name in os.environ}
    ray.init(
        include_dashboard=False,
        logging_level="warning",
        log_to_driver=bool(os.environ.get("RAYBATCH_BENCH_LOG")),
        runtime_env={"env_vars": passed},
        **{"num_cpus": len(os.sched_getaffinity(0)), **options},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="8b,05b")
    parser.add_argument("--peers", default="vllm,raydata,raydata3,ours,ours3")
    parser.add_argument("--work", choices=WORK, default="company")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--quantization", help="such as fp8; by default none")
    parser.add_argument("--mps", action="store_true", help="processes compute side by side")
    parser.add_argument("--limit", type=float, default=240, help="seconds a peer may take")
    parser.add_argument("--models", default="/tmp/raybatch-models")
    parser.add_argument("--out", default="gpu.jsonl")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--more", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        run, engines = PEERS[args.peer]
        model = make_model(args.sizes, Path(args.models))
        more = (engines,) if engines != 1 else ()
        print("RESULT", json.dumps(run(args, model, *more)), flush=True)  # type: ignore[operator]
        return 0
    failed = 0
    about = {
        "date": f"{date.today()}",
        "device": device(args.gpus),
        "versions": f"vLLM {version('vllm')}, Ray {version('ray')}",
        "command": f"python benchmarks/gpu.py {' '.join(sys.argv[1:])}",
    }
    for size in args.sizes.split(","):
        make_model(size, Path(args.models))  # here, so that no peer's start counts it
        for peer in args.peers.split(","):
            row = {
                "work": args.work,
                "size": size,
                "peer": peer,
                "rows": args.rows,
                "gpus": args.gpus,
                "tensor_parallel": args.tensor_parallel,
                "quantization": args.quantization,
                **({"mps": True} if args.mps else {}),
                **about,
            }
            row["compile_cache"] = compile_cache()
            with mps.side_by_side(args.mps):
                row |= _run(args, size, peer)
            if row.get("rows_s") and "output_tokens" in row:
                row["mfu"] = round(mfu(args, size, row["rows_s"], row["output_tokens"]), 3)
            failed += "error" in row
            with open(args.out, "a") as out:
                out.write(json.dumps(row) + "\n")
            print(json.dumps(row)[:1500], flush=True)
    return 1 if failed else 0


BLOCK = 16  # tokens that vLLM's prefix cache keeps together


@lru_cache
def prompt_tokens(model: str, work: str, count: int) -> list[tuple[int, int]]:
    """(tokens, those that an endless prefix cache would give) of each prompt, in input order."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    seen: set[int] = set()
    found = []
    for row in make_rows(work, count):
        text = tokenizer.apply_chat_template(
            messages(row["text"]), tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        cached, before, hit = 0, 0, True
        for at in range(0, (len(ids) - 1) // BLOCK * BLOCK, BLOCK):
            before = hash((before, *ids[at : at + BLOCK]))
            hit = hit and before in seen
            cached += BLOCK * hit
            seen.add(before)
        found.append((len(ids), cached))
    return found


def mfu(args: argparse.Namespace, size: str, rows_s: float, out: float) -> float:
    """Model FLOPs utilization at `rows_s` rows of `out` generated tokens (prefect_raybatch's
    sizing/roofline.py, whose docstring names the formulas)."""
    from prefect_raybatch.model.memory import describe
    from prefect_raybatch.nvml import gpus_here
    from prefect_raybatch.sizing.cards import card
    from prefect_raybatch.sizing.roofline import work_of

    folder = make_model(size, Path(args.models))
    config = json.loads((Path(folder) / "config.json").read_text())
    known = card(gpus_here()[0][0].name)
    if known is None:
        return 0.0
    work = work_of(describe(config, {"quantization": args.quantization}), known, args.gpus)
    prompts = prompt_tokens(folder, args.work, args.rows)
    flops = sum(work.of_answer(whole, cached, (round(out),))[0] for whole, cached in prompts)
    return rows_s * flops / len(prompts) / work.peak_flops


def compile_cache() -> str:
    """Return "kept" if vLLM's compile cache holds anything before a peer starts, else "empty"."""
    root = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser()
    folder = root / "torch_compile_cache"
    return "kept" if folder.is_dir() and any(folder.iterdir()) else "empty"


def device(gpus: int) -> str:
    from prefect_raybatch.nvml import gpus_here

    cards, trouble = gpus_here()
    if not cards:
        raise SystemExit(f"no GPU here {trouble}")
    name = cards[0].name
    return f"{f'{gpus} ' if gpus > 1 else ''}{name}, {len(os.sched_getaffinity(0))} CPUs"


def _run(args: argparse.Namespace, size: str, peer: str) -> dict[str, Any]:
    kind, _, more = peer.partition("+")
    kind, _, own = kind.partition("@")
    seqs = 0 if own == "none" else int(own or args.seqs)
    given = [f"--{n}={getattr(args, n)}" for n in ("work", "rows", "gpus", "models")]
    given += [f"--batched-tokens={args.batched_tokens}", f"--seqs={seqs}"]
    given += [f"--sizes={size}", f"--peer={kind}", f"--tensor-parallel={args.tensor_parallel}"]
    given += [f"--quantization={args.quantization}"] if args.quantization else []
    given += [f"--more={more}"] if more else []
    log = Path(args.out).with_name(f"{args.work}-{size}-{args.gpus}-{peer}.log")
    return run_apart([__file__, *given], log, args.limit)


def end_all(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a peer: itself, its Ray, its engines."""
    import psutil

    left: list[Any] = []
    with contextlib.suppress(psutil.Error):
        left = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for one in left:
        with contextlib.suppress(psutil.Error):
            one.kill()


def shown(value: Any) -> Any:
    """A figure to two digits, a share to four; what is none as it is."""
    if not isinstance(value, float):
        return value
    return round(value, 2 if abs(value) >= 1 else 4)


def run_apart(command: list[str], log: Path, limit: float) -> dict[str, Any]:
    """What a peer printed as its RESULT, in a process of its own, or the error."""
    with log.open("w") as stream:
        # In a session of its own: engines that outlive a peer would be measured with the next.
        child = subprocess.Popen(
            [sys.executable, *command],
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            said = log.read_text(errors="replace")[-800:]
            return {"error": f"took over {limit:.0f} s, and said last: {said}"}
        finally:
            end_all(child)
    text = log.read_text(errors="replace")
    for line in text.splitlines():
        if line.startswith("RESULT "):
            found = json.loads(line.removeprefix("RESULT "))
            return {name: shown(value) for name, value in found.items()}
    return {"error": text[-1200:]}


if __name__ == "__main__":
    sys.exit(main())
