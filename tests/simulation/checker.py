"""The independent checker: reads the files that are left, and knows nothing of the package.

Rows are known by their number; the answer to row 7 by the attempt X is `X answers 7`.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ANSWER = re.compile(r"(\S+) answers (\d+)\Z")


def table_of(data: bytes) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(pa.BufferReader(data)).to_pylist()
    return rows


def check(files: Mapping[str, bytes], base: str, rows: int) -> list[str]:
    """What is wrong with the run `base` and the runs that retry its failed rows."""
    runs = sorted({key.partition("/")[0] for key in files if key.endswith("/_raybatch/plan.json")})
    faults: list[str] = []
    data: Counter[int] = Counter()
    failed: dict[str, set[int]] = {}
    for run in runs:
        if f"{run}/_SUCCESS" not in files:
            faults.append(f"{run} is not finished")
            continue
        success = json.loads(files[f"{run}/_SUCCESS"])
        read = _numbers if success["compact"] else _of_pieces
        good, bad = read(files, run, faults)
        data.update(good)
        failed[run] = set(bad)
        if len(failed[run]) != len(bad):
            faults.append(f"{run}: rows are twice in its quarantine")
        wanted = range(rows) if run == base else _taken(files, run)
        if sorted(good + bad) != sorted(wanted):
            lost = sorted({*wanted} - {*good, *bad})
            faults.append(f"{run} holds rows {sorted(good + bad)}; it lacks {lost}")
    faults += [f"row {n} is {times} times in data/" for n, times in data.items() if times > 1]
    for key in sorted(files):
        if key.endswith("/_PARTIAL.json"):
            faults += _partial(files, key, rows)
    taken: Counter[tuple[str, int]] = Counter()
    for run in runs:
        plan = json.loads(files[f"{run}/_raybatch/plan.json"])
        if plan.get("parent"):
            taken.update((plan["parent"], number) for number in _taken(files, run))
    faults += [
        f"row {n} of {run} is retried twice" for (run, n), times in taken.items() if times > 1
    ]
    unknown = [(run, n) for run, n in taken if n not in failed.get(run, ())]
    return faults + [f"row {n} is retried, and did not fail in {run}" for run, n in unknown]


def _partial(files: Mapping[str, bytes], key: str, rows: int) -> list[str]:
    """What is wrong with a partial result: it holds each row that it does not name as missing."""
    told = json.loads(files[key])
    run, _, folder = key.removesuffix("/_PARTIAL.json").partition("/")
    names = [f"{run}/{part['path']}" for part in told["parts"]]
    if any(name not in files for name in names):
        return []  # of a reaper that was told to leave nothing: its readers are told so
    faults: list[str] = []
    inside = {name.removeprefix(f"{run}/{folder}/"): files[name] for name in names}
    good, bad = _numbers({f"{run}/{name}": data for name, data in inside.items()}, run, faults)
    missing = {n for first, last in told["missing"]["ranges"] for n in range(first, last + 1)}
    if sorted(good + bad) != sorted({*range(rows)} - missing) or not missing:
        faults.append(f"{key} holds rows {sorted(good + bad)} and lacks {sorted(missing)}")
    return faults


def _taken(files: Mapping[str, bytes], run: str) -> list[int]:
    """The rows that a retry is about."""
    plan = json.loads(files[f"{run}/_raybatch/plan.json"])
    if not plan.get("numbers_table"):
        return []
    table = pq.read_table(io.BytesIO(files[f"{run}/_raybatch/{plan['numbers_table']}"]))
    return [int(number) for number in table["row"].to_pylist()]


def _numbers(
    files: Mapping[str, bytes], run: str, faults: list[str]
) -> tuple[list[int], list[int]]:
    """Row numbers of data/ and of the quarantine, as anybody reads the folders by a glob."""
    found: dict[str, list[int]] = {"data": [], "_quarantine": []}
    for key in sorted(files):
        folder = key.removeprefix(f"{run}/").partition("/")[0]
        if not key.startswith(f"{run}/") or folder not in found:
            continue
        try:
            rows = table_of(files[key])
        except (pa.ArrowException, OSError) as error:
            faults.append(f"{key} is not readable: {error}")
            continue
        numbers = [row["_row"] for row in rows]
        if numbers != sorted(set(numbers)):
            faults.append(f"{key}: rows {numbers} are not in order")
        found[folder] += numbers
        for number, row in zip(numbers, rows, strict=True):
            faults += _wrong(key, folder, number, row)
    return found["data"], found["_quarantine"]


def _manifest(files: Mapping[str, bytes], run: str) -> list[dict[str, Any]]:
    """Return the pieces that are the result, from the table that _SUCCESS names."""
    name = json.loads(files[f"{run}/_SUCCESS"])["manifest"]
    return table_of(files[f"{run}/_raybatch/{name}"])


def _of_pieces(
    files: Mapping[str, bytes], run: str, faults: list[str]
) -> tuple[list[int], list[int]]:
    """As `_numbers`, of a result that is left as pieces: its manifest names them."""
    found: dict[str, list[int]] = {"data": [], "_quarantine": []}
    taken = _taken(files, run)
    for named in _manifest(files, run):
        key = f"{run}/_raybatch/pieces/{named['piece']}"
        if key not in files:
            faults.append(f"{key}, which the manifest names, is missing")
            continue
        for row in table_of(files[key]):
            at = row["__rb_pos"] + named["start"]
            number = taken[at] if taken else at
            folder = "_quarantine" if "error" in row else "data"
            found[folder].append(number)
            faults += _wrong(key, folder, number, row)
    return found["data"], found["_quarantine"]


def _wrong(key: str, folder: str, number: int, row: dict[str, object]) -> list[str]:
    whose = row if folder == "data" else row["input"]
    assert isinstance(whose, dict)
    if whose["id"] != number or whose["Company"] != f"Company {number}":
        return [f"{key}: row {number} holds the input of row {whose['id']}"]
    if folder == "data":
        match = ANSWER.match(str(row["response"]))
        if match is None or int(match[2]) != number:
            return [f"{key}: row {number} has the answer {row['response']!r}"]
    return []
