"""Seconds, requests and memory of the ledger by the number of shards, on S3 or a local disk.

The package's own code without engines: an input of real Parquet files (copies of one file of a
single tiny column, so that all footers are read and little space is needed), the plan, a commit of
every shard but a few by synthetic receipts (all rows left out on purpose, so that no pieces need to
be made), what a driver does when it resumes, up to the read tasks it would hand to Ray, then the
rest of the commits, finalize, status and verify. Each phase is a process of its own. With shares
(--left-out, --failed) rows are left out or fail at random; finalize and verify need the pieces
then, which --pieces writes. The S3 server is Ceph radosgw on this machine, where it is installed.

    python benchmarks/ledger.py                            2,500, 25,000 and 250,000 shards
    python benchmarks/ledger.py --shards 25_000
    python benchmarks/ledger.py --shards 2_500 --store local --writers 1
    python benchmarks/ledger.py --shards 2_500 --store local --left-out 0.5 --failed 0.1 --pieces

Prints one row a step: seconds, CPU seconds, requests to S3, memory (RSS) before and after it and
the process's peak so far, in MB; the step "import" is what loading the code costs. A table over the
sizes ends it. Exit status 1 when a driver process (plan, start, resume) peaks above --bar, or a
resume takes longer than --resume-bar.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import lru_cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

# Nothing heavy at module level: a child's peak counts from the memory of the process it is
# started from, and "before" shall show what our own imports cost.

DRIVER = ("plan", "start", "resume")
SIZES = (2_500, 25_000, 250_000)
ROWS = 4_000  # a shard, the most that a plan chooses by itself
DRAWS = 64  # of positions, which shards take in turn: to draw them takes longer than to commit
RUN_KEY = "ledger-benchmark"
BUCKET = "ledger-benchmark"
requests = 0


class Steps:
    """What the steps of this phase took."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.rows: list[dict[str, Any]] = []

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """Measures the block; counts set in the dict it gives are shown beside it."""
        row: dict[str, Any] = {"phase": self.phase, "step": name, "before_mb": _rss_mb()}
        counts: dict[str, Any] = {}
        began, cpu, before = time.perf_counter(), time.process_time(), requests
        yield counts
        row["requests"] = requests - before
        row["seconds"] = round(time.perf_counter() - began, 3)
        row["cpu"] = round(time.process_time() - cpu, 3)
        row["after_mb"] = _rss_mb()
        row["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
        self.rows.append({**row, "counts": counts})


def _count_requests() -> None:
    """Counts what this process sends to S3 from now on, repeated calls too."""
    from prefect_raybatch.storage.s3_client import Connection

    run = Connection.run

    def counting(connection: Any, fs: Any, send: Any) -> Any:
        global requests
        requests += 1
        return run(connection, fs, send)

    Connection.run = counting  # type: ignore[method-assign]


def _rss_mb() -> float:
    """Resident memory of this process now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


# --- the phases, each in its own process ------------------------------------------------------


def make_input(args: argparse.Namespace, steps: Steps) -> None:
    """`files` Parquet files of together `rows` rows: copies of at most two files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = Path(args.folder) / "in"
    folder.mkdir()
    with steps.step("write") as counts:
        made: dict[int, Path] = {}
        for number in range(args.files):
            rows = args.rows // args.files + (number < args.rows % args.files)
            path = folder / f"{number:06d}.parquet"
            if rows in made:
                shutil.copyfile(made[rows], path)
            else:
                table = pa.table({"n": pa.array([7], pa.int32()).take([0] * min(rows, 1 << 20))})
                with pq.ParquetWriter(path, table.schema) as writer:
                    for start in range(0, rows, 1 << 20):
                        writer.write_table(table.slice(0, rows - start))
                made[rows] = path
        counts["files"] = args.files


def plan(args: argparse.Namespace, steps: Steps) -> None:
    with steps.step("import"):
        from prefect_raybatch.api import plan_run
    with steps.step("inventory, plan, write") as counts:
        made = plan_run(job_of(args), RUN_KEY)
        counts["rows"], counts["shards"] = made.rows, made.shards


def commit(args: argparse.Namespace, steps: Steps) -> None:
    """All but `pending` shards, the whole rest when those are there; folded as a driver folds."""
    with steps.step("import"):
        import numpy as np

        from prefect_raybatch.ledger.checkpoints import CheckpointWriter
        from prefect_raybatch.ledger.ledger import Ledger
        from prefect_raybatch.storage import open_store, read_ahead
    ledger = Ledger(open_store(_run_folder(args)))
    plan = ledger.load_plan()
    assert plan is not None
    shards = ledger.shards(plan)
    put: Callable[[str, bytes], Any] = ledger.store.put
    if args.unsynced and args.store == "local":
        put = partial(_write, Path(_run_folder(args)))
        ledger.store.put_if_absent = put  # type: ignore[method-assign]
    receipt = receipts(args.left_out, args.failed, put if args.pieces else None)
    todo = np.flatnonzero(~ledger.committed(plan)).tolist()
    if len(todo) > args.pending:
        todo = todo[: -args.pending]

    def one(shard: int) -> Any:
        rows = shards[shard].rows
        made = ledger.commit(plan, rows, [receipt(shard, rows)])
        if made is None:
            raise SystemExit(f"shard {shard} was committed already")
        return made

    folder = CheckpointWriter(ledger.store, plan.hash)
    with steps.step("commit") as counts:
        for made in read_ahead(one, todo, args.writers, args.writers):
            folder.add(made)
        counts["commits"], counts["writers"] = len(todo), args.writers


def _write(folder: Path, path: str, data: bytes) -> bool:
    """Without a sync: to have many commits to read, not to measure how they are written."""
    target = folder / path
    if not target.parent.exists():
        target.parent.mkdir(parents=True)
    target.write_bytes(data)
    return True


def receipts(
    left_out: float = 0.0, failed: float = 0.0, put: Callable[[str, bytes], Any] | None = None
) -> Callable[[int, int], Any]:
    """A function (shard, rows) -> receipt of about the size a real one has: rows left out and
    failed at random by these shares, the others good. Pieces are written by `put`, or else named
    and not there; without shares all rows are left out, and there are none."""
    import uuid

    import numpy as np

    from prefect_raybatch.ledger.layout import piece_path
    from prefect_raybatch.ledger.positions import Positions
    from prefect_raybatch.ledger.record_texts import PieceKind
    from prefect_raybatch.ledger.records import Piece, Receipt, digest
    from prefect_raybatch.ledger.stats import ShardStats

    attempt, began = uuid.uuid4().hex, time.time() - 3600
    names = ("prompt_tokens", "cached_tokens", "output_tokens", "cut_off")
    sums = dict.fromkeys(names, 412_345.0)
    times = dict.fromkeys(("read_s", "prepare_s", "engine_s", "finish_s"), 3.1415)

    @lru_cache(2 * DRAWS)
    def positions(draw: int, rows: int) -> dict[str, Positions]:
        if not left_out and not failed:
            return {"skipped": Positions.spans((0, rows))}
        drawn = np.random.default_rng(draw).random(rows)
        parts = {
            "skipped": drawn < left_out,
            "failed": (drawn >= left_out) & (drawn < left_out + failed),
            "good": drawn >= left_out + failed,
        }
        return {name: Positions.of(np.flatnonzero(flags)) for name, flags in parts.items()}

    @lru_cache(4 * DRAWS)
    def content(draw: int, rows: int, kind: PieceKind, part: str) -> tuple[bytes, str]:
        data = _piece(kind, positions(draw, rows)[part].numbers)
        return data, digest(data)

    def piece(shard: int, rows: int, kind: PieceKind, part: str) -> Piece:
        name, held = f"{shard:08d}-{uuid.uuid4().hex}.parquet", positions(shard % DRAWS, rows)[part]
        if put is None:
            return Piece(name, kind, len(held), 10**6, "0" * 64, held)
        data, made = content(shard % DRAWS, rows, kind, part)
        put(piece_path(name), data)
        return Piece(name, kind, len(held), len(data), made, held)

    def receipt(shard: int, rows: int) -> Receipt:
        held = positions(shard % DRAWS, rows)
        kinds: tuple[tuple[str, PieceKind], ...] = (("good", "data"), ("failed", "quarantine"))
        return Receipt(
            shard=shard,
            attempt=attempt,
            **held,
            pieces=tuple(piece(shard, rows, kind, name) for name, kind in kinds if held.get(name)),
            stats=ShardStats(**sums, **times, rows=rows, started=began, ended=began + shard / 100),
            where={"node": "10.0.0.17", "pid": "4711"},
        )

    return receipt


def _piece(kind: str, positions: Any) -> bytes:
    """A piece as the finish stage writes it, of rows that are all alike."""
    from io import BytesIO

    import pyarrow as pa
    import pyarrow.parquet as pq

    from prefect_raybatch.ledger.layout import POSITION_COLUMN

    def alike(value: Any) -> Any:
        return pa.repeat(value, len(positions))

    number = alike(pa.scalar(7, pa.int32()))
    columns = {POSITION_COLUMN: pa.array(positions, pa.int64())}
    if kind == "data":
        columns |= {"n": number, "answer": alike("seven")}
    else:
        said = {"stage": "engine", "error": "ValueError", "message": "no answer to this"}
        columns |= {name: alike(text) for name, text in said.items()}
        columns["attempts"] = alike(pa.scalar(1, pa.int32()))
        columns["input"] = pa.StructArray.from_arrays([number], names=["n"])
    out = BytesIO()
    pq.write_table(pa.table(columns), out, compression="zstd")
    return out.getvalue()


def drive(args: argparse.Namespace, steps: Steps) -> None:
    """What `infer_run` does up to the cluster: the phases start and resume."""
    with steps.step("import"):
        import numpy as np

        from prefect_raybatch.driver.driver import Driver
        from prefect_raybatch.ledger.ledger import Ledger
        from prefect_raybatch.storage import open_store
    job, store = job_of(args), open_store(_run_folder(args))
    ledger = Ledger(store)
    with steps.step("load the plan"):
        plan = ledger.load_plan()
        assert plan is not None
        shards = ledger.shards(plan)

    def build(units: Any, isolated: bool) -> Iterator[Any]:
        with steps.step("import Ray"):
            from prefect_raybatch.cluster.pipeline import Pipeline
            from prefect_raybatch.compile.job import compile_planned
            from prefect_raybatch.sizing.sizes import Capacity, sizes_of
            from prefect_raybatch.stages.read import ShardDatasource
        with steps.step("read tasks") as counts:
            have = Capacity(16, 0, 1, "nowhere")
            spec = compile_planned(job, plan)
            size = sizes_of(spec.sizes, plan.rows, 0, have, planned=plan.rows_per_shard)
            pipeline = Pipeline(spec, plan, shards, store, "attempt", size, shuffle="attempt")
            datasource = ShardDatasource(pipeline.reader, pipeline.read_tasks(units, False))
            counts["units"], counts["tasks"] = len(units), len(datasource.get_read_tasks(1))
        raise _Enough

    driver = Driver(plan, shards, ledger, job.limits)
    with steps.step("fold the commits") as counts:
        progress = driver.resume()
        counts["committed"] = progress.resumed_shards
        if progress.resumed_shards != int(np.count_nonzero(driver.done)):
            raise SystemExit("the fold does not hold the commits that are there")
    try:
        driver.run(build, _no_quarantine)
    except _Enough:
        return
    raise SystemExit("nothing was pending")


class _Enough(Exception):
    """The read tasks are there; the rest is Ray's."""


def _no_quarantine(unit: Any, reason: str) -> Any:
    raise NotImplementedError


def status(args: argparse.Namespace, steps: Steps) -> None:
    with steps.step("import"):
        from prefect_raybatch.cli import commands as cli
    shown = StringIO()
    with steps.step("raybatch status --json") as counts:
        with redirect_stdout(shown):
            cli.app(["status", _run_folder(args), "--json"], standalone_mode=False)
        found = json.loads(shown.getvalue())
        counts["committed"], counts["pending"] = found["committed"], found["pending"]


def finalize(args: argparse.Namespace, steps: Steps) -> None:
    with steps.step("import"):
        from prefect_raybatch.api import finalize_run, plan_run
    job = job_of(args)
    with steps.step("finalize"):
        finalize_run(job, plan_run(job, RUN_KEY))


def verify(args: argparse.Namespace, steps: Steps) -> None:
    with steps.step("import"):
        from prefect_raybatch.result.verify import verify as prove
        from prefect_raybatch.storage import open_store
    with steps.step("raybatch verify") as counts:
        found = prove(open_store(_run_folder(args)))
        rows = found.data + found.quarantined + found.skipped
        counts["rows"], counts["shards"] = rows, found.committed_shards
        counts["in files"] = found.data + found.quarantined
    if not found.ok or rows != args.rows:
        raise SystemExit(f"not proved: {found.faults}")


PHASES: dict[str, Callable[[argparse.Namespace, Steps], None]] = {
    "input": make_input,
    "plan": plan,
    "start": drive,
    "commit": commit,
    "resume": drive,
    "status": status,
    "rest": commit,
    "finalize": finalize,
    "verify": verify,
}


def job_of(args: argparse.Namespace) -> Any:
    from prefect_raybatch.job.batch_job import BatchJob

    return BatchJob.from_dict(
        {
            "name": "ledger-benchmark",
            "source": {
                "uri": f"{args.folder}/in",
                "rows_per_shard": -(-args.rows // args.shards),
            },
            "prompt": {"template": "Say {n}."},
            "output": {"uri": _output(args)},
            "limits": {"max_failed_fraction": 1.0},  # --failed is drawn: about as many
        }
    )


def _output(args: argparse.Namespace) -> str:
    return f"s3://{BUCKET}/{Path(args.folder).name}" if args.store == "s3" else f"{args.folder}/out"


def _run_folder(args: argparse.Namespace) -> str:
    return f"{_output(args)}/{RUN_KEY}"


# --- all of them ------------------------------------------------------------------------------


def print_sizes() -> None:
    """Bytes of positions in a record, as a bitmap and as ranges."""
    import numpy as np

    from prefect_raybatch.ledger.positions import Positions
    from prefect_raybatch.ledger.records import dump

    print(f"{'rows of a shard':>16}{'left out':>10}{'bytes':>12}{'as ranges':>12}")
    for rows in (4_000, 1_000_000):
        for share in (0.01, 0.1, 0.5):
            held = Positions.of(np.flatnonzero(np.random.default_rng(0).random(rows) < share))
            both = len(str(held.to_text())), 2 * len(dump(held.ranges))  # and those of the good
            print(f"{rows:>16,}{share:>10.0%}{both[0]:>12,}{both[1]:>12,}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shards", type=int, help="of the plan; without it three sizes")
    parser.add_argument("--rows", type=int, help="rows of the input; by default 4,000 a shard")
    parser.add_argument("--files", type=int, default=100, help="files of the input")
    parser.add_argument("--pending", type=int, default=10, help="shards left for the resume")
    parser.add_argument("--writers", type=int, default=16, help="threads that commit; a run has 1")
    parser.add_argument("--left-out", type=float, default=0.0, help="share of rows, at random")
    parser.add_argument("--failed", type=float, default=0.0, help="share of rows, at random")
    parser.add_argument("--pieces", action="store_true", help="write those of the shares' rows")
    parser.add_argument("--unsynced", action="store_true", help="local commits are not synced")
    parser.add_argument("--through", choices=PHASES, help="the last phase; by default verify")
    parser.add_argument("--store", choices=("s3", "local"), default="s3", help="of the output")
    parser.add_argument("--bar", type=float, default=1000.0, help="MB a driver process may take")
    parser.add_argument("--resume-bar", type=float, default=60.0, help="seconds of a resume")
    parser.add_argument("--folder", help="where to work; by default a temporary folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        _count_requests()
        steps = Steps(args.phase)
        PHASES[args.phase](args, steps)
        print(json.dumps(steps.rows))
        return 0
    _limit(parser, args)
    if not args.json:
        print_sizes()
    with (
        tempfile.TemporaryDirectory(prefix="raybatch-ledger-", dir=args.folder) as folder,
        server(args, folder) as environment,
    ):
        return measure(args, folder, environment)


def _limit(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """The last phase: none that needs pieces which nobody writes."""
    phases = list(PHASES)
    named = (args.left_out or args.failed) and args.left_out < 1 and not args.pieces
    last = "status" if named else "verify"
    args.through = args.through or last
    if phases.index(args.through) > phases.index(last):
        parser.error(
            f"--through {args.through}: with --left-out or --failed the records name pieces that "
            "are not there; add --pieces, which writes them, or end with --through status"
        )


@contextmanager
def server(args: argparse.Namespace, folder: str) -> Iterator[dict[str, str]]:
    """The environment of the phases, with an S3 server behind it where one is wanted."""
    if args.store == "local":
        yield dict(os.environ)
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from s3server import start_s3

    with start_s3(Path(folder) / "s3") as s3:
        s3.create_bucket(BUCKET)
        yield {**os.environ, **s3.env}


def measure(args: argparse.Namespace, folder: str, environment: dict[str, str]) -> int:
    """Runs all phases at each size; 1 when a bar was missed."""
    sizes, rows_wanted = [args.shards] if args.shards else list(SIZES), args.rows
    found: dict[int, list[dict[str, Any]]] = {}
    for args.shards in sizes:
        args.rows = rows_wanted or args.shards * ROWS
        args.folder = f"{folder}/{args.shards}"
        Path(args.folder).mkdir()
        found[args.shards] = _size(args, environment)
    missed = [text for shards, rows in found.items() for text in _missed(args, shards, rows)]
    if args.json:
        sized = [{"shards": shards, "steps": rows} for shards, rows in found.items()]
        print(json.dumps({"store": args.store, "sizes": sized, "missed": missed}))
    else:
        _summary(found)
        print("\n".join(missed) or "all within the bars")
    return 1 if missed else 0


def _size(args: argparse.Namespace, environment: dict[str, str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    if not args.json:
        print(f"\n{args.rows:,} rows, {args.files:,} files, {args.shards:,} shards\n")
        titles = f"{'phase':9}{'step':24}{'seconds':>9}{'CPU':>9}{'requests':>9}"
        print(titles + f"{'before':>9}{'after':>9}{'peak MB':>9}", flush=True)
    phases = list(PHASES)
    for phase in phases[: phases.index(args.through) + 1]:
        for row in _run(phase, args, environment):
            rows.append(row)
            if not args.json:
                print(_line(row), flush=True)
    return rows


def _run(phase: str, args: argparse.Namespace, environment: dict[str, str]) -> list[dict[str, Any]]:
    names = (
        "rows",
        "shards",
        "files",
        "pending",
        "writers",
        "store",
        "folder",
        "left_out",
        "failed",
    )
    given = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    given += [f"--{name}" for name in ("unsynced", "pieces") if getattr(args, name)]
    given.append(f"--phase={phase}")
    done = subprocess.run(
        [sys.executable, __file__, *given],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _total(rows: list[dict[str, Any]], phase: str) -> tuple[float, float, int, float]:
    """Seconds, CPU seconds and requests of a phase but for loading the code; its peak in MB."""
    steps = [row for row in rows if row["phase"] == phase]
    work = [row for row in steps if not row["step"].startswith("import")]
    return (
        sum(row["seconds"] for row in work),
        sum(row["cpu"] for row in work),
        sum(row["requests"] for row in work),
        max((row["peak_mb"] for row in steps), default=0.0),
    )


def _missed(args: argparse.Namespace, shards: int, rows: list[dict[str, Any]]) -> list[str]:
    texts = []
    for phase in DRIVER:
        if (peak := _total(rows, phase)[3]) > args.bar:
            texts.append(f"{shards:,} shards: {phase} took {peak:.0f} MB, over {args.bar:.0f}")
    if (seconds := _total(rows, "resume")[0]) > args.resume_bar:
        texts.append(f"{shards:,} shards: resume took {seconds:.0f} s, over {args.resume_bar:.0f}")
    return texts


def _summary(found: dict[int, list[dict[str, Any]]]) -> None:
    measured = {row["phase"] for rows in found.values() for row in rows}
    known = ("plan", "commit", "resume", "status", "finalize", "verify")
    phases = [phase for phase in known if phase in measured]
    print(
        "\n| shards | " + " | ".join(f"{phase}: s, CPU s, requests, MB" for phase in phases) + " |"
    )
    print("| ---: |" + " ---: |" * len(phases))
    for shards, rows in found.items():
        cells = ("{:.1f}, {:.1f}, {:,}, {:.0f}".format(*_total(rows, phase)) for phase in phases)
        print(f"| {shards:,} | " + " | ".join(cells) + " |")


def _line(row: dict[str, Any]) -> str:
    memory = "".join(f"{row[name]:>9.0f}" for name in ("before_mb", "after_mb", "peak_mb"))
    counts = ", ".join(f"{value:,} {name}" for name, value in row["counts"].items())
    head = f"{row['phase']:9}{row['step']:24}{row['seconds']:>9.2f}{row['cpu']:>9.2f}"
    return f"{head}{row['requests']:>9,}{memory}  {counts}"


if __name__ == "__main__":
    sys.exit(main())
