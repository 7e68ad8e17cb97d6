"""Faults planted in a run directory and in its store: found before anything is deleted, named,
and mended where the rows are still there."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import SmallRun, read_json, small_run
from helpers.specs import reads
from s3server import S3Server, proxy

from prefect_raybatch import source
from prefect_raybatch.api import finalize_run
from prefect_raybatch.errors import CorruptRun, RayBatchError, is_transient
from prefect_raybatch.ledger.family import load_family
from prefect_raybatch.ledger.layout import COMMITS, commit_path, row_sums_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Receipt, digest
from prefect_raybatch.result.finalize import finalize
from prefect_raybatch.result.parquet_footer import footer_figures, footer_of
from prefect_raybatch.result.reap import reap
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.run import Run, run_of
from prefect_raybatch.runs.status import report_of, status
from prefect_raybatch.storage import FileInfo, LocalStore, Store, open_store

NOW = -60.0  # "older than": everything that is there, whatever a clock's resolution
FAILED = {(0, 4), (2, 1)}
Damage = Callable[[Path], None]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = [truncated, flipped, emptied]
OPENER = "prefect_raybatch.api.open_store"


class Spoils(LocalStore):
    """A store that answers well, and keeps other bytes of the first `times` files that fit."""

    def __init__(self, root: Path, fits: str, damage: Damage, times: int = 1) -> None:
        super().__init__(str(root))
        self.fits, self.damage, self.left = re.compile(fits), damage, times

    def _spoil(self, path: str) -> None:
        if self.left and self.fits.search(path):
            self.left -= 1
            kept = Path(self.uri) / path
            shutil.copy(kept, f"{kept}.spoiled")  # not in place: the local file may be linked
            self.damage(Path(f"{kept}.spoiled"))
            Path(f"{kept}.spoiled").rename(kept)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        won = super().put_if_absent(path, data)
        if won:
            self._spoil(path)
        return won

    def put(self, path: str, data: bytes) -> FileInfo:
        info = super().put(path, data)
        self._spoil(path)
        return info

    def put_file(self, path: str, local_path: Any) -> FileInfo:
        info = super().put_file(path, local_path)
        self._spoil(path)
        return info

    def put_file_if_absent(self, path: str, local_path: Any) -> bool:
        made = super().put_file_if_absent(path, local_path)
        self._spoil(path)
        return made

    def replace_file(self, path: str, local_path: Any, expected: FileInfo) -> bool:
        made = super().replace_file(path, local_path, expected)
        self._spoil(path)
        return made


def end(run: SmallRun, monkeypatch: Any = None, store: Store | None = None) -> Any:
    """`finalize_run`, through `store` where one is given."""
    if store is not None:
        monkeypatch.setattr(OPENER, lambda uri, options=None: store)
    uri = open_store(str(run.root)).uri
    job = run.job.model_copy(update={"output": run.job.output.model_copy(update={"uri": "x"})})
    found = Run(uri, "key", run.plan.hash, run.plan.rows, run.plan.shards, False)
    return finalize_run(job, found)


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def pieces_of(run: SmallRun) -> list[str]:
    return sorted(p.name for p in (run.root / "_raybatch/pieces").glob("*"))


def committed(folder: Path, **groups: Any) -> SmallRun:
    run = small_run(folder, **groups)
    run.commit_all(FAILED)
    return run


def cut_short(folder: Path, monkeypatch: pytest.MonkeyPatch, **groups: Any) -> SmallRun:
    """A run that was killed between `_SUCCESS` and the removal of its pieces."""
    run = committed(folder, **groups)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", lambda self, paths: None)
        end(run)
    assert len(pieces_of(run)) == 6 and (folder / "_SUCCESS").exists()
    return run


# --- _SUCCESS -----------------------------------------------------------------------------------

READERS: dict[str, Callable[[SmallRun], Any]] = {
    "finalize": end,
    "reap": lambda run: reap(run.store, NOW),
    "verify": lambda run: verify(run.store),
    "status": lambda run: status(str(run.root)),
    "report": lambda run: report_of(str(run.root)),
    "family": lambda run: load_family(open_store(str(run.root.parent)), "key"),
    "plan": lambda run: run_of(run.store, run.plan, run.ledger),
    "alone": lambda run: Ledger(run.store).finished(),
}


@pytest.mark.parametrize(
    ("body", "reader"),
    [
        *(("{}", reader) for reader in READERS),
        *((body, "finalize") for body in ("", "[]", "{", '{"rows": 20}', '{"plan": 7}')),
    ],
)
def test_a_success_that_is_none_deletes_nothing(tmp_path, body, reader):
    run = committed(tmp_path / "key")
    (run.root / "_SUCCESS").write_text(body)
    before = tree(run.root)
    with pytest.raises(CorruptRun, match="_SUCCESS"):
        READERS[reader](run)
    assert tree(run.root) == before


@pytest.mark.parametrize(
    ("begun", "reader"),
    [*((False, reader) for reader in READERS), (True, "finalize"), (True, "family")],
)
def test_the_success_of_another_plan_is_told_with_both(tmp_path, reader, begun):
    """Even with its data beside it, which have the very rows that this plan has."""
    old, run = committed(tmp_path / "old"), small_run(tmp_path / "key", per_shard=4)
    end(old)
    if not begun:
        run.commit_all()
    for name in ("_SUCCESS", "data", "_quarantine", "_raybatch/report.json", "_raybatch/row_sums"):
        copy = shutil.copytree if (old.root / name).is_dir() else shutil.copy
        copy(old.root / name, run.root / name)
    before = tree(run.root)
    with pytest.raises(CorruptRun) as caught:
        READERS[reader](run)
    said = str(caught.value)
    assert old.plan.hash[:12] in said and run.plan.hash[:12] in said and "_SUCCESS" in said
    assert "othing was deleted" in said and tree(run.root) == before


def test_a_success_without_a_plan_beside_it_is_told(tmp_path):
    (tmp_path / "_SUCCESS").write_text("{}")
    with pytest.raises(CorruptRun, match=r"_SUCCESS.*no _raybatch/plan\.json"):
        Ledger(open_store(str(tmp_path))).finished()


def test_a_success_names_its_plan_and_ends_the_run(tmp_path, monkeypatch):
    run = cut_short(tmp_path, monkeypatch)
    assert read_json(tmp_path / "_SUCCESS")["plan"] == run.plan.hash
    assert end(run).state == "completed"
    assert pieces_of(run) == [] and verify(run.store).ok


def gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("remover", ["finalize", "reap"])
@pytest.mark.parametrize(
    ("damage", "name"),
    [(gone, "data/part-00000.parquet"), (truncated, "_quarantine/part-00000.parquet")],
)
def test_pieces_stay_while_a_part_is_not_there(tmp_path, monkeypatch, remover, damage, name):
    run = cut_short(tmp_path, monkeypatch)
    damage(tmp_path / name)
    with pytest.raises(CorruptRun, match=name):
        READERS[remover](run)
    assert len(pieces_of(run)) == 6


@pytest.mark.parametrize("change", [{"data": 17}, {"rows": 19}, {"skipped": 1}, {"parts": []}])
def test_a_success_whose_rows_do_not_add_up(tmp_path, monkeypatch, change):
    run = cut_short(tmp_path, monkeypatch)
    value = {**read_json(tmp_path / "_SUCCESS"), **change}
    (tmp_path / "_SUCCESS").write_text(json.dumps(value))
    for read in (end, READERS["verify"], READERS["reap"]):
        with pytest.raises(CorruptRun, match=r"_SUCCESS.*rows"):
            read(run)
    assert len(pieces_of(run)) == 6


def test_a_success_that_names_no_plan_is_refused_and_nothing_is_deleted(tmp_path, monkeypatch):
    run = cut_short(tmp_path, monkeypatch)
    value = read_json(tmp_path / "_SUCCESS")
    del value["plan"]
    (tmp_path / "_SUCCESS").write_text(json.dumps(value))
    for read in (end, READERS["verify"], READERS["reap"]):
        with pytest.raises(CorruptRun, match="_SUCCESS is malformed: plan is missing"):
            read(run)
    assert len(pieces_of(run)) == 6


def test_without_a_manifest_no_piece_of_an_uncompacted_result_goes(tmp_path):
    run = committed(tmp_path, output={"uri": "out", "compact": False})
    end(run)
    value = read_json(tmp_path / "_SUCCESS")
    (tmp_path / "_SUCCESS").write_text(json.dumps(value | {"manifest": None}))
    before = pieces_of(run)
    with pytest.raises(CorruptRun, match="_SUCCESS has no manifest"):
        reap(run.store, NOW)
    assert pieces_of(run) == before


# --- uploads ------------------------------------------------------------------------------------


def shard_of(run: SmallRun, store: Store) -> Receipt:
    finish = run.finish()
    object.__setattr__(finish, "store", store)
    (text,) = finish(run.block(run.whole(0), [4]))["receipt"].to_pylist()
    return Receipt.from_json(text)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_piece_kept_badly_is_written_again_while_its_rows_are_there(tmp_path, damage):
    run = small_run(tmp_path)
    receipt = shard_of(run, Spoils(tmp_path, "pieces/", damage))
    run.ledger.commit(run.plan, 5, [receipt])
    for shard in (1, 2, 3):
        run.commit(shard)
    end(run)
    assert verify(run.store).ok


def test_a_store_that_keeps_no_piece_whole_loses_the_shard_for_this_pass(tmp_path):
    run = small_run(tmp_path)
    receipt = shard_of(run, Spoils(tmp_path, "pieces/", truncated, 99))
    assert receipt.lost and "pieces/" in receipt.lost.message and not receipt.lost.fatal
    assert receipt.held.ranges == ()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("fits", ["data/", "_quarantine/", "row_sums/"])
def test_a_part_kept_badly_is_written_again(tmp_path, monkeypatch, damage, fits):
    run = committed(tmp_path)
    store = Spoils(tmp_path, fits, damage)
    end(run, monkeypatch, store)
    assert store.left == 0 and verify(run.store).ok and pieces_of(run) == []
    for part in read_json(tmp_path / "_SUCCESS")["parts"]:
        assert part["sums"] == digest((tmp_path / row_sums_path(part["path"])).read_bytes())


@pytest.mark.parametrize(("fits", "damage"), [("data/", flipped), ("row_sums/", truncated)])
def test_a_store_that_keeps_no_part_whole_keeps_the_pieces(tmp_path, monkeypatch, fits, damage):
    run = committed(tmp_path)
    before = pieces_of(run)
    with monkeypatch.context() as patch, pytest.raises(RayBatchError, match=fits) as caught:
        end(run, patch, Spoils(tmp_path, fits, damage, 99))
    assert is_transient(caught.value)
    assert pieces_of(run) == before and not (tmp_path / "_SUCCESS").exists()
    end(run)
    assert verify(run.store).ok


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_snapshot_kept_badly_is_no_plan_s(tmp_path, damage):
    (tmp_path / "in.csv").write_text("id\n" + "\n".join(map(str, range(1000))))
    store = Spoils(tmp_path / "run", "input/", damage, 99)
    with pytest.raises(RayBatchError, match="input/") as caught:
        source.snapshot(reads(uri=str(tmp_path / "in.csv")), store, "a")
    assert is_transient(caught.value)


@pytest.mark.parametrize("fits", ["shards-", "files-"])
def test_a_plan_s_table_kept_badly_is_written_again_before_the_plan(tmp_path, fits, monkeypatch):
    spoiled = Spoils(tmp_path, fits, truncated)
    monkeypatch.setattr("helpers.small.open_store", lambda uri: spoiled)
    run = small_run(tmp_path)
    assert spoiled.left == 0 and len(run.ledger.files(run.plan)) == 1


# --- what is deleted ----------------------------------------------------------------------------


class Forgets(LocalStore):
    """A store whose listing lacks a commit once the run has ended."""

    def list(self, prefix: str = "", recursive: bool = True) -> Iterator[FileInfo]:
        for info in super().list(prefix, recursive):
            ended = (Path(self.uri) / "_SUCCESS").exists()
            if not (prefix == COMMITS and ended and info.path == commit_path(2)):
                yield info


def test_a_listing_that_lacks_a_commit_costs_no_piece(tmp_path, monkeypatch):
    run = committed(tmp_path, output={"uri": "out", "compact": False})
    run.receipt(run.whole(1))  # nobody's
    named = {p.path for s in range(4) for p in run.ledger.read_commit(run.plan, s).pieces}
    end(run, monkeypatch, Forgets(str(tmp_path)))
    assert set(pieces_of(run)) == named and verify(run.store).ok
    reap(Forgets(str(tmp_path)), NOW)
    assert set(pieces_of(run)) == named


@pytest.mark.parametrize("damage", [*DAMAGES, Path.unlink])
def test_a_manifest_that_is_not_whole_keeps_all_pieces(tmp_path, damage):
    run = committed(tmp_path, output={"uri": "out", "compact": False})
    end(run)
    run.receipt(run.whole(1))  # nobody's
    before = pieces_of(run)
    (manifest,) = (tmp_path / "_raybatch").glob("manifest-*.parquet")
    whole = manifest.read_bytes()
    damage(manifest)
    with pytest.raises(CorruptRun, match="manifest-"):
        reap(run.store, NOW)
    assert pieces_of(run) == before
    manifest.write_bytes(whole)
    (tmp_path / commit_path(2)).unlink()  # the manifest alone says what is the result
    reap(run.store, NOW)
    assert len(pieces_of(run)) == len(before) - 1


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("place", ["_raybatch/pieces/more", "_raybatch/input", "_probe-1"])
def test_what_lies_behind_a_link_is_never_deleted(tmp_path, place, compact):
    run = committed(tmp_path / "run", output={"uri": "out", "compact": compact})
    outside = tmp_path / "outside"
    for name in ("x", "race-0", "00000001-0123456789abcdef.parquet", "deep/part-00000.parquet"):
        (outside / name).parent.mkdir(parents=True, exist_ok=True)
        (outside / name).write_bytes(b"precious")
    (outside / ".tmp-1").write_bytes(b"precious")
    before = tree(outside)
    link = run.root / place
    link.symlink_to(outside)
    for remove in (end, lambda run: reap(run.store, NOW)):
        try:
            remove(run)
        except RayBatchError as error:
            assert place in str(error)  # refused by name
    assert tree(outside) == before


@pytest.mark.parametrize("place", ["_raybatch/pieces", "_raybatch/commits", "data"])
def test_a_folder_of_the_run_that_is_a_link_is_refused_by_name(tmp_path, place):
    run = committed(tmp_path / "run")
    outside = tmp_path / "outside"
    if (run.root / place).exists():
        shutil.move(run.root / place, outside)
    else:
        outside.mkdir()
    (run.root / place).symlink_to(outside)
    before = tree(outside)
    with pytest.raises(RayBatchError, match=rf"{place}.* link"):
        end(run)
    with pytest.raises(RayBatchError, match="link"):
        run.store.delete([f"{place}/{name}" for name in before] or [f"{place}/x"])
    assert tree(outside) == before


# --- another finalizer --------------------------------------------------------------------------


def written_anew(path: Path) -> None:
    """The rows as another version of pyarrow might write them: other bytes."""
    pq.write_table(pq.read_table(path), path, compression="gzip", row_group_size=7)


def test_a_part_with_the_same_rows_is_adopted_and_not_written_again(tmp_path):
    run = committed(tmp_path)
    finalize(run.ledger, run.plan, run.shards, "_row", 1 << 20)
    paths = [tmp_path / f"{kind}/part-00000.parquet" for kind in ("data", "_quarantine")]
    paths.append(tmp_path / "_raybatch/row_sums/data-part-00000.parquet")
    for path in paths:
        written_anew(path)
    before = [path.read_bytes() for path in paths]
    end(run)
    assert [path.read_bytes() for path in paths] == before
    assert verify(run.store).ok and pieces_of(run) == []


def unseen_flip(body: bytes) -> bytes:
    """A bit of a Parquet file turned so that all rows read as they were, and a figure by which
    readers leave row groups out does not."""
    rows, figures = pq.read_table(pa.BufferReader(body)), footer_figures(footer_of(body))
    for at in range(len(body) - 9, 0, -1):
        changed = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        with suppress(pa.ArrowException, OSError, ValueError, LookupError, TypeError):
            misleads = footer_figures(footer_of(changed)) != figures
            if misleads and pq.read_table(pa.BufferReader(changed)).equals(rows):
                return changed
    raise AssertionError("every bit shows")


@pytest.mark.parametrize(
    "what", ["a value", "a row less", "a column", "a type", "no Parquet", "a flipped bit"]
)
def test_a_part_with_other_rows_is_replaced_before_success(tmp_path, what):
    run = committed(tmp_path)
    finalize(run.ledger, run.plan, run.shards, "_row", 1 << 20)
    path = tmp_path / "data/part-00000.parquet"
    whole, table = path.read_bytes(), pq.read_table(path)
    column = table.column_names.index("id")
    if what == "a value":
        table = table.set_column(column, "id", [[77, *range(1, table.num_rows)]])
    elif what == "a row less":
        table = table.slice(1)
    elif what == "a column":
        table = table.rename_columns(["ID", *table.column_names[1:]])
    elif what == "a type":
        table = table.set_column(column, "id", table["id"].cast("int32"))
    pq.write_table(table, path)
    if what == "no Parquet":
        path.write_bytes(b"PAR1")
    if what == "a flipped bit":
        path.write_bytes(unseen_flip(whole))
    end(run)
    assert verify(run.store).ok and path.read_bytes() == whole


def test_a_finalizer_that_wakes_after_success_writes_nothing(tmp_path, monkeypatch):
    """It is in the middle, with another pyarrow, when a second one ends the run."""
    run = committed(tmp_path)

    class Late(LocalStore):
        asked = 0

        def read(self, path: str, max_bytes: int | None = None) -> bytes:
            if "pieces/" in path and not Late.asked:
                Late.asked = 1
                with monkeypatch.context() as patch:
                    patch.setattr(
                        OPENER,
                        lambda uri, options=None: run.store,
                    )
                    patch.setattr(LocalStore, "delete", lambda self, paths: None)
                    end(run)
                for name in ("data/part-00000.parquet", "_quarantine/part-00000.parquet"):
                    (tmp_path / name).unlink()  # as if it were another's: must not come back
                Late.asked = 2
            return super().read(path, max_bytes)

    with pytest.raises(CorruptRun, match="part-00000"):
        end(run, monkeypatch, Late(str(tmp_path)))
    assert Late.asked == 2 and len(pieces_of(run)) == 6
    assert not list(tmp_path.glob("data/*.parquet")) + list(tmp_path.glob("_quarantine/*.parquet"))


@pytest.mark.parametrize(
    "name", ["data/part-00007.parquet", "_quarantine/x.csv", "data/more/part-00000.parquet"]
)
@pytest.mark.parametrize("compact", [True, False])
def test_a_stray_file_of_the_result_stops_before_success(tmp_path, name, compact):
    run = committed(tmp_path, output={"uri": "out", "compact": compact})
    stray = tmp_path / name
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.write_bytes(b"x")
    before = pieces_of(run)
    with pytest.raises(CorruptRun, match=name) as caught:
        end(run)
    assert "run the same command again" in str(caught.value) and "more)" not in str(caught.value)
    other = stray.with_name("zz.parquet")
    other.write_bytes(b"x")
    with pytest.raises(CorruptRun, match=r"\(and 1 more\)"):
        end(run)
    other.unlink()
    assert not (tmp_path / "_SUCCESS").exists() and pieces_of(run) == before
    stray.unlink()
    end(run)
    assert verify(run.store).ok
    stray.write_bytes(b"x") if stray.parent.exists() else run.store.put(name, b"x")
    assert any(name in fault for fault in verify(run.store).faults)


@pytest.mark.parametrize("name", ["data/.DS_Store", "data/_metadata", "data/.hidden/x.parquet"])
def test_what_readers_of_folders_leave_out_is_no_stray(tmp_path, name):
    run = committed(tmp_path)
    run.store.put(name, b"x")
    end(run)
    assert verify(run.store).ok


# --- on S3 --------------------------------------------------------------------------------------


def on_s3(run: SmallRun, server: S3Server, endpoint: str) -> Store:
    """The run directory copied to a prefix of its own, asked at `endpoint`."""
    uri = f"s3://planted-faults/{uuid.uuid4()}"
    straight = open_store(uri, server.options)
    for name, data in tree(run.root).items():
        straight.put(name, data)
    return open_store(uri, {**server.options, "endpoint_url": endpoint})


@pytest.mark.parametrize("how", ["flip", "truncate"])
def test_on_s3_a_part_changed_on_the_way_is_written_again(tmp_path, s3, monkeypatch, how):
    left = ["/data/part-", "/_quarantine/part-", "/row_sums/"]

    def decide(method: str, path: str, headers: Mapping[str, str]) -> str:
        fits = [name for name in left if method == "PUT" and name in path]
        for name in fits:
            left.remove(name)
        return how if fits else "pass"

    run = committed(tmp_path)
    with proxy(s3, decide) as there:
        store = on_s3(run, s3, there.endpoint)
        end(run, monkeypatch, store)
        assert not left and not list(store.list("_raybatch/pieces"))
        assert verify(store).ok
        parts_of = Ledger(store).finished(run.plan).parts
        assert [store.stat(part.path).etag for part in parts_of] == [p.etag for p in parts_of]


def test_on_s3_pieces_stay_while_a_part_is_another_one(tmp_path, s3, monkeypatch):
    run = cut_short(tmp_path, monkeypatch)
    store = on_s3(run, s3, s3.endpoint)
    success = read_json(tmp_path / "_SUCCESS")
    for part in success["parts"]:
        part["etag"] = store.stat(part["path"]).etag
    store.put("_SUCCESS", json.dumps(success).encode())
    name = "data/part-00000.parquet"
    whole = store.read(name)
    store.put(name, whole[:-9] + b"x" + whole[-8:])  # of the same size
    with pytest.raises(CorruptRun, match=name):
        end(run, monkeypatch, store)
    assert len(list(store.list("_raybatch/pieces"))) == 6
    store.put(name, whole)
    end(run, monkeypatch, store)
    assert not list(store.list("_raybatch/pieces")) and verify(store).ok
