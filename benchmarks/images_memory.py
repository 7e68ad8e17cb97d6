"""Memory of a run over many images: of the driver and of each of Ray's workers, as it goes on.

    python benchmarks/images_memory.py --rows 10000
    python benchmarks/images_memory.py --rows 100000 --out images_memory.jsonl
    python benchmarks/images_memory.py --rows 100000 --folder DIR --seconds 400  # and again

With --seconds the run stops there, and the same command goes on with it: a line is then of one
process, which began where the one before had stopped.

Photos are small JPEG files, 1,000 different ones in turns; they are read, decoded, checked, resized
and prepared as for any model (a tiny Idefics3, by vLLM's own code), and travel through Ray's stages
as they do in any run, with commits and the result. The engine alone is not real: it unpickles what
it is given of each image, as vLLM would be handed it, and answers 32 tokens.

Memory is what a process has for itself (resident, without what it shares), looked at twice a
second. A line is a tenth of the run's rows: the most that the driver and the largest worker of each
kind had in it, and all of Ray's processes together; `store` is what Ray's raylet shares, the object
store.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa

DIFFERENT = 1000
SIDES = ((96, 72), (64, 64))
MIB = 2**20


class Answers:
    """In the engine's place: takes each request's features apart, and answers 32 tokens."""

    def __init__(self, spec: Any) -> None:
        pass

    def __call__(self, table: pa.Table) -> pa.Table:
        from prefect_raybatch.stages.block import is_passthrough, timed
        from prefect_raybatch.stages.columns import ERROR, MM, TOKENS
        from prefect_raybatch.stages.engine import answered
        from prefect_raybatch.stages.vllm import multimodal
        from prefect_raybatch.stages.vllm.stepper import Completion

        if is_passthrough(table):
            return table
        began, tokens = time.time(), table[TOKENS].to_pylist()
        _, seen = multimodal.with_image_features([b""] * table.num_rows, table[MM])
        made: list[Any] = []
        for i, error in enumerate(table[ERROR].to_pylist()):
            if error is None:
                given = multimodal.engine_input(tokens[i], seen[i])
                done = Completion([[5] * 32], None, "stop", len(given["prompt_token_ids"]))
                made.append((i, [i], done))
        return timed(answered(table, made, began), "engine", began)


class Watch(threading.Thread):
    """The most memory of each kind of process since the last look."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        import psutil

        self._psutil, self._over = psutil, threading.Event()
        self._most: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._me = psutil.Process()

    def run(self) -> None:
        while not self._over.wait(0.5):
            now: dict[str, float] = defaultdict(float)
            for process in [self._me, *self._me.children(recursive=True)]:
                try:
                    kind = self._kind(process)
                    info = process.memory_info()
                except self._psutil.Error:
                    continue
                own = (info.rss - info.shared) / MIB
                if kind == "raylet":
                    now["store"] = max(now["store"], info.shared / MIB)
                now[kind] = max(now[kind], own)
                now["all"] += own
            with self._lock:
                for kind, value in now.items():
                    self._most[kind] = max(self._most[kind], value)

    def _kind(self, process: Any) -> str:
        if process == self._me:
            return "driver"
        name = " ".join(process.cmdline())
        if "raylet/raylet" in name:
            return "raylet"
        if not name.startswith("ray::"):
            return "other"
        for kind in ("Prepare", "Answers", "Finish", "IDLE"):
            if kind in name:
                return kind.lower()
        return "other"

    def taken(self) -> dict[str, float]:
        with self._lock:
            found, self._most = dict(self._most), defaultdict(float)
        return {kind: round(value, 1) for kind, value in sorted(found.items())}

    def stop(self) -> None:
        self._over.set()
        self.join()


def write_rows(folder: Path, rows: int) -> None:
    import pyarrow.parquet as pq
    from photos import SCHEMA, photo

    photos = [{"bytes": photo(n, SIDES), "path": f"{n}.jpg"} for n in range(DIFFERENT)]
    column = pa.array(photos, SCHEMA.field("image").type)
    folder.mkdir(parents=True)
    for start in range(0, rows, DIFFERENT):
        count = min(DIFFERENT, rows - start)
        ids = pa.array(range(start, start + count), pa.int64())
        table = pa.table([ids, column.slice(0, count)], schema=SCHEMA)
        pq.write_table(table, folder / f"part-{start:08}.parquet", row_group_size=100)


class Stopped(Exception):
    """The seconds of this process are over."""


def run(rows: int, folder: Path, model: str, seconds: float) -> tuple[list[dict[str, Any]], bool]:
    """The lines of this process, and whether the run is done."""
    import ray

    from prefect_raybatch import BatchJob
    from prefect_raybatch.api import finalize_run, infer_run, plan_run

    job = BatchJob.from_dict(
        {
            "name": "images-memory",
            "source": {"uri": str(folder / "in"), "rows_per_shard": 100},
            "prompt": {"template": "Caption?", "images": {"columns": "image", "resize": [64, 64]}},
            "sampling": {"max_tokens": 32},
            "engine": {"model": model, "max_model_len": 1024, "load_format": "dummy"},
            "output": {"uri": str(folder / "out"), "column": "caption", "columns": []},
        }
    )
    ray.init(include_dashboard=False, logging_level="error", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    watch, lines, began = Watch(), [], time.time()
    watch.start()

    tenth, marks = rows / 10, []

    def tell(done: int) -> None:
        lines.append({"rows": done, "seconds": round(time.time() - began, 1), **watch.taken()})
        print(json.dumps(lines[-1]), flush=True)

    def look(progress: Any) -> None:
        mark = int(progress.done // tenth)
        if not marks:
            marks.append(mark)
        if mark > marks[-1]:
            marks.append(mark)
            tell(progress.done)
        if time.time() - began > seconds and progress.done < rows:
            tell(progress.done)
            raise Stopped

    planned = plan_run(job, "bench")
    try:
        report = finalize_run(job, planned, infer_run(job, planned, look, engine=Answers))
    except Stopped:
        return lines, False
    finally:
        watch.stop()
    if report.good != rows:
        raise SystemExit(f"{report.good} of {rows} rows: {report.failures}")
    tell(rows)
    return lines, True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--models", default="/tmp/raybatch-images")
    parser.add_argument("--out", default="images_memory.jsonl")
    parser.add_argument("--folder", type=Path, help="of input and run; by default one that goes")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    from vision_models import make_model

    model = make_model("idefics3-2b", Path(args.models), tiny=True)
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        if not (folder / "in").exists():
            write_rows(folder / "in", args.rows)
        lines, done = run(args.rows, folder, model, args.seconds)
    with open(args.out, "a") as out:
        about = {"date": f"{date.today()}", "asked_rows": args.rows}
        out.write(json.dumps({**about, "tenths": lines}) + "\n")
    kinds = sorted({kind for line in lines for kind in line})
    print(" ".join(f"{kind:>9}" for kind in kinds))
    for line in lines:
        print(" ".join(f"{line.get(kind, ''):>9}" for kind in kinds))
    print("done" if done else f"stopped after {args.seconds:g} s; the same command goes on")
    return 0 if done else 3


if __name__ == "__main__":
    sys.exit(main())
