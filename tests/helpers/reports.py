"""Small records and reports, whole in every field."""

from __future__ import annotations

from dataclasses import replace

from prefect_raybatch.ledger.failures import FailureKey
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.records import Commit, Part, Piece, Receipt
from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.report.records import Charts, NodeStats, RunReport, StageStats, WorkerStats

PIECE = Piece("00000000-ab.parquet", "data", 3, 100, "f" * 64, Positions.spans((0, 2), (4, 5)))

RECEIPT = Receipt(
    7,
    "attempt",
    good=Positions.spans((0, 2), (4, 5)),
    failed=Positions.spans((2, 3)),
    skipped=Positions.spans((3, 4)),
    pieces=(PIECE,),
    stats=ShardStats(rows=5, started=1.5, ended=2.5),
    failures={FailureKey("engine", "ValueError", "no | pipe"): 1},
    where={"node": "n"},
)

COMMIT = Commit(
    shard=7,
    attempt="attempt",
    token="t",
    plan_hash="h",
    good=RECEIPT.good,
    failed=RECEIPT.failed,
    skipped=RECEIPT.skipped,
    pieces=RECEIPT.pieces,
    stats=RECEIPT.stats,
    failures=RECEIPT.failures,
    where=RECEIPT.where,
    committed=3.5,
)

REPORT = RunReport(
    run="/r",
    run_key="k",
    job="j",
    state="completed",
    rows=5,
    good=3,
    failed=1,
    skipped=1,
    shards=1,
    resumed_shards=0,
    seconds=1.0,
    rows_per_s=5.0,
    tokens={"prompt_tokens": 10.0},
    stages=(StageStats("engine", 1, 5, 1.0, 5.0, 1.0),),
    failures={"a|b|c": 1},
    model={},
    parts=(Part("data/part-00000.parquet", 3, 10, "f"),),
    notes=("a note",),
)


def full(**fields: object) -> RunReport:
    charts = Charts(
        throughput=((10.0, 5.0, 50.0, 5.0), (20.0, 6.0, 60.0, 6.0)),
        durations={"engine": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)},
        cells=((1, 1, 0, 5), (1, 1, 1, 5), (1, 0, 0, 0)),
    )
    made = replace(
        REPORT,
        charts=charts,
        workers=(WorkerStats("host:1", 2, 10, 100.0, 4.0), WorkerStats("host:2", 1, 5, 50.0, 4.0)),
        nodes=(NodeStats("host", 1, 2, 10, {"node_cpu": 0.5, "gpu": 0.93}),),
        figures={"running": 200.0, "gpu": 0.93},
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def report(key: str = "k") -> RunReport:
    return RunReport(
        run="/nowhere/k", run_key=key, job="j", state="completed", rows=100, good=99, failed=1,
        skipped=0, shards=4, resumed_shards=0, seconds=1.0, rows_per_s=99.0, tokens={},
        stages=(), failures={"engine|ValueError|no": 1}, model={"source": "demo"},
    )  # fmt: skip


def timed_commit(started: float, ended: float, rows: int = 10, **stats: float) -> Commit:
    """A commit of these times and sums alone."""
    return replace(
        COMMIT,
        good=Positions.spans((0, rows)),
        failed=Positions(),
        skipped=Positions(),
        pieces=(),
        failures={},
        stats=ShardStats.of({"rows": rows, "started": started, "ended": ended, **stats}),
    )
