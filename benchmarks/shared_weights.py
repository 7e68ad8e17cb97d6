"""Engines that share one copy of the weights on a GPU, beside one engine and beside a copy each.

    python benchmarks/shared_weights.py --arrangements 1x1024,2x512,2x512+s --out shared.jsonl

An arrangement is engines x max_num_seqs; with `+s` a process of vLLM (`vllm preload`) holds the
weights, and the engines map them (`load_format: ipc_cache`, vLLM 0.30 and later). The model has
the dimensions of the whole Qwen3-30B-A3B and random weights (61 GB). A row has a prompt of 75
shared and 75 own tokens and 24 tokens of answer, as the triage of `gpu.py`; neither tokenizer nor
Ray has a part. All engines begin at the same time, when all are up.

--kv is the GB of KV cache of all engines together: about 9 are left on a card of 80 GB. used_gb is
what the whole arrangement took of the GPU. rows_s is all rows over the time from the common start
to the last row; the second of two series counts. start_s is from the first process to the last
engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gpu

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # an engine answers on its stdout
CONFIG: dict[str, Any] = {
    **gpu.DIMENSIONS["moe"],
    "num_hidden_layers": 48,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SHARED, OWN, OUT = 75, 75, 24  # tokens
WARM_ROWS = 256
# GB that vLLM checks to be free, a holder's weights included; kv_cache_memory_bytes decides.
CARD_GB = 80


def rows(count: int, seed: int) -> list[Any]:
    draw = random.Random(seed)
    begin = [draw.randrange(1000, 100_000) for _ in range(SHARED)]
    own = ([draw.randrange(1000, 100_000) for _ in range(OWN)] for _ in range(count))
    return [{"prompt_token_ids": begin + ids} for ids in own]


def engine(model: str, seqs: int, kv_bytes: int, count: int, seed: int, shared: str) -> None:
    """Starts an engine, then answers the rows once for each line of its input."""
    import torch
    from vllm import LLM, SamplingParams

    memory = torch.cuda.get_device_properties(0).total_memory
    how: dict[str, Any] = {"load_format": "dummy"}
    if shared:
        more = {"fallback": False, "socket_dir": shared}
        how = {"load_format": "ipc_cache", "model_loader_extra_config": more}
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=seqs,
        max_num_batched_tokens=16384,
        gpu_memory_utilization=CARD_GB * 1e9 / memory,
        kv_cache_memory_bytes=kv_bytes,
        disable_log_stats=True,
        **how,
    )
    sampling = SamplingParams(temperature=0, max_tokens=OUT, ignore_eos=True, detokenize=False)
    llm.generate(rows(WARM_ROWS, 99), sampling, use_tqdm=False)
    mine = rows(count, seed)
    print("READY", flush=True)
    for _ in sys.stdin:
        llm.reset_prefix_cache()
        began = time.time()
        done = llm.generate(mine, sampling, use_tqdm=False)
        tokens = sum(len(one.outputs[0].token_ids) for one in done)
        print(json.dumps({"began": began, "ended": time.time(), "tokens": tokens}), flush=True)
    os._exit(0)


def used_gb() -> float:
    import pynvml

    pynvml.nvmlInit()
    return float(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used) / 1e9


def line_of(process: subprocess.Popen[str], text: str) -> str:
    """The next line of a process that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(text):
            return line
    raise RuntimeError(f"a process ended with {process.wait()}")


def measure(arrangement: str, model: str, args: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """The line of one arrangement, whose processes have ended by then."""
    size, _, how = arrangement.partition("+")
    engines, seqs = (int(part) for part in size.split("x"))
    began, processes = time.time(), []
    folder = tempfile.mkdtemp(prefix="weights") if how == "s" else ""

    def start(name: str, command: list[str], **more: Any) -> subprocess.Popen[str]:
        log = (logs / f"{arrangement}-{name}.log").open("w")
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            **more,
        )
        processes.append(process)
        return process

    try:
        if folder:
            told = ["--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "1024"]
            told += ["--model", model, "--weight-cache-socket-dir", folder]
            command = ["-m", "vllm.entrypoints.cli.main", "preload", *told]
            output = (logs / f"{arrangement}-weights.out").open("w")
            start("weights", command, stdout=output)
        count, kv_bytes = args.rows // engines, int(args.kv * 1e9 / engines)
        working = []
        for index in range(engines):
            told = [model, str(seqs), str(kv_bytes), str(count), str(index), folder]
            command = [__file__, "--engine", json.dumps(told)]
            working.append(start(str(index), command, stdout=subprocess.PIPE))
        for process in working:
            line_of(process, "READY")
        started, used, rates = time.time() - began, used_gb(), []
        for _ in range(2):
            for process in working:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            seen = [json.loads(line_of(process, "{")) for process in working]
            took = max(one["ended"] for one in seen) - min(one["began"] for one in seen)
            rates.append(round(count * engines / took, 1))
            assert sum(one["tokens"] for one in seen) == count * engines * OUT
        return {
            "rows_s": rates[-1],
            "series": rates,
            "used_gb": round(used, 1),
            "start_s": round(started),
        }
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arrangements", default="1x1024,2x512+s")
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--kv", type=float, default=9.0, help="GB")
    parser.add_argument("--out", default="shared.jsonl")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        model, seqs, kv, count, seed, shared = json.loads(args.engine)
        engine(model, int(seqs), int(kv), int(count), int(seed), shared)
    import torch

    model = tempfile.mkdtemp(prefix="model")
    (Path(model) / "config.json").write_text(json.dumps(CONFIG))
    logs = Path(args.out).absolute().parent
    machine = {
        "device": f"{torch.cuda.get_device_name()}, {os.cpu_count()} CPUs",
        "versions": f"vLLM {version('vllm')}",
        "date": str(date.today()),
    }
    for arrangement in args.arrangements.split(","):
        line: dict[str, Any] = {"arrangement": arrangement, "rows": args.rows, "kv_gb": args.kv}
        try:
            line |= measure(arrangement, model, args, logs)
        except (RuntimeError, AssertionError) as error:
            line["error"] = str(error)
        print(json.dumps(line), flush=True)
        with Path(args.out).open("a") as out:
            out.write(json.dumps({**line, **machine}) + "\n")
        time.sleep(3)  # the driver gives back the memory of ended processes a moment later


if __name__ == "__main__":
    main()
