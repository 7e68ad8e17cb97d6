"""Committed pieces to the result: order, coverage, damage, two finalizers, and the switch-off of
compaction."""

from __future__ import annotations

import io
import os
import random
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import SmallRun, small_run, success_of
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_raybatch.errors import CorruptRun, IncompleteRun
from prefect_raybatch.ledger.layout import RESULT_FOLDERS, commit_path
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.records import Commit, Piece, Receipt, Unit, digest
from prefect_raybatch.result import parts
from prefect_raybatch.result.finalize import Result, finalize, first_rows
from prefect_raybatch.result.pieces import check_commit
from prefect_raybatch.result.reap import orphans


def finish(run: SmallRun, file_bytes: int = 1 << 20, compact: bool = True) -> Result:
    return finalize(run.ledger, run.plan, run.shards, "_row", file_bytes, compact)


def rows_of(run: SmallRun, kind: str) -> pa.Table:
    return pa.concat_tables(
        pq.read_table(path) for path in sorted((run.root / RESULT_FOLDERS[kind]).iterdir())
    )


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for kind in ("data", "_quarantine")
        for p in sorted((folder / kind).rglob("*"))
        if p.is_file()
    }


# --- the result ---------------------------------------------------------------------------------


def test_the_result_is_in_input_order_whatever_order_things_came_in(tmp_path):
    run = small_run(tmp_path, rows=17, per_shard=5)
    for shard in (2, 0, 3, 1):
        run.commit(shard)
    result = finish(run)
    table = rows_of(run, "data")
    assert table["_row"].to_pylist() == table["id"].to_pylist() == list(range(17))
    assert table["response"].to_pylist() == [f"answer {i}" for i in range(17)]
    assert table["tags"].to_pylist() == [[f"t{i}"] for i in range(17)]
    assert table.column_names == ["id", "Company", "tags", "response", "_row"]
    assert result.tally.good == 17 and [p.rows for p in result.parts] == [17]
    assert not (tmp_path / "_quarantine").exists()
    assert run.ledger.finished() is None  # the caller says so, after its report


def test_failed_rows_go_to_quarantine_with_reason_and_input(tmp_path):
    run = small_run(tmp_path)
    run.commit_all({(0, 4), (2, 0), (2, 1)})
    result = finish(run)
    assert (result.tally.good, result.tally.failed) == (17, 3)
    assert rows_of(run, "data")["_row"].to_pylist() == [
        i for i in range(20) if i not in (4, 10, 11)
    ]
    bad = rows_of(run, "quarantine").to_pylist()
    assert [row["_row"] for row in bad] == [4, 10, 11]
    assert bad[0] == {
        "stage": "engine",
        "error": "ValueError",
        "message": "refused",
        "attempts": 1,
        "input": {"id": 4, "Company": "Company 4", "tags": ["t4"]},
        "_row": 4,
    }


def test_skipped_rows_are_in_neither_and_count(tmp_path):
    output = {"uri": "out", "postprocess": "helpers.functions:skip_odd", "columns": []}
    run = small_run(tmp_path, output=output)
    run.commit_all({(0, 1), (3, 4)})
    result = finish(run)
    assert (result.tally.good, result.tally.failed, result.tally.skipped) == (10, 2, 8)
    assert rows_of(run, "data")["even"].to_pylist() == list(range(0, 20, 2))
    assert rows_of(run, "data").column_names == ["even", "_row"]


def test_all_rows_skipped_or_failed_is_a_result_too(tmp_path):
    run = small_run(tmp_path)
    run.commit_all({(s, p) for s in range(4) for p in range(5)})
    result = finish(run)
    assert result.tally.failed == 20 and not (tmp_path / "data").exists()


def test_parts_of_a_shard_are_put_back_in_order(tmp_path):
    run = small_run(tmp_path, rows=10, per_shard=10)
    receipts = [run.receipt(Unit(0, at, n), failed=[5]) for at, n in ((7, 3), (0, 3), (3, 4))]
    run.ledger.commit(run.plan, 10, receipts)
    finish(run)
    assert rows_of(run, "data")["id"].to_pylist() == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert rows_of(run, "quarantine")["_row"].to_pylist() == [5]


def test_rows_reordered_within_a_piece_are_put_back(tmp_path):
    """A stage may send a shard's rows in any order; a piece then holds them in that order."""
    run = small_run(tmp_path, rows=10, per_shard=10)
    order = list(range(10))
    random.Random(3).shuffle(order)
    table = run.block(run.whole(0)).take(pa.array(order))
    (text,) = run.finish()(table)["receipt"].to_pylist()
    run.ledger.commit(run.plan, 10, [Receipt.from_json(text)])
    finish(run)
    assert rows_of(run, "data")["id"].to_pylist() == list(range(10))


