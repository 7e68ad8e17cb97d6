"""Peers and us side by side on this machine's CPU, with the bundled model.

    python benchmarks/cpu.py [--rows 10000] [--repeats 2] [--json]

The work is the demo's: company name to one of nine labels, greedy, structured choice. Each peer
runs in a process of its own, in turns, `--repeats` times; the table gives medians.

  vllm      the synchronous `LLM.chat` over the whole list
  raydata   `ray.data.llm` as it comes: all its stages on, no checkpoint
  no-commit our stages, receipts dropped: no pieces, no commit records, no Prefect
  quiet     the run's plain functions with commits and nobody watching: no Prefect, no heartbeat
  ours      the flow `batch_inference`: Prefect, pieces, commits, result, report
  resume    a run stopped after 90 % of its shards, then resumed: seconds from the moment the
            engine is ready to the first new shard's entry into it, and to its commit

rows_s is the steady rate. vllm: rows over the time of one call after a warm-up. raydata: between
the 10th and the 90th percentile row. Ours: between the ends of the first and the last shard.
first_row_s is from the start of the process to the first answer (ours: to the first whole shard),
so it holds imports and engine start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

START = time.time()
PEERS = ("vllm", "raydata", "no-commit", "quiet", "ours", "resume")
COLUMNS = ("rows_s", "first_row_s", "total_s")
ENGINE = {"max_model_len": 256, "max_num_seqs": 256, "dtype": "float32"}


def peer_vllm(data: Path, rows: int) -> dict[str, float]:
    from prefect_raybatch.stages.engine import CPU_DEFAULTS

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from prefect_raybatch.demo import LABELS, demo_model_path

    # Its own defaults for processes and threads: that is how it is used.
    shared = {k: v for k, v in CPU_DEFAULTS.items() if k != "distributed_executor_backend"}
    llm = LLM(model=demo_model_path(), **{**shared, **ENGINE})
    choice = StructuredOutputsParams(choice=list(LABELS))
    params = SamplingParams(temperature=0, max_tokens=16, structured_outputs=choice)
    conversations = [messages(name) for name in company_names(data)]
    llm.chat(conversations[:1], params, use_tqdm=False)
    first = time.time() - START
    llm.chat(conversations[:512], params, use_tqdm=False)
    llm.reset_prefix_cache()
    began = time.time()
    llm.chat(conversations[:rows], params, use_tqdm=False)
    seconds = time.time() - began
    return {"rows_s": rows / seconds, "first_row_s": first, "total_s": time.time() - START}


def peer_raydata(data: Path, rows: int) -> dict[str, float]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    from prefect_raybatch.demo import LABELS, demo_model_path

    # Five of its stages hold a CPU each: with fewer it waits for ever.
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    config = vLLMEngineProcessorConfig(
        model_source=demo_model_path(),
        engine_kwargs={"enforce_eager": True, "max_num_batched_tokens": 4096, **ENGINE},
        batch_size=256,
        concurrency=(1, 1),
        log_engine_metrics=False,
        placement_group_config={"bundle_per_worker": {"CPU": 1}},
    )
    sampling = {"temperature": 0, "max_tokens": 16, "structured_outputs": {"choice": list(LABELS)}}
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "messages": messages(row["Company"]),
            "sampling_params": sampling,
            **row,
        },
        postprocess=lambda row: {"at": time.time(), "text": row["generated_text"]},
    )
    dataset = ray.data.read_csv(str(data)).repartition(max(1, rows // 256))
    at = sorted(row["at"] for row in processor(dataset).take_all())
    low, high = int(0.1 * len(at)), int(0.9 * len(at)) - 1
    return {
        "rows_s": (high - low) / (at[high] - at[low]),
        "first_row_s": at[0] - START,
        "total_s": time.time() - START,
    }


def peer_ours(data: Path, rows: int) -> dict[str, float]:
    os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"
    os.environ["PREFECT_LOGGING_LEVEL"] = "ERROR"
    os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
    from prefect_raybatch import batch_inference
    from prefect_raybatch.ledger.ledger import Ledger
    from prefect_raybatch.storage import open_store

    with tempfile.TemporaryDirectory() as out:
        report = batch_inference(job(data, rows, out), run_key="bench")
        ledger = Ledger(open_store(f"{out}/bench"))
        plan = ledger.load_plan()
        if plan is None or report.good != rows:
            raise SystemExit(f"{report.good} of {rows} rows were answered")
        ends = [c.stats.ended for c in ledger.commits(plan, ledger.listing(plan))]
    return {
        "rows_s": report.steady_rows_per_s,
        "first_row_s": min(ends) - START,
        "total_s": time.time() - START,
    }


def peer_no_commit(data: Path, rows: int) -> dict[str, float]:
    from variants import without_commits

    with tempfile.TemporaryDirectory() as out:
        done = without_commits(job(data, rows, out))
    ends = sorted((receipt.stats.ended, receipt.stats.rows) for receipt in done)
    if len(ends) > 1:
        steady = sum(n for _, n in ends[1:]) / (ends[-1][0] - ends[0][0])
    else:  # of a single shard
        steady = rows / (ends[0][0] - done[0].stats.started)
    return {"rows_s": steady, "first_row_s": ends[0][0] - START, "total_s": time.time() - START}


def peer_quiet(data: Path, rows: int) -> dict[str, float]:
    from prefect_raybatch.api import finalize_run, infer_run, plan_run
    from prefect_raybatch.driver import monitor

    class Nobody(monitor.Monitor):
        """In place of the run's monitor: no heartbeat, no look for a stall, no metrics."""

        def __enter__(self) -> Nobody:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def __call__(self, progress: Any) -> None:
            pass

    monitor.Monitor = Nobody  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as out:
        batch = job(data, rows, out)
        run = plan_run(batch, "bench")
        progress = infer_run(batch, run)
        first = min(progress.tally.series.ended) - START
        report = finalize_run(batch, run, progress)
        if report.good != rows:
            raise SystemExit(f"{report.good} of {rows} rows were answered")
    return {
        "rows_s": report.steady_rows_per_s,
        "first_row_s": first,
        "total_s": time.time() - START,
    }


