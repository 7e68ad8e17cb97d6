"""Reports, nights and failures in which each text is one that somebody chose: of a row, a file, a
node, a stage, an error, a run directory."""

from __future__ import annotations

from helpers.reports import full
from prefect_raybatch.driver.heartbeat import Heartbeat
from prefect_raybatch.driver.stops import Sample
from prefect_raybatch.flow.failure import Cause
from prefect_raybatch.ledger.records import Part
from prefect_raybatch.report.records import Advice, NodeStats, RunReport, StageStats, WorkerStats
from prefect_raybatch.report.run_history import HistoryLine, HistoryPage


def hostile_report(*texts: str) -> RunReport:
    """Return a report with the texts wherever one of a run stands; several in its lists."""
    first = texts[0]
    return full(
        run=first,
        run_key=first,
        job=first,
        state=first,
        model={"source": first},
        notes=texts,
        failures={f"{text}|{text}|{text}": 1 + at for at, text in enumerate(texts)},
        parts=tuple(Part(text, 1, 1, text) for text in texts),
        stages=tuple(StageStats(text, 1, 5, 1.0, 5.0, 1.0) for text in texts),
        workers=tuple(WorkerStats(text, 1, 1, 1.0, 1.0) for text in texts),
        nodes=tuple(NodeStats(text, 1, 1, 1, {}) for text in texts),
        advice=tuple(Advice(text, text, text) for text in texts),
        code={first: 1, texts[-1]: 2},
        dashboard=first,
    )


def hostile_history(*texts: str) -> HistoryPage:
    """Return the page of a job whose nights, labels and failures are called so."""
    first = texts[0]
    counts = {"labels": {text: 300.0 for text in texts}}
    night = HistoryLine(
        first, first, first, 1.0, 60_000, 1.0, 60_000, 0, 5.0, 9.0, 1.5, counts,
        trouble=first, failure=first, command=first,
    )  # fmt: skip
    return HistoryPage(first, (night,), {text: text for text in texts})


def hostile_cause(*texts: str) -> Cause:
    """Return why a task failed, as the page shows it."""
    first = texts[0]
    rows = [Sample(at, text, text, text) for at, text in enumerate(texts)]
    return Cause(first, first, first, first, first, first, first, first, rows)


def hostile_beat(text: str) -> Heartbeat:
    """Return the state of a driver that says this of itself."""
    return Heartbeat(1.0, phase="working", rows=5, about=text, dashboard=text)