def test_part_sizes_follow_the_aim(tmp_path):
    run = small_run(tmp_path, rows=60, per_shard=5)
    run.commit_all()
    sizes = [run.ledger.read_commit(run.plan, s).pieces[0].bytes for s in range(12)]
    aim = 3 * max(sizes) + 10
    result = finish(run, file_bytes=aim)
    assert [p.path for p in result.parts] == [f"data/part-{n:05d}.parquet" for n in range(4)]
    assert [p.rows for p in result.parts] == [15, 15, 15, 15]
    assert rows_of(run, "data")["id"].to_pylist() == list(range(60))
    for part in result.parts:
        data = (tmp_path / part.path).read_bytes()
        assert (part.bytes, part.sha256) == (len(data), digest(data))


def test_a_piece_above_the_aim_is_a_part_of_its_own(tmp_path):
    run = small_run(tmp_path)
    run.commit_all()
    assert [p.rows for p in finish(run, file_bytes=1).parts] == [5, 5, 5, 5]


def test_two_finalizers_write_the_same_bytes(tmp_path):
    run = small_run(tmp_path, rows=40, per_shard=4)
    run.commit_all({(1, 1), (7, 3)})
    first = finish(run, file_bytes=9000)
    before = tree(tmp_path)
    assert len(before) >= 3
    second = finish(run, file_bytes=9000)
    assert tree(tmp_path) == before
    assert first.parts == second.parts


def test_a_shard_of_one_piece_is_a_row_group_of_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "LEAST_GROUP_ROWS", 4)
    run = small_run(tmp_path, rows=12, per_shard=4)
    for shard in range(3):
        run.commit(shard)
    pieces = [path.read_bytes() for path in run.root.rglob("pieces/*.parquet")]
    assert len(pieces) == 3
    (part,) = finish(run).parts
    whole = (run.root / part.path).read_bytes()
    for piece in pieces:
        group = pq.read_metadata(io.BytesIO(piece)).row_group(0)
        for column in [group.column(n) for n in range(1, group.num_columns)]:
            start = column.dictionary_page_offset or column.data_page_offset
            assert piece[start : start + column.total_compressed_size] in whole


def test_shards_of_few_rows_share_a_row_group(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "LEAST_GROUP_ROWS", 5)
    monkeypatch.setattr(parts, "GATHERED", np.array([8, 1 << 20]))
    run = small_run(tmp_path, rows=40, per_shard=5)
    run.commit_all({(1, 1), (3, 3), (4, 0), (5, 2), (6, 0)})  # 5 4 5 4 4 4 4 5 good ones
    finish(run)

    def groups(kind):
        (path,) = sorted(run.root.glob(f"{kind}/*.parquet"))
        found = pq.read_metadata(path)
        return [found.row_group(n).num_rows for n in range(found.num_row_groups)]

    assert groups("data") == [5, 4, 5, 8, 8, 5] and groups("_quarantine") == [5]
    rows = rows_of(run, "data")["id"].to_pylist()
    assert rows == [n for n in range(40) if n not in (6, 18, 20, 27, 30)]


@settings(max_examples=10)
@given(
    rows=st.integers(1, 40),
    per_shard=st.integers(1, 15),
    failed=st.sets(st.integers(0, 39), max_size=8),
    file_bytes=st.sampled_from([1, 5000, 1 << 20]),
    least=st.sampled_from([1, 4, 1000]),
    gathered=st.sampled_from([5, 10_000]),
)
def test_any_run_comes_out_whole_and_in_order(
    tmp_path_factory, rows, per_shard, failed, file_bytes, least, gathered
):
    run = small_run(tmp_path_factory.mktemp("run"), rows=rows, per_shard=per_shard)
    size = run.plan.rows_per_shard
    failed = {i for i in failed if i < rows}
    run.commit_all({divmod(i, size) for i in failed})
    with (
        mock.patch.object(parts, "LEAST_GROUP_ROWS", least),
        mock.patch.object(parts, "GATHERED", np.array([gathered, 1 << 20])),
    ):
        finish(run, file_bytes)
    found = {}
    for kind in ("data", "quarantine"):
        if (run.root / RESULT_FOLDERS[kind]).exists():
            found[kind] = rows_of(run, kind)["_row"].to_pylist()
    assert found.get("quarantine", []) == sorted(failed)
    assert found.get("data", []) == [i for i in range(rows) if i not in failed]


# --- what is refused ----------------------------------------------------------------------------


def test_an_unfinished_run_is_not_finalized(tmp_path):
    run = small_run(tmp_path)
    run.commit(0)
    run.commit(3)
    with pytest.raises(IncompleteRun, match=r"2 of 4 shards are not committed \(first: 1\)"):
        finish(run)
    assert not (tmp_path / "data").exists()


def damage_missing(path: Path) -> None:
    path.unlink()


