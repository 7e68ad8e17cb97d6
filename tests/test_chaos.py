"""The fault campaign's own tests: its checker finds what is planted; a short, fixed-seed part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chaos import checker
from chaos.campaign import _order, main, markdown
from chaos.engine import Fast
from chaos.kinds import load
from chaos.places import Folder
from helpers.processes import until
from programs import require

ROOT = Path(__file__).parent.parent
SEED = 20261121
# (kind, the store that its first trial has). Kills of a driver from outside are for test_e2e.py,
# kills within the ledger for test_simulation.py.
SHORT = (("killed_reusing", "s3"),)


def rows(count: int = 20) -> list[dict[str, Any]]:
    return [{"id": i, "text": f"row {i}"} for i in range(count)]


def result(folder: Path, numbers: list[int], failed: dict[int, str] | None = None) -> Folder:
    """Result files as finalize writes them: `numbers` answered, `failed` in quarantine."""
    given, bad = rows(), failed or {}
    data = [
        {**given[n], "response": checker.fast_answer(given[n]["text"]), "_row": n}
        for n in numbers
        if n not in bad
    ]
    quarantine = [{"error": kind, "input": given[n], "_row": n} for n, kind in bad.items()]
    for kind, table in (("data", data), ("_quarantine", quarantine)):
        if table:
            (folder / kind).mkdir(parents=True)
            pq.write_table(pa.Table.from_pylist(table), folder / kind / "part-00000.parquet")
    return Folder(folder)


def edit(place: Folder, change: Any) -> None:
    path = place.root / "data/part-00000.parquet"
    table = pq.read_table(path).to_pylist()
    change(table)
    pq.write_table(pa.Table.from_pylist(table), path)


def checked(place: Folder, **more: Any) -> checker.Found:
    return checker.check(place, rows(), checker.fast_answer, **more)


def test_checker_accepts_a_whole_result(tmp_path: Path) -> None:
    place = result(tmp_path, [n for n in range(20) if n != 7], {3: "ValueError"})
    found = checked(place, quarantined={3: "ValueError"}, skipped=frozenset({7}))
    assert found.ok and found.rows == 20


def test_checker_finds_a_lost_row(tmp_path: Path) -> None:
    place = result(tmp_path, list(range(20)))
    edit(place, lambda table: table.pop(11))
    found = checked(place)
    assert (found.lost, found.doubled, found.wrong) == (1, 0, 0) and not found.ok
    assert found.faults == ["lost rows [11]"]


def test_checker_finds_a_doubled_row(tmp_path: Path) -> None:
    place = result(tmp_path, list(range(20)))
    edit(place, lambda table: table.insert(5, dict(table[4])))
    found = checked(place)
    assert (found.lost, found.doubled, found.wrong) == (0, 1, 0) and not found.ok
    assert "doubled rows [4]" in found.faults


def test_checker_finds_a_row_that_is_in_data_and_in_quarantine(tmp_path: Path) -> None:
    place = result(tmp_path, list(range(20)))
    path = tmp_path / "_quarantine"
    path.mkdir()
    bad = [{"error": "ValueError", "input": rows()[3], "_row": 3}]
    pq.write_table(pa.Table.from_pylist(bad), path / "part-00000.parquet")
    found = checked(place, quarantined={3: "ValueError"})
    assert found.doubled == 1 and found.wrong == 1


@pytest.mark.parametrize("column", ["response", "text", "id"])
def test_checker_finds_a_changed_row(tmp_path: Path, column: str) -> None:
    place = result(tmp_path, list(range(20)))
    edit(place, lambda table: table[6].update({column: 99 if column == "id" else "other"}))
    found = checked(place)
    assert (found.lost, found.doubled, found.wrong) == (0, 0, 1)
    assert f"row 6: {column} is" in found.faults[0]


def test_checker_finds_rows_out_of_order_and_out_of_range(tmp_path: Path) -> None:
    place = result(tmp_path, list(range(20)))
    edit(place, lambda table: table.insert(3, table.pop(9)))
    assert any("comes after" in fault for fault in checked(place).faults)
    edit(place, lambda table: table[0].update({"_row": 20}))
    assert checked(place).wrong == 1


def test_checker_finds_a_wrong_failure(tmp_path: Path) -> None:
    place = result(tmp_path, list(range(20)), {3: "ValueError"})
    assert checked(place, quarantined={3: "PromptTooLong"}).wrong == 1
    assert checked(place).wrong == 1  # a row that should have been answered


def test_checker_finds_a_torn_file_and_files_that_nothing_explains(tmp_path: Path) -> None:
    place = result(tmp_path, list(range(20)))
    place.write("_SUCCESS", b"")
    assert checker.unexpected_files(place) == []
    place.write("_raybatch/pieces/00000001-x.parquet", b"")
    place.write("data/other", b"")
    assert checker.unexpected_files(place) == ["_raybatch/pieces/00000001-x.parquet", "data/other"]
    whole = place.read("data/part-00000.parquet")
    place.write("data/part-00000.parquet", whole[:-50])
    assert checked(place).lost == 20 and not checked(place).ok


def test_checker_knows_nothing_of_the_package() -> None:
    code = "import sys, chaos.checker; print([m for m in sys.modules if 'raybatch' in m])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_two_hundred_trials_hold_every_kind() -> None:
    kinds = load()
    order = _order(list(kinds.values()), 200)
    assert len(order) == 200 == len(set((kind.name, number) for kind, number in order))
    usable = {name for name, k in kinds.items() if not k.needs_root or os.geteuid() == 0}
    assert {kind.name for kind, _ in order} == usable


def test_the_table_sums_up_and_names_what_failed() -> None:
    record = {"kind": "driver_killed", "number": 0, "seed": "5:driver_killed:0", "store": "s3"}
    record |= {"engine": "fast", "ok": False, "lost": 1, "doubled": 2, "wrong": 0}
    record |= {"again": 30, "bound": 40, "recover": 1.25}
    table = markdown([record, {**record, "number": 1, "ok": True, "recover": None}], load())
    assert "| driver killed (the process) | 2 (2, 0) | 2 | 4 | 0 | 30, 40 | 1.2, 1.2 |" in table
    assert "Seed 5; 2 trials, 1 not ok" in table and "Not ok: driver_killed#0" in table


def test_engines_hold_a_run_that_is_to_be_killed(tmp_path: Path) -> None:
    """As many blocks as they are told to are answered, and the others wait for a word."""

    def order(**orders: Any) -> None:
        (tmp_path / "new").write_text(json.dumps({"sleep": 0, **orders}))
        (tmp_path / "new").replace(tmp_path / "engine.json")

    def block(shard: int) -> int:
        engine.mine.rows = [(shard, at, f"{shard} {at}") for at in range(25)]
        return len(engine.run([SimpleNamespace(prompt_token_ids=[1])] * 25))

    order(most=50)
    engine = Fast(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        blocks = [pool.submit(block, shard) for shard in range(4)]
        try:
            seen = tmp_path / "seen" / str(os.getpid())
            until(lambda: seen.exists() and seen.read_text().count("\n") == 100, 60, "the blocks")
            until(lambda: sum(one.done() for one in blocks) >= 2, 60, "those that are answered")
            assert sum(one.done() for one in blocks) == 2
        finally:
            order(most=None)
    assert [one.result() for one in blocks] == [25] * 4


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_short_campaign(tmp_path: Path) -> None:
    """The same program as `make chaos`, with a fixed seed and one trial."""
    require("ceph")
    out = tmp_path / "chaos.jsonl"
    kinds = ",".join(kind for kind, _ in SHORT)
    given = ("--seed", str(SEED), "--trials", str(len(SHORT)), "--kinds", kinds)
    code = main([*given, "--engine", "fast", "--out", str(out)])
    assert code == 0, out.read_text()
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(r["kind"], r["store"]) for r in records} == set(SHORT)
    assert len(records) == len(SHORT) and all(r["ok"] and r["plan"] for r in records)
    assert not any(r["lost"] or r["doubled"] or r["wrong"] for r in records)
