"""What `engine.order: run` costs at a size, beside the keys of the rows: seconds and memory.

    python benchmarks/order_at_size.py --rows 1000000 10000000

Rows with a prompt of `--bytes` bytes that begins like one of a tenth as many, a tenth of them equal
to another one. No engine and no Ray: keys, texts and raw answers are made up, in time that is not
counted. What is measured is the package's own, on the local disk:

  sort     keys and texts of the rows added, joined, and the requests numbered by their prompts
  places   the tables that say where each row's answer is, and how many rows wait for each request
  deal     the rows read again, dealt out in the order of the prompts, and written as Parquet
  answers  the raw answers of all requests put in the order of the rows
  look up  all shards' answers looked up; with `--as-asked` a sample of them, as they were before
           there was the step above

Each size has a process of its own. Seconds are of the CPU; memory is the most that the process had
for itself, without what is mapped from files, looked at twenty times a second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

BLOCK, SHARD, SAMPLED = 1 << 16, 4000, 4
STEPS = ("sort", "places", "deal", "answers", "look up")


class Own(threading.Thread):
    """The most memory that this process has for itself."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over, self.most = threading.Event(), 0.0

    def run(self) -> None:
        while not self._over.wait(0.05):
            text = Path("/proc/self/status").read_text()
            (line,) = (line for line in text.splitlines() if line.startswith("RssAnon"))
            self.most = max(self.most, int(line.split()[1]) / 1024)

    def stop(self) -> float:
        self._over.set()
        self.join()
        return self.most


class Steps:
    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        self.mib: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        own, began = Own(), time.process_time()
        own.start()
        try:
            yield
        finally:
            self.cpu[name] = time.process_time() - began
            self.mib[name] = own.stop()

    @contextmanager
    def not_counted(self, name: str) -> Iterator[None]:
        """Inside of a step: making up what it is given."""
        self._apart = getattr(self, "_apart", {})
        began = time.process_time()
        yield
        self._apart[name] = self._apart.get(name, 0.0) + time.process_time() - began

    def told(self, name: str) -> float:
        return self.cpu[name] - getattr(self, "_apart", {}).get(name, 0.0)


