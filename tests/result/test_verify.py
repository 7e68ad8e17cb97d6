"""`verify` finds every way a finished run can be wrong, and names the row or the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import SmallRun, read_json, small_run, success_of

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.layout import commit_path, row_sums_path
from prefect_raybatch.ledger.records import Part, digest
from prefect_raybatch.result.finalize import finalize
from prefect_raybatch.result.reap import orphans
from prefect_raybatch.result.verify import MOST_NAMED, Verdict, verify
from prefect_raybatch.storage import open_store

FAILED = {(0, 4), (2, 1)}  # input rows 4 and 11


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    """A finished run of 20 rows: 18 in two data files, 2 in quarantine."""
    made = small_run(tmp_path, rows=20, per_shard=5)
    made.commit_all(FAILED)
    size = max(p.bytes for s in range(4) for p in made.ledger.read_commit(made.plan, s).pieces)
    close(made, finalize(made.ledger, made.plan, made.shards, "_row", 2 * size - 1).parts)
    made.store.delete([info.path for info in orphans(made.ledger, made.plan)])
    return made


def close(run: SmallRun, parts: list[Part], **more: bool) -> None:
    run.ledger.succeed(success_of(run, parts, **more))


def look(run: SmallRun) -> Verdict:
    return verify(open_store(str(run.root)))


def edit(run: SmallRun, name: str, change: Callable[[pa.Table], pa.Table], tell: bool) -> None:
    """Rewrites a file of the result; `tell` makes _SUCCESS agree, so that only rows can show it."""
    path = run.root / name
    pq.write_table(change(pq.read_table(path)), path)
    if tell:
        success = read_json(run.root / "_SUCCESS")
        (part,) = [p for p in success["parts"] if p["path"] == name]
        part["sha256"] = digest(path.read_bytes())
        (run.root / "_SUCCESS").write_text(json.dumps(success))


PARTS = ["data/part-00000.parquet", "data/part-00001.parquet"]


def test_a_whole_run_is_proved_without_its_pieces(run):
    found = look(run)
    assert found.ok and found.faults == []
    assert (found.rows, found.data, found.quarantined, found.skipped) == (20, 18, 2, 0)
    assert (found.committed_shards, found.shards) == (4, 4)
    assert json.loads(json.dumps(found.to_dict()))["ok"] is True
    assert sorted(p.name for p in (run.root / "data").iterdir()) == [Path(p).name for p in PARTS]


def test_rows_left_out_on_purpose_are_proved(tmp_path):
    output = {"uri": "out", "postprocess": "helpers.functions:skip_odd"}
    run = small_run(tmp_path, output=output)
    run.commit_all(FAILED)
    close(run, finalize(run.ledger, run.plan, run.shards, "_row", 1 << 20).parts)
    found = look(run)
    assert found.ok
    assert (found.data, found.quarantined, found.skipped) == (9, 2, 9)


@pytest.mark.parametrize("name", [*PARTS, "_quarantine/part-00000.parquet"])
def test_a_deleted_file(run, name):
    gone = pq.read_table(run.root / name)["_row"].to_pylist()
    (run.root / name).unlink()
    found = look(run)
    assert not found.ok
    assert any(f"{name}: the file is missing" in fault for fault in found.faults)
    assert any(f"rows {gone[0]} to " in fault and "missing" in fault for fault in found.faults)


@pytest.mark.parametrize("size", [0, 3, -1])
def test_a_truncated_file(run, size):
    path = run.root / PARTS[1]
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    found = look(run)
    assert not found.ok
    assert any(PARTS[1] in fault and "contents" in fault for fault in found.faults)
    assert any("are missing" in fault for fault in found.faults)


@pytest.mark.parametrize("kept", [True, False])
def test_an_edited_answer(run, kept):
    """No row number changes, so only the checksums can tell; those a row say which."""
    first = pq.read_table(run.root / PARTS[0])["_row"][0].as_py()

    def change(table: pa.Table) -> pa.Table:
        answers = ["other", *table["response"].to_pylist()[1:]]
        return table.set_column(table.column_names.index("response"), "response", pa.array(answers))

    edit(run, PARTS[0], change, tell=False)
    said = f"{PARTS[0]}: its contents are not what finalize wrote"
    if not kept:  # lost, or of a version that kept none
        (run.root / row_sums_path(PARTS[0])).unlink()
        found = look(run)
        assert found.faults[1] == said and "cannot be named" in found.faults[0]
    else:
        found = look(run)
        assert found.faults == [f"{said}; changed: row {first}"]
    assert not found.ok


def test_many_edited_rows_a_lost_one_and_a_strange_one(run):
    def change(table: pa.Table) -> pa.Table:
        answers = pa.array(["other"] * table.num_rows)
        table = table.set_column(table.column_names.index("response"), "response", answers)
        number = table.column_names.index("_row")
        rows = table["_row"].to_pylist()
        return table.set_column(number, "_row", pa.array([*rows[:-1], 77]))

    rows = pq.read_table(run.root / PARTS[1])["_row"].to_pylist()
    edit(run, PARTS[1], change, tell=False)
    faults = look(run).faults
    shown = ", ".join(str(row) for row in rows[:-1])
    assert faults[0] == (
        f"{PARTS[1]}: its contents are not what finalize wrote; changed: rows {shown}; missing: "
        f"row {rows[-1]}; added: row 77"
    )


def test_a_file_written_anew_with_the_same_rows(run):
    edit(run, PARTS[0], lambda table: table.replace_schema_metadata({"by": "hand"}), tell=False)
    (fault,) = look(run).faults
    assert fault.endswith("the rows are the same: the file was rewritten")


def test_a_run_of_a_version_without_row_checksums(run):
    success = read_json(run.root / "_SUCCESS")
    for part in success["parts"]:
        for name in ("first", "last", "sums"):
            del part[name]
    (run.root / "_SUCCESS").write_text(json.dumps(success))
    assert look(run).ok
    edit(run, PARTS[0], lambda table: table.slice(0, 3), tell=False)
    assert look(run).faults[0] == f"{PARTS[0]}: its contents are not what finalize wrote"


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "data/../../x", "data/", "data/.x", 7]
)
def test_success_cannot_name_a_file_elsewhere(run, path):
    success = read_json(run.root / "_SUCCESS")
    success["parts"][0]["path"] = path
    (run.root / "_SUCCESS").write_text(json.dumps(success))
    with pytest.raises(CorruptRun, match=r"not a file of the result|path is '7'"):
        look(run)


# --- pieces of a run that is not finished -------------------------------------------------------


def test_a_commit_that_names_a_missing_or_other_piece_names_its_rows(tmp_path):
    run = small_run(tmp_path, rows=20, per_shard=5)
    for shard in range(3):
        run.commit(shard, failed=[2])
    orphan = run.finish()(run.block(run.whole(3)))  # a piece and a receipt, and no commit
    assert orphan.num_rows == 1
    pieces = [
        {p.kind: p.path for p in run.ledger.read_commit(run.plan, shard).pieces}
        for shard in range(3)
    ]
    folder = tmp_path / "_raybatch/pieces"
    found = look(run)
    assert [f for f in found.faults if not f.startswith("not finished")] == []
    assert (found.orphans, found.data, found.quarantined) == (1, 12, 3)
    (name,) = found.orphan_names
    assert name.startswith("_raybatch/pieces/00000003-") and found.orphan_bytes > 100

    (folder / pieces[0]["data"]).unlink()
    os.truncate(folder / pieces[1]["quarantine"], 10)
    data = bytearray((folder / pieces[2]["data"]).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / pieces[2]["data"]).write_bytes(bytes(data))
    faults = look(run).faults
    assert any(
        pieces[0]["data"] in f and "is missing" in f and "rows 0 to 1, 3 to 4" in f for f in faults
    )
    assert any(
        pieces[1]["quarantine"] in f and "has 10 bytes" in f and "7 to 7" in f for f in faults
    )
    assert any(
        pieces[2]["data"] in f and "is not what was committed" in f and "0 to 1, 3 to 4" in f
        for f in faults
    )


def test_a_flipped_byte(run):
    path = run.root / PARTS[0]
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(bytes(data))
    assert not look(run).ok


def test_a_doubled_row_is_named(run):
    edit(run, PARTS[1], lambda t: pa.concat_tables([t.slice(0, 2), t.slice(1)]), tell=True)
    row = pq.read_table(run.root / PARTS[1])["_row"][1].as_py()
    found = look(run)
    assert found.faults == [f"{PARTS[1]}: more than once in this file: row {row}"]


def test_a_row_in_two_files_is_named_with_both(run):
    first = pq.read_table(run.root / PARTS[0])
    edit(run, PARTS[1], lambda t: pa.concat_tables([first.slice(1, 1), t]), tell=True)
    row = first["_row"][1].as_py()
    (fault,) = look(run).faults
    assert f"row {row} is in both" in fault and PARTS[0] in fault and PARTS[1] in fault


def test_a_row_in_data_and_quarantine_is_named(run):
    def change(table: pa.Table) -> pa.Table:
        numbers = pa.array([11, *table["_row"].to_pylist()[1:]], pa.int64())
        return table.set_column(table.column_names.index("_row"), "_row", numbers)

    edit(run, "_quarantine/part-00000.parquet", change, tell=True)  # was 4
    text = "\n".join(look(run).faults)
    assert "row 11" in text and "rows 4 to 4 are missing" in text


def test_a_missing_row_is_named(run):
    row = pq.read_table(run.root / PARTS[0])["_row"][2].as_py()
    edit(run, PARTS[0], lambda t: pa.concat_tables([t.slice(0, 2), t.slice(3)]), tell=True)
    assert look(run).faults == [f"rows {row} to {row} are missing"]


def test_the_last_row_missing_is_named(run):
    name = sorted(f"data/{p.name}" for p in (run.root / "data").iterdir())[-1]
    edit(run, name, lambda t: t.slice(0, t.num_rows - 1), tell=True)
    assert look(run).faults == ["rows 19 to 19 are missing"]


def test_a_row_beyond_the_plan_is_named(run):
    name = sorted(f"data/{p.name}" for p in (run.root / "data").iterdir())[-1]

    def change(table: pa.Table) -> pa.Table:
        last = table.slice(table.num_rows - 1)
        last = last.set_column(last.column_names.index("_row"), "_row", pa.array([20], pa.int64()))
        return pa.concat_tables([table, last])

    edit(run, name, change, tell=True)
    (fault,) = look(run).faults
    assert name in fault and "row 20 is beyond the planned 20 rows" in fault


def test_a_commit_beyond_the_plan_is_a_finding(run):
    last = run.plan.shards
    (run.root / commit_path(last)).write_bytes((run.root / commit_path(0)).read_bytes())
    edit(run, PARTS[0], lambda t: t.slice(0, t.num_rows - 1), tell=True)
    verdict = look(run)
    assert f"{commit_path(last)} is beyond the last shard" in verdict.faults[0]
    assert "missing" in verdict.faults[1] and verdict.committed_shards == run.plan.shards


def test_rows_out_of_order_are_told(run):
    edit(run, PARTS[0], lambda t: pa.concat_tables([t.slice(2), t.slice(0, 2)]), tell=True)
    (fault,) = look(run).faults
    assert PARTS[0] in fault and "out of order" in fault


@pytest.mark.parametrize("name", ["data/part-99999.parquet", "data/x.txt", "_quarantine/more"])
def test_a_file_nobody_wrote_is_told(run, name):
    (run.root / name).write_bytes(b"x")
    (fault,) = look(run).faults
    assert fault.startswith(f"{name}: _SUCCESS does not name this file")


@pytest.mark.parametrize("how", ["dropped", "nulls", "text"])
def test_a_lost_row_number_column_is_told(run, how):
    def change(table: pa.Table) -> pa.Table:
        rest = table.drop_columns(["_row"])
        if how == "dropped":
            return rest
        values = [None] * table.num_rows if how == "nulls" else ["x"] * table.num_rows
        kind = pa.int64() if how == "nulls" else pa.string()
        return rest.append_column("_row", pa.array(values, kind))

    edit(run, PARTS[0], change, tell=True)
    found = look(run)
    assert not found.ok and PARTS[0] in found.faults[0] and "_row" in found.faults[0]


def test_an_unfinished_run_is_never_proved(tmp_path):
    run = small_run(tmp_path)
    assert look(run).faults == ["not finished: 4 of 4 shards are not committed"]
    run.commit_all()
    found = look(run)
    assert not found.ok and not found.finished
    assert found.faults == ["not finished: 0 of 4 shards are not committed"]


def test_a_commit_that_does_not_add_up_is_told(run):
    path = run.root / commit_path(1)
    value = read_json(path)
    value["rows"] = 4
    path.write_text(json.dumps(value))
    found = look(run)
    assert not found.ok and "shard 1" in found.faults[0]


def test_a_commit_of_another_plan_is_told(run):
    path = run.root / commit_path(1)
    path.write_text(json.dumps({**read_json(path), "plan_hash": "0" * 64}))
    assert "another plan" in look(run).faults[0]


def test_a_missing_commit_is_told(run):
    (run.root / commit_path(1)).unlink()
    found = look(run)
    assert found.faults == ["commits of 1 of 4 shards are missing"] and not found.ok


def test_without_compaction_the_pieces_are_what_is_checked(tmp_path):
    run = small_run(tmp_path)
    run.commit_all(FAILED)
    close(run, finalize(run.ledger, run.plan, run.shards, "_row", 1, False).parts, compact=False)
    found = look(run)
    assert found.ok and (found.data, found.quarantined) == (18, 2)
    piece = run.ledger.read_commit(run.plan, 3).pieces[0].path
    (tmp_path / "_raybatch/pieces" / piece).unlink()
    found = look(run)
    assert not found.ok and piece in found.faults[0] and "missing" in found.faults[0]
    assert found.data == 13


def test_many_faults_are_cut_short(run):
    for number in range(MOST_NAMED + 5):
        (run.root / f"data/extra-{number:03d}").write_bytes(b"")
    found = look(run)
    assert len(found.faults) == MOST_NAMED + 1 and found.faults[-1] == "... and more"


@pytest.mark.parametrize("damage", ["no plan", "broken plan", "broken success", "other success"])
def test_what_is_no_run_is_a_corrupt_run(run, damage):
    plan, success = run.root / "_raybatch/plan.json", run.root / "_SUCCESS"
    if damage == "no plan":
        plan.unlink()
    elif damage == "broken plan":
        plan.write_bytes(plan.read_bytes()[:-20])
    elif damage == "broken success":
        success.write_bytes(b"")
    else:
        success.write_text('{"parts": [{"path": "data/part-00000.parquet"}]}')
    with pytest.raises(CorruptRun):
        look(run)