def peer_resume(data: Path, rows: int) -> dict[str, float]:
    from variants import resumed

    with tempfile.TemporaryDirectory() as out:
        batch = job(data, rows, out)
        batch.source.rows_per_shard = max(1, rows // 200)
        found = resumed(batch)
    return {**found, "total_s": found["first_commit_s"]}


def job(data: Path, rows: int, out: str) -> Any:
    from prefect_raybatch import BatchJob
    from prefect_raybatch.demo import LABELS, SYSTEM, TEMPLATE

    return BatchJob.from_dict(
        {
            "name": "bench",
            "source": {"uri": str(data), "limit": rows},
            "prompt": {"system": SYSTEM, "template": TEMPLATE},
            "sampling": {"temperature": 0, "max_tokens": 16, "choice": list(LABELS)},
            "engine": {"model": "demo", **ENGINE},
            "output": {"uri": out},
        }
    )


def messages(company: str) -> list[dict[str, str]]:
    from prefect_raybatch.demo import SYSTEM, TEMPLATE

    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": TEMPLATE.format(Company=company)},
    ]


def company_names(data: Path) -> list[str]:
    import csv

    with data.open(newline="") as stream:
        return [row["Company"] for row in csv.DictReader(stream)]


RUN = {
    "vllm": peer_vllm,
    "raydata": peer_raydata,
    "ours": peer_ours,
    "no-commit": peer_no_commit,
    "quiet": peer_quiet,
    "resume": peer_resume,
}


def measure(peer: str, data: Path, rows: int) -> dict[str, float]:
    """One run of a peer in a fresh process."""
    command = [sys.executable, __file__, "--peer", peer, "--data", str(data), "--rows", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise SystemExit(f"{peer} gave no result:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        print("RESULT", json.dumps(RUN[args.peer](args.data, args.rows)), flush=True)
        return
    from prefect_raybatch.demo.customers import write_customers

    runs: dict[str, list[dict[str, float]]] = {peer: [] for peer in args.peers}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "customers.csv"
        write_customers(data, args.rows)
        for repeat in range(args.repeats):
            for peer in args.peers:
                runs[peer].append(measure(peer, data, args.rows))
                print(f"{repeat + 1}/{args.repeats} {peer}: {runs[peer][-1]}", file=sys.stderr)
    table = {
        peer: {
            name: statistics.median(run[name] for run in found)
            for name in COLUMNS
            if name in found[0]
        }
        for peer, found in runs.items()
    }
    result = {"rows": args.rows, "repeats": args.repeats, "peers": table, **ratios(table)}
    if args.json:
        print(json.dumps(result))
        return
    print(f"{'':10} {'rows/s':>9} {'of vllm':>8} {'first row s':>12} {'total s':>9}")
    base = table.get("vllm", {}).get("rows_s")
    for peer, found in table.items():
        if peer == "resume":
            print(
                f"{peer:10} first new shard in the engine {found['first_row_s']:.1f} s, committed "
                f"{found['total_s']:.1f} s after it was ready"
            )
            continue
        share = f"{found['rows_s'] / base:8.2f}" if base else " " * 8
        print(
            f"{peer:10} {found['rows_s']:9.0f} {share} {found['first_row_s']:12.1f} "
            f"{found['total_s']:9.1f}"
        )
    for name, value in ratios(table).items():
        print(f"{name}: {value}")


def ratios(table: dict[str, dict[str, float]]) -> dict[str, float]:
    """The figures that bars are set on, as far as the peers were run."""
    found = {}
    if {"vllm", "ours"} <= set(table):
        ours, raw = table["ours"], table["vllm"]
        found["ratio_vs_raw_vllm"] = round(ours["rows_s"] / raw["rows_s"], 3)
        found["first_row_after_raw_vllm_s"] = round(ours["first_row_s"] - raw["first_row_s"], 1)
    if {"raydata", "ours"} <= set(table):
        found["ratio_vs_ray_data_llm"] = round(
            table["ours"]["rows_s"] / table["raydata"]["rows_s"], 3
        )
    if {"no-commit", "ours"} <= set(table):
        found["commit_cost"] = round(1 - table["ours"]["rows_s"] / table["no-commit"]["rows_s"], 3)
    if {"quiet", "ours"} <= set(table):
        found["watching_cost"] = round(1 - table["ours"]["rows_s"] / table["quiet"]["rows_s"], 3)
    return found


if __name__ == "__main__":
    main()
