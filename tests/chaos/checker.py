"""The independent checker: reads the input and the result files, and nothing of the package.

It does not import prefect_raybatch, does not read plan, commits or _SUCCESS, and knows only what
the result promises: a file set under data/ and _quarantine/, each row with its number in the input.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .places import Place

ROW = "_row"
MOST_NAMED = 10
_OF_A_RUN = (
    r"_SUCCESS|(data|_quarantine)/part-\d{5}\.parquet"
    r"|_raybatch/(plan|planned_by|last_attempt|precision|report|answers)\.json"
    r"|_raybatch/report\.(md|html)"
    r"|_raybatch/output_schema\.arrow|_raybatch/layout\.json"
    r"|_raybatch/(shards|files|places|weights|layout|parts|uris)-[0-9a-f]+\.parquet"
    r"|_raybatch/commits/\d{8}\.json|_raybatch/(attempts|heartbeats)/[0-9a-f]{32}\.json"
    r"|_raybatch/checkpoints/.*|_raybatch/row_sums/(data|_quarantine)-part-\d{5}\.parquet"
    r"|_raybatch/(input|reused)/[^.].*"
)
EXPECTED_FILES = re.compile(
    rf"{_OF_A_RUN}|_raybatch/published/[A-Za-z0-9._-]+\.json|_raybatch/asks/({_OF_A_RUN})"
)


@dataclass
class Found:
    """What is wrong with a result; all zero and empty when it is whole."""

    rows: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    faults: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        if len(self.faults) < MOST_NAMED:
            self.faults.append(text)

    @property
    def ok(self) -> bool:
        return not (self.lost or self.doubled or self.wrong or self.faults)


def fast_answer(text: str) -> str:
    """The fast engine's answer, written down a second time on purpose."""
    return "re:" + hashlib.sha256(text.encode()).hexdigest()[:16]


def read_input(data: bytes, kind: str) -> list[dict[str, Any]]:
    """The rows of one input file: `kind` is parquet, csv or jsonl."""
    if kind == "parquet":
        return pq.read_table(io.BytesIO(data)).to_pylist()
    text = data.decode("utf-8-sig")
    if kind == "csv":
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        return [{**row, "id": int(row["id"])} for row in rows]
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def check(
    place: Place,
    rows: list[dict[str, Any]],
    answer: Callable[[str], str | None],
    quarantined: Mapping[int, str] | None = None,
    skipped: frozenset[int] = frozenset(),
    shape: Callable[[dict[str, Any]], dict[str, Any]] = lambda row: row,
) -> Found:
    """Compares a result with its input, row by row.

    `rows` in input order; `answer(text)` is the right response; `quarantined` maps the number of
    each row that must have failed to a regular expression for its error class; `skipped` rows must
    be in neither set; `shape` makes the expected result row from the input row with its response.
    """
    found = Found(rows=len(rows))
    failed = dict(quarantined or {})
    seen: Counter[int] = Counter()
    for kind in ("data", "_quarantine"):
        last = -1
        for name in sorted(n for n in place.names(kind) if n.endswith(".parquet")):
            try:
                table = pq.read_table(io.BytesIO(place.read(name)))
            except (pa.ArrowException, OSError) as error:
                found.fault(f"{name} is not readable: {error}")
                continue
            if ROW not in table.column_names:
                found.fault(f"{name} has no column {ROW}")
                continue
            for row in to_rows(table):
                number = row.pop(ROW)
                if not isinstance(number, int) or not 0 <= number < len(rows):
                    found.wrong += 1
                    found.fault(f"{name}: row number {number} is not of the input")
                    continue
                seen[number] += 1
                if number <= last:
                    found.fault(f"{name}: row {number} comes after row {last}")
                last = number
                if kind == "_quarantine":
                    why = _failed(row, rows[number]) or _class(row, failed.get(number))
                elif number in failed or number in skipped:
                    why = "should not have been answered"
                else:
                    given = {**rows[number], "response": answer(str(rows[number]["text"]))}
                    why = _data(row, shape(given))
                if why:
                    found.wrong += 1
                    found.fault(f"{name}: row {number}: {why}")
    lost = [n for n in range(len(rows)) if not seen[n] and n not in skipped]
    twice = [n for n, times in seen.items() if times > 1]
    found.lost, found.doubled = len(lost), sum(seen[n] - 1 for n in twice)
    if lost:
        found.fault(f"lost rows {lost[:5]}")
    if twice:
        found.fault(f"doubled rows {twice[:5]}")
    return found


def to_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Like to_pylist, with bytes that are no UTF-8 as os.fsdecode gives them."""
    try:
        return table.to_pylist()
    except UnicodeDecodeError:
        columns = {name: _values(table[name].combine_chunks()) for name in table.column_names}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _values(column: pa.Array) -> list[Any]:
    if pa.types.is_struct(column.type):
        names = [field.name for field in column.type]
        fields = [_values(column.field(i)) for i in range(len(names))]
        return [dict(zip(names, row, strict=True)) for row in zip(*fields, strict=True)]
    if not pa.types.is_string(column.type):
        return column.to_pylist()
    raw = column.cast(pa.binary()).to_pylist()
    return [None if text is None else text.decode(errors="surrogateescape") for text in raw]


def _data(row: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    if row == wanted:
        return None
    odd = {k for k in row.keys() | wanted.keys() if row.get(k) != wanted.get(k)}
    name = min(odd) if odd else "its columns"
    return f"{name} is {str(row.get(name))[:60]!r}, not {str(wanted.get(name))[:60]!r}"


def _failed(row: dict[str, Any], given: dict[str, Any]) -> str | None:
    if row.get("input") != given:
        return "the quarantined input is not the input's row"
    return None


def _class(row: dict[str, Any], wanted: str | None) -> str | None:
    if wanted is None:
        return f"should be answered, failed with {row.get('error')}: {str(row.get('message'))[:80]}"
    if not re.fullmatch(wanted, str(row.get("error"))):
        return f"failed with {row.get('error')}, not {wanted}"
    return None


def unexpected_files(place: Place) -> list[str]:
    """Files of a finished run that nothing explains."""
    return sorted(n for n in place.names("") if not EXPECTED_FILES.fullmatch(n))