def damage_truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_emptied(path: Path) -> None:
    path.write_bytes(b"")


def damage_edited(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def damage_rewritten(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)


@pytest.mark.parametrize(
    "damage",
    [damage_missing, damage_truncated, damage_emptied, damage_edited, damage_rewritten],
)
@pytest.mark.parametrize("kind", ["data", "quarantine"])
def test_a_damaged_piece_is_named(tmp_path, damage, kind):
    run = small_run(tmp_path)
    run.commit_all({(2, 1)})
    (piece,) = [p for p in run.ledger.read_commit(run.plan, 2).pieces if p.kind == kind]
    damage(tmp_path / "_raybatch/pieces" / piece.path)
    with pytest.raises(CorruptRun) as caught:
        finish(run)
    assert piece.path in str(caught.value) and "shard 2" in str(caught.value)


def rewrite(run: SmallRun, commit: Commit, table: pa.Table, positions) -> None:
    """Puts `table` in the place of the commit's only piece, with records that agree in size and
    hash: only reading the rows can tell."""
    out = io.BytesIO()
    pq.write_table(table, out)
    data = out.getvalue()
    piece = Piece("00000001-ff.parquet", "data", table.num_rows, len(data), digest(data), positions)
    run.store.put(f"_raybatch/pieces/{piece.path}", data)
    path = run.root / commit_path(commit.shard)
    path.write_bytes(replace(commit, pieces=(piece,)).to_bytes())


def test_rows_in_a_piece_are_believed_and_not_the_record(tmp_path):
    run = small_run(tmp_path)
    run.commit_all()
    commit = run.ledger.read_commit(run.plan, 1)
    table = pq.read_table(tmp_path / "_raybatch/pieces" / commit.pieces[0].path)
    doubled = pa.concat_tables([table.slice(0, 4), table.slice(3, 1)])
    rewrite(run, commit, doubled, commit.good)
    with pytest.raises(CorruptRun, match=r"shard 1.*positions"):
        finish(run)
    rewrite(run, commit, table.drop_columns(["__rb_pos"]), commit.good)
    with pytest.raises(CorruptRun, match=r"00000001-ff\.parquet"):
        finish(run)


@pytest.mark.parametrize(
    "change",
    [
        {"good": Positions.spans((0, 4))},
        {"good": Positions.spans((0, 6))},
        {"skipped": Positions.spans((0, 5))},
        {"pieces": ()},
        {"good": Positions.spans((0, 4)), "failed": Positions.spans((4, 5))},
    ],
)
def test_a_commit_that_does_not_add_up_is_named(tmp_path, change):
    run = small_run(tmp_path)
    run.commit_all()
    commit = replace(run.ledger.read_commit(run.plan, 1), **change)
    with pytest.raises(CorruptRun, match="shard 1"):
        check_commit(commit, 5)
    (tmp_path / commit_path(1)).write_bytes(commit.to_bytes())
    for compact in (True, False):
        with pytest.raises(CorruptRun, match="shard 1"):
            finish(run, compact=compact)


# --- pieces -------------------------------------------------------------------------------------


def test_pieces_go_only_after_success(tmp_path):
    run = small_run(tmp_path)
    run.commit_all()
    run.receipt(run.whole(0))  # a piece that nobody committed
    result = finish(run)
    names = [info.path for info in orphans(run.ledger, run.plan)]
    assert len(names) == 1 and "/00000000-" in names[0]  # its shard has a commit that names another
    run.ledger.succeed(success_of(run, result.parts))
    assert len(list(orphans(run.ledger, run.plan))) == 5
    run.store.delete([info.path for info in orphans(run.ledger, run.plan)])
    assert list(orphans(run.ledger, run.plan)) == []
    assert rows_of(run, "data").num_rows == 20


def test_without_compaction_a_manifest_names_the_pieces_in_input_order(tmp_path):
    run = small_run(tmp_path)
    run.commit_all({(2, 0)})
    result = finish(run, compact=False)
    assert result.parts == [] and not (tmp_path / "data").exists()
    pieces = pq.read_table(tmp_path / "_raybatch" / result.manifest).to_pylist()
    assert [(p["shard"], p["start"]) for p in pieces] == [(0, 0), (1, 5), (2, 10), (2, 10), (3, 15)]
    named = [pq.read_table(tmp_path / "_raybatch/pieces" / p["piece"]) for p in pieces]
    assert sum(table.num_rows for table in named) == 20


def test_a_sample_is_the_first_rows(tmp_path):
    run = small_run(tmp_path)
    run.commit_all()
    result = finish(run)
    table = first_rows(run.store, [part.path for part in result.parts], 3)
    assert table["id"].to_pylist() == [0, 1, 2]
    assert first_rows(run.store, [], 3) is None
