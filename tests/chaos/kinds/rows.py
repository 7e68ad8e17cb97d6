"""Rows that cannot be answered: each ends in quarantine alone, its neighbours are answered."""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .. import inputs
from ..trial import Trial
from . import kind

ROWS = 600


def some(t: Trial, count: int | None = None) -> list[int]:
    return t.rng.sample(range(ROWS), count or t.rng.randint(1, 6))


def go(t: Trial, failed: dict[int, str], faults: int = 0, **groups: Any) -> None:
    """Runs to the end, in half of the trials with the driver killed on the way."""
    t.quarantined = failed
    limits = {"max_failed_rows": len(failed), **groups.pop("limits", {})}
    t.setup(limits=limits, **groups)
    t.fault(f"rows {sorted(failed) or 'none'} must fail", faults=faults)
    if t.rng.random() < 0.5:
        driver = t.start()
        if t.wait_commits(t.rng.randint(1, t.shards // 2), driver):
            time.sleep(t.rng.random() * 0.2)
            driver.kill()
            t.fault("driver killed")
            t.keep()


@kind("poison: prompt over the limit", real=True)
def poison_too_long(t: Trial) -> None:
    t.rows = inputs.rows(ROWS, t.engine)
    bad = some(t)
    for i in bad:
        t.rows[i]["text"] = "word " * t.rng.choice([300, 5000])
    go(t, dict.fromkeys(bad, "PromptTooLong"))


@kind("poison: null", real=True)
def poison_null(t: Trial) -> None:
    t.rows = inputs.rows(ROWS, t.engine)
    bad = some(t)
    for i in bad:
        t.rows[i]["text"] = None
    go(t, dict.fromkeys(bad, "ValueError"))


@kind("poison: a 10 MB cell", real=True)
def poison_big_cell(t: Trial) -> None:
    """In the prompt it is over the limit; beside it, it is carried along."""
    t.rows = inputs.rows(ROWS, t.engine)
    prompt, beside = some(t, 2)
    for row in t.rows:
        row["note"] = "n"
    t.rows[prompt]["text"] = "wide cell " * 1_000_000
    t.rows[beside]["note"] = "x" * 10_000_000
    go(t, {prompt: "PromptTooLong"})


@kind("poison: template function raises", real=True)
def poison_template(t: Trial) -> None:
    bad = _noted(t, "raise")
    function = "ask" if t.engine == "fast" else "ask_company"
    prompt = {"template": None, "function": f"chaos.functions:{function}"}
    go(t, dict.fromkeys(bad, "LookupError"), prompt=prompt)


@kind("poison: postprocess raises, or leaves rows out", real=True)
def poison_postprocess(t: Trial) -> None:
    bad = _noted(t, "raise")
    t.skipped = set(some(t)) - set(bad)
    for i in t.skipped:
        t.rows[i]["note"] = "skip"
    go(t, dict.fromkeys(bad, "RuntimeError"), output=_shaped(t))


@kind("poison: postprocess returns another schema", real=True)
def poison_schema(t: Trial) -> None:
    bad = _noted(t, "columns")
    for i in bad[1:]:
        t.rows[i]["note"] = "type"
    output = {**_shaped(t), "schema": {"response": "string"}}
    go(t, dict.fromkeys(bad, "SchemaError"), output=output)


@kind("poison: a function ends or hangs its process")
def poison_deadly(t: Trial) -> None:
    """In the prompt or after the answer; those behind must wait for the next pass, and no more."""
    t.rows = [{**row, "note": "fine"} for row in inputs.rows(ROWS, t.engine)]
    bad = some(t, 2)
    failed = dict(zip(bad, ("FunctionDied", "FunctionHung"), strict=True))
    for i, note in zip(bad, ("exit", "loop"), strict=True):
        t.rows[i]["note"] = note
    limits = {"function_seconds": 1}
    if t.rng.random() < 0.5:
        prompt = {"template": None, "function": "chaos.functions:ask"}
        go(t, failed, len(failed), limits=limits, prompt=prompt)
    else:
        go(t, failed, len(failed), limits=limits, output=_shaped(t))


def _noted(t: Trial, note: str) -> list[int]:
    t.rows = inputs.rows(ROWS, t.engine)
    bad = some(t)
    for i, row in enumerate(t.rows):
        row["note"] = note if i in bad else "fine"
    return bad


def _shaped(t: Trial) -> dict[str, Any]:
    return {"postprocess": "chaos.functions:shape", "uri": t.out, "options": t.options}


@kind("poison: a lone surrogate (JSON \\ud800)")
def poison_surrogate(t: Trial) -> None:
    """JSON can write what no UTF-8 text can hold: the file is refused, and mended."""
    t.rows = inputs.rows(ROWS, t.engine)
    text = inputs.json_lines(t.rows).splitlines(keepends=True)
    at = some(t, 1)[0]
    spoiled = [*text[:at], f'{{"id": {at}, "text": "a \\ud800 b"}}\n', *text[at + 1 :]]
    _refused(t, "a.jsonl", "".join(spoiled).encode(), "".join(text).encode(), at + 1)


@kind("poison: invalid UTF-8 in CSV")
def poison_utf8_csv(t: Trial) -> None:
    t.rows = inputs.rows(ROWS, t.engine)
    good = inputs.csv_text(t.rows).encode()
    lines = good.splitlines(keepends=True)
    at = some(t, 1)[0] + 1
    lines[at] = lines[at].replace(b" ", b" \xff\xfe", 1)
    _refused(t, "a.csv", b"".join(lines), good, at + 1)


@kind("poison: invalid UTF-8 in JSON Lines")
def poison_utf8_jsonl(t: Trial) -> None:
    t.rows = inputs.rows(ROWS, t.engine)
    good = inputs.json_lines(t.rows).encode()
    lines = good.splitlines(keepends=True)
    at = some(t, 1)[0]
    lines[at] = lines[at].replace(b" ", b" \xff", 3)
    _refused(t, "a.jsonl", b"".join(lines), good, at + 1)


def _refused(t: Trial, name: str, bad: bytes, good: bytes, line: int) -> None:
    """The plan must fail with file and line, and succeed once the file is mended."""
    t.in_place.write(name, bad)
    t.setup()
    t.expect_error(t.start(), "SourceError", name, f"line {line}")
    t.fault(f"line {line} of {name}", faults=0)
    t.in_place.write(name, good)


@kind("poison: invalid UTF-8 in Parquet")
def poison_utf8_parquet(t: Trial) -> None:
    """Parquet readers do not look: the row must fail alone."""
    t.rows = inputs.rows(ROWS, t.engine)
    bad = some(t, 2)
    texts = [row["text"].encode() for row in t.rows]
    for i in bad:
        texts[i] = b"latin \xe9\xff " + texts[i]
        t.rows[i]["text"] = texts[i].decode(errors="surrogateescape")
    raw = pa.array(texts, pa.binary())
    column = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    table = pa.table({"id": [row["id"] for row in t.rows], "text": column})
    path = t.folder / "raw.parquet"
    pq.write_table(table, path)
    t.in_place.write("a.parquet", path.read_bytes())
    go(t, dict.fromkeys(bad, "UnicodeDecodeError"))
