"""What the order of a shard's rows is worth: hit rate of the prefix cache and rows/s, real vLLM.

    python benchmarks/order.py --rows 400 --prefixes 40 --kv-tokens 12000

One engine of the bundled model gets the same rows, PREFIX tokens of one of `--prefixes` shuffled
prefixes and an ending of their own, in three orders, in turns and with an empty cache each time:

  input        as they stand
  sorted       as the engine stage orders them (`stages.order`)
  interleaved  sorted, then dealt out so that the rows of a prefix are `--apart` rows apart: what
               would be right if rows of one step could not share

With `--shard-rows` the rows are those of a run of several shards, one after the other:

  shards       each shard sorted by itself (`engine.order: auto`)
  run          the rows sorted over all shards first, as texts on the disk (`engine.order: run`)

`--kv-tokens` bounds the cache: what the orders differ by is how many prefixes it still holds.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

PREFIX, ENDING, BLOCK = 192, 16, 32  # tokens; vLLM on a CPU takes blocks of 32 and more


def make_prompts(rows: int, prefixes: int) -> list[list[int]]:
    draw = random.Random(7)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(10, 400) for _ in range(count)]

    shared = [tokens(PREFIX) for _ in range(prefixes)]
    return [draw.choice(shared) + tokens(ENDING) for _ in range(rows)]


def orders(
    prompts: list[list[int]], params: dict[str, Any], apart: int, shard: int | None
) -> dict[str, list[int]]:
    import pyarrow as pa

    from prefect_raybatch.stages.order import arrange, token_keys

    keys = token_keys(pa.array(prompts, pa.list_(pa.int32())))
    rows = range(len(prompts))
    began = time.process_time()
    made = arrange(keys, [params] * len(prompts), rows, True, False).rows
    print(f"ordering takes {(time.process_time() - began) / len(prompts) * 1e6:.1f} us a row")
    dealt = [made[i] for start in range(apart) for i in range(start, len(made), apart)]
    if shard is None:
        return {"input": list(rows), "sorted": made, "interleaved": dealt}

    def in_shards(rows: Sequence[int]) -> list[int]:
        cuts = (rows[start : start + shard] for start in range(0, len(rows), shard))
        return [
            row
            for held in cuts
            for row in arrange(keys, [params] * len(prompts), held, True, False).rows
        ]

    return {"input": list(rows), "shards": in_shards(rows), "run": in_shards(over_run(keys))}


def over_run(keys: Sequence[bytes]) -> list[int]:
    """The rows as the plan of `engine.order: run` puts them."""
    import numpy as np
    import pyarrow as pa

    from prefect_raybatch.plan.prefix_order import PrefixOrder, compared_text

    with tempfile.TemporaryDirectory() as folder:
        order = PrefixOrder(Path(folder) / "prompts")
        began = time.process_time()
        order.add(0, pa.array([compared_text(key, keys[0]) for key in keys], pa.binary()))
        rows = np.concatenate(list(order.rows())).tolist()
        seconds = time.process_time() - began
    print(f"ordering over the run takes {seconds / len(keys) * 1e6:.1f} us a row")
    return rows


def measure(engine: Any, requests: Sequence[Any]) -> tuple[float, float]:
    """(rows/s, share of prompt tokens from the cache)"""
    engine._engine.reset_prefix_cache()
    began = time.perf_counter()
    done = engine.run(requests)
    seconds = time.perf_counter() - began
    cached = sum(c.cached_tokens for c in done) / sum(c.prompt_tokens for c in done)
    return len(done) / seconds, cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--prefixes", type=int, default=40)
    parser.add_argument("--apart", type=int, default=32)
    parser.add_argument("--out-tokens", type=int, default=8)
    parser.add_argument("--seqs", type=int, default=32)
    parser.add_argument("--kv-tokens", type=int, default=12_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--shard-rows", type=int, help="rows a shard; default: all are of one")
    args = parser.parse_args()

    from prefect_raybatch import demo
    from prefect_raybatch.stages.vllm.stepper import Request, SteppedEngine

    prompts = make_prompts(args.rows, args.prefixes)
    params = {"temperature": 0.0, "max_tokens": args.out_tokens, "ignore_eos": True}
    ways = orders(prompts, params, args.apart, args.shard_rows)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with SteppedEngine(
        {
            "model": demo.demo_model_path(),
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": args.seqs,
            "max_num_batched_tokens": 4096,
            "enable_prefix_caching": True,
            "block_size": BLOCK,
            "num_gpu_blocks_override": args.kv_tokens // BLOCK,
        }
    ) as engine:
        engine.run([Request(prompt, params) for prompt in prompts[:64]])
        cache = engine._engine.vllm_config.cache_config
        held = cache.num_gpu_blocks * cache.block_size
        print(f"the cache holds {held:,} tokens, of {args.prefixes * PREFIX:,} in prefixes")
        for _ in range(args.repeats):
            for name in ways:
                found[name].append(
                    measure(engine, [Request(prompts[i], params) for i in ways[name]])
                )
    print("| order | prompt tokens from the cache | rows/s |\n| --- | --- | --- |")
    for name, runs in found.items():
        rate, hits = (statistics.median(values) for values in zip(*runs, strict=True))
        print(f"| {name} | {hits:.0%} | {rate:,.0f} |")


if __name__ == "__main__":
    main()