def texts(numbers: np.ndarray, length: int) -> list[bytes]:
    """Prompts by their numbers: ten neighbours begin alike, all over the table."""
    begun = (numbers // 10 * 2654435761) % (1 << 32)
    return [b"company %010d %s" % (a, b"x" * length) for a in begun.tolist()]


def sha_of(store: Any, path: str) -> str:
    with store.open(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def measured(rows: int, length: int, as_asked: bool) -> dict[str, Any]:
    from prefect_raybatch.cluster.lookups import LookUpFiles
    from prefect_raybatch.ledger.increments import (
        OF_ROWS,
        Increment,
        read_answers_by_row,
    )
    from prefect_raybatch.ledger.layout import table_path
    from prefect_raybatch.ledger.plan_tables import to_parquet
    from prefect_raybatch.ledger.records import digest
    from prefect_raybatch.plan.joining import PACKED_KEY, Join
    from prefect_raybatch.plan.prefix_order import sorted_by_rank
    from prefect_raybatch.runs.answers_by_row import sort_answers
    from prefect_raybatch.source import snapshot_tables
    from prefect_raybatch.stages.raw_answers import AnswerFiles, NamedFile, in_order, numbered
    from prefect_raybatch.storage import open_store

    steps, draw = Steps(), np.random.default_rng(7)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"{folder}/run")
        with Join(rows, 0, ordered=True) as join:
            assert join.prompts is not None
            with steps.step("sort"):
                for start in range(0, rows, BLOCK):
                    with steps.not_counted("sort"):
                        count = min(BLOCK, rows - start)
                        numbers = draw.integers(0, rows * 5, count)
                        keys = np.zeros((count, 2), ">u8")
                        keys[:, 0], keys[:, 1] = numbers * 0x9E3779B1, numbers
                        made = pa.array(texts(numbers, length), pa.binary())
                        all_of_them = np.ones(count, bool)
                    join.add_rows(start, keys.reshape(-1).view(PACKED_KEY), *[all_of_them] * 2)
                    join.prompts.add(start, made)
                join.run()
            names: list[NamedFile] = []
            with steps.step("places"):
                for kind, at in join.places():
                    table = pa.table({"kind": pa.array(kind), "at": pa.array(at)})
                    data = to_parquet(table)
                    path = table_path(f"places-{digest(data)[:16]}.parquet")
                    names.append(NamedFile(path, len(kind), digest(data)))
                    store.put(path, data)
                to_parquet(pa.table({"rows": pa.array(join.weights())}))
            with steps.step("deal"):
                snapshot_tables(
                    lambda: sorted_by_rank(
                        read(join, rows, length, steps), join.asked, join.folder
                    ),
                    store,
                    "a" * 32,
                )
            asked, counts = join.asked, join.counts
        paths = answers(Path(folder) / "run", asked)
        named = [(first, NamedFile(path, 0, sha_of(store, path))) for path, first in paths]
        files = numbered(store, named)
        size = sum((Path(folder) / "run" / file.path).stat().st_size for file in files)
        columns = raw().names
        known = LookUpFiles(
            AnswerFiles(store, (), tuple(columns)),
            AnswerFiles(store, files, tuple(columns)),
            AnswerFiles(store, (), ()),
            size,
        )
        tables = tuple(Path(file.path).name for file in names)
        increment = Increment(OF_ROWS, "", places=tables, counts=counts)
        plan: Any = SimpleNamespace(hash="h", rows=rows)
        with steps.step("answers"):
            if not as_asked:
                sort_answers(store, plan, increment, known)
        by_row = read_answers_by_row(store, plan)
        found = known.new_answers
        if by_row is not None:
            placed = [(f.first, NamedFile(f.path, f.rows, f.sha256)) for f in by_row.files]
            found = AnswerFiles(store, numbered(store, placed), tuple(columns))
        places = AnswerFiles(store, in_order(store, names), ("at",))

        def look_up(shard: int) -> None:
            own = np.arange(shard * SHARD, (shard + 1) * SHARD)
            at = places.take(own)[1]
            assert at is not None
            there, _ = found.take(own if by_row is not None else at["at"].to_numpy())
            assert there.all()

        number = rows // SHARD
        with steps.step("first look up"):  # reads what is kept in memory from then on
            look_up(0)
        # In the order of the rows shards share what is kept of a file; as asked each has its own.
        sampled = range(1, number, 1 if by_row is not None else max(1, number // SAMPLED))
        with steps.step("look up"):
            for shard in sampled:
                look_up(shard)
        steps.cpu["look up"] *= (number - 1) / max(1, len(sampled))
        steps.cpu["look up"] += steps.cpu["first look up"]
    return {
        "rows": rows,
        "asked": asked,
        "by_row": by_row is not None,
        "cpu_s": {name: round(steps.told(name), 1) for name in STEPS},
        "mib": {name: round(steps.mib[name]) for name in STEPS},
    }


def read(join: Any, rows: int, length: int, steps: Steps) -> Iterator[tuple[str, pa.Table]]:
    """The rows that are asked about, as the plan reads them again."""
    from prefect_raybatch.plan.prefix_order import RANK
    from prefect_raybatch.stages.columns import KEY, KEY_TYPE

    block = 8192
    text = pa.array([b"company %010d %s" % (i, b"x" * length) for i in range(block)]).cast("string")
    for start in range(0, rows, block):
        stop = min(rows, start + block)
        with steps.not_counted("deal"):
            table = pa.table({"text": text.slice(0, stop - start)})
        mask = join.leaders(start, stop)
        keys = join.keys[start:stop][mask]
        column = pa.Array.from_buffers(KEY_TYPE, len(keys), [None, pa.py_buffer(keys.tobytes())])
        numbers = pa.array(join.numbers_of_leaders(start, stop))
        yield (
            "rows",
            table.filter(pa.array(mask)).append_column(KEY, column).append_column(RANK, numbers),
        )


def raw() -> pa.Schema:
    from prefect_raybatch.stages.raw_answers import RAW

    return RAW


def answers(folder: Path, count: int) -> Iterator[tuple[str, int]]:
    """Raw answers of so many requests, as finalize writes them: a row group a shard."""
    from prefect_raybatch.stages.raw_answers import KEY_COLUMN, NUMBER

    per_file = 250 * SHARD
    draw = np.random.default_rng(3)
    for first in range(0, count, per_file):
        path = f"asks-{first // per_file:05d}.parquet"
        schema = raw().append(pa.field(NUMBER, pa.int64()))
        with pq.ParquetWriter(folder / path, schema, compression="zstd") as out:
            for start in range(first, min(count, first + per_file), SHARD):
                rows = min(SHARD, count - start)
                columns = {name: pa.nulls(rows, raw().field(name).type) for name in raw().names}
                key = raw().field(KEY_COLUMN).type
                data = pa.py_buffer(draw.bytes(16 * rows))
                columns[KEY_COLUMN] = pa.Array.from_buffers(key, rows, [None, data])
                label = pa.array([[[17, 4, 2]], [[21, 2]], [[5, 9, 13, 2]]] * (rows // 3 + 1))
                columns["token_ids"] = label.slice(0, rows).cast(raw().field("token_ids").type)
                columns["prompt_tokens"] = pa.array(np.full(rows, 104, np.int32))
                columns["finish_reason"] = pa.array(["stop"] * rows)
                columns[NUMBER] = pa.array(np.arange(start, start + rows))
                out.write_table(pa.table(columns, schema=schema))
        yield path, first


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--bytes", type=int, default=150, help="of a prompt, and of a row")
    parser.add_argument("--as-asked", action="store_true")
    parser.add_argument("--case", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measured(args.rows[0], args.bytes, args.as_asked)))
        return 0
    found = []
    for rows in args.rows:
        command = [sys.executable, __file__, "--case", "--rows", f"{rows}"]
        command += ["--bytes", f"{args.bytes}", *(["--as-asked"] if args.as_asked else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(done.stdout.splitlines()[-1], file=sys.stderr, flush=True)
    print("| rows | " + " | ".join(STEPS) + " | us a row | MiB at most |")
    print("| --- |" + " --- |" * (len(STEPS) + 2))
    for one in found:
        cells = [f"{one['cpu_s'][name]:.1f} s" for name in STEPS]
        each = sum(one["cpu_s"].values()) / one["rows"] * 1e6
        most = max(one["mib"].values())
        print(f"| {one['rows']:,} | {' | '.join(cells)} | {each:.1f} | {most:,} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
