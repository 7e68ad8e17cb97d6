"""Files of the result are fenced: however many finalizers there are, wherever each is killed or
overtaken, a reader that globs sees each row once and never a file that `_SUCCESS` does not name."""

from __future__ import annotations

import hashlib
import shutil
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import SmallRun, read_json, small_run
from s3server import S3Server

from prefect_raybatch.api import finalize_run
from prefect_raybatch.errors import CorruptRun, UnsafeStore
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger import success as success_module
from prefect_raybatch.ledger.layout import LAYOUT, PART_NOTES, PIECES
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.part_layout import (
    MOST_PART_ROWS,
    MOST_PART_SHARDS,
    PartLayout,
    PartSpan,
    ShardSums,
    check_spans,
    choose_spans,
    layout_table,
    put_layout,
    read_layout,
)
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.result.finalize import finalize
from prefect_raybatch.result.reap import reap
from prefect_raybatch.result.row_groups import Columns
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.run import Run
from prefect_raybatch.storage import LocalStore, Store, open_store

FAILED = {(0, 1), (1, 3)}
OPERATIONS = (
    *("read", "list", "stat", "open", "delete"),
    *("put", "put_if_absent", "put_file", "put_file_if_absent", "replace_file"),
)
ENCODED = "prefect_raybatch.result.parts.encoded_columns"
OPENER = "prefect_raybatch.api.open_store"


class Killed(BaseException):
    """The process is gone: nothing that it was about to do is done."""


class Stepped(LocalStore):
    """A store that calls `act` before or after its request number `at`; counts all of them."""

    def __init__(self, root: Path, at: int, after: bool, act: Callable[[], None]) -> None:
        super().__init__(str(root))
        self.at, self.after, self.act = at, after, act
        self.names: list[str] = []
        self.dead, self.own = False, threading.local()

    def request(self, name: str, *args: Any) -> Any:
        method = getattr(super(), name)
        if getattr(self.own, "inside", False):  # part of another request
            return method(*args)
        if self.dead:
            raise Killed
        number = len(self.names)
        self.names.append(name)
        self.own.inside = True
        try:
            if number == self.at and not self.after:
                self.act()
            found = method(*args)
            if name == "list":
                found = iter(list(found))
            if number == self.at and self.after:
                self.act()
            return found
        except Killed:
            self.dead = True
            raise
        finally:
            self.own.inside = False


def _requested(name: str) -> Callable[..., Any]:
    return lambda self, *args: self.request(name, *args)


for _name in OPERATIONS:
    setattr(Stepped, _name, _requested(_name))


def end(root: Path, store: Store | None = None) -> None:
    """`finalize_run` of the run at `root`, through `store` where one is given."""
    here = store or open_store(str(root))
    plan = Ledger(open_store(str(root))).load_plan()
    assert plan is not None
    run = Run(here.uri, "key", plan.hash, plan.rows, plan.shards, False)
    job = BatchJob.from_dict({**plan.job, "output": {**plan.job["output"], "uri": "x"}})
    page = patch("prefect_raybatch.runs.finalize_run.html_page", lambda report: "drawn elsewhere")
    with page, patch(OPENER, lambda uri, options=None: here):
        finalize_run(job, run)


def committed(root: Path, **groups: Any) -> SmallRun:
    run = small_run(root, rows=10, **groups)
    run.commit_all(FAILED)
    return run


def globbed(root: Path, folder: str) -> list[int]:
    """Row numbers as a reader of the folder sees them."""
    files = sorted((root / folder).glob("*.parquet"))
    return [row for path in files for row in pq.read_table(path)["_row"].to_pylist()]


def check(root: Path) -> None:
    assert globbed(root, "_quarantine") == [1, 8]
    assert globbed(root, "data") == [0, 2, 3, 4, 5, 6, 7, 9]
    found = verify(open_store(str(root)))
    assert found.ok, found.faults
    assert not list((root / PIECES).glob("*")) and not list((root / PART_NOTES).glob("*"))


# --- killed, overtaken --------------------------------------------------------------------------


WRITES = ("put", "put_if_absent", "put_file_if_absent", "replace_file", "delete")


def points(root: Path, broken: bool) -> list[tuple[int, str]]:
    """All requests of a finalizer over a copy of the run, by number and name."""
    store = Stepped(copy_of(root, broken), -1, False, lambda: None)
    end(Path(store.uri), store)
    shutil.rmtree(store.uri)
    return list(enumerate(store.names))


def copy_of(root: Path, broken: bool) -> Path:
    """A copy of a committed run, with a file in it that a finalizer which crashed left `broken`."""
    copy = root.with_name(str(uuid.uuid4()))
    shutil.copytree(root, copy)
    if broken:
        (copy / "data").mkdir()
        (copy / "data/part-00000.parquet").write_bytes(b"PAR1 and not much more")
    return copy


@pytest.mark.parametrize("broken", [False, True])
def test_killed_before_and_after_each_write(tmp_path, broken):
    committed(tmp_path / "run")
    writes = [at for at, name in points(tmp_path / "run", broken) if name in WRITES]
    assert len(writes) > 10

    def act() -> None:
        raise Killed

    for at in writes:
        for after in (False, True):
            root = copy_of(tmp_path / "run", broken)
            with pytest.raises(Killed):
                end(root, Stepped(root, at, after, act))
            if not broken:
                rows = globbed(root, "data") + globbed(root, "_quarantine")
                assert len(rows) == len(set(rows))
            end(root)
            check(root)
            shutil.rmtree(root)


@pytest.mark.parametrize("whole", [True, False])
def test_overtaken_before_each_look_and_write(tmp_path, whole):
    """There another finalizer does all of its work, or all but `_SUCCESS`, and is killed."""
    committed(tmp_path / "run")
    looks = [*WRITES, "stat", "list"]
    found = [at for at, name in points(tmp_path / "run", True) if name in looks]
    for at in found:
        root = copy_of(tmp_path / "run", True)

        def act(root: Path = root) -> None:
            dies = patch("prefect_raybatch.ledger.ledger.put_success", side_effect=Killed)
            with nullcontext() if whole else dies, suppress(Killed):
                end(root)

        end(root, Stepped(root, at, False, act))
        check(root)
        shutil.rmtree(root)


def test_two_at_once_with_other_layouts_and_a_corrupt_file(tmp_path):
    """Eight finalizers, half of which would cut the files in another way, over a file that one that
    crashed has left broken."""
    run = committed(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/part-00000.parquet").write_bytes(b"PAR1 and not much more")
    start = threading.Barrier(8)

    def one(number: int) -> list[str]:
        start.wait()
        file_bytes = 1 if number % 2 else 1 << 20
        found = finalize(run.ledger, run.plan, run.shards, "_row", file_bytes)
        return [part.path for part in found.parts]

    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(one, range(8)))
    assert names == [names[0]] * 8
    end(tmp_path)
    check(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [(b"parquet-cpp-arrow", b"parquet-cpp-arroW", True), (b"Company 9", b"Company 8", False)],
    ids=["its writer's name", "a bound of a row group"],
)
def test_a_file_of_the_same_rows_is_judged_by_what_it_tells_readers(tmp_path, old, new, kept):
    """So that a finalizer of another pyarrow comes to the same verdict: if one kept a file that
    another replaces, `_SUCCESS` might name the one that was replaced."""
    run = small_run(tmp_path, rows=10)
    run.commit_all()
    twin = copy_of(tmp_path, broken=False)
    end(twin)
    (made,) = (twin / "data").iterdir()
    data = made.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    changed = data[:footer] + data[footer:].replace(old, new)
    assert changed != data
    assert pq.read_table(pa.BufferReader(changed)).equals(pq.read_table(made))
    for writer in ("this", "another"):
        root = copy_of(tmp_path, broken=False)
        (root / "data").mkdir()
        (root / "data" / made.name).write_bytes(changed)
        with patch(ENCODED, other_pages) if writer == "another" else nullcontext():
            end(root)
        assert ((root / "data" / made.name).read_bytes() == changed) is kept
        assert verify(open_store(str(root))).ok
        shutil.rmtree(root)


def other_pages(table: pa.Table) -> Columns:
    """The columns of `table` as another version of pyarrow encodes them."""
    out = pa.BufferOutputStream()
    pq.write_table(table, out, data_page_version="2.0", compression="zstd")
    return Columns(out.getvalue().to_pybytes())


# --- the layout ---------------------------------------------------------------------------------


def test_a_layout_that_is_there_is_gone_by(tmp_path):
    run = committed(tmp_path)
    first = finalize(run.ledger, run.plan, run.shards, "_row", 1)
    assert [part.path for part in first.parts] == [
        *("data/part-00000.parquet", "data/part-00001.parquet"),
        *("_quarantine/part-00000.parquet", "_quarantine/part-00001.parquet"),
    ]
    again = finalize(run.ledger, run.plan, run.shards, "_row", 1 << 30)
    assert again.parts == first.parts and again.layout == first.layout
    end(tmp_path)
    check(tmp_path)
    said = read_json(tmp_path / "_SUCCESS")
    assert said["layout"] == first.layout == read_json(tmp_path / LAYOUT)["table"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"plan": "0" * 64}, "another plan"),
        ({"row_number": "id"}, "different columns"),
        ({"schemas": {}}, "different columns"),
        ({"table": "layout-0123456789abcdef.parquet"}, "does not exist"),
        ({"more": 1}, "unknown fields"),
    ],
)
def test_a_layout_that_does_not_fit_writes_nothing(tmp_path, change, said):
    run = committed(tmp_path)
    finalize(run.ledger, run.plan, run.shards, "_row", 1)
    for folder in ("data", "_quarantine"):
        shutil.rmtree(tmp_path / folder)
    value = {**read_json(tmp_path / LAYOUT), **change}
    (tmp_path / LAYOUT).write_bytes(dump(value))
    with pytest.raises(CorruptRun, match=said):
        end(tmp_path)
    assert not (tmp_path / "data").exists() and not (tmp_path / "_SUCCESS").exists()


def sums_of(data: list[int], quarantine: list[int]) -> ShardSums:
    sums = ShardSums.empty(len(data))
    for kind, rows in (("data", data), ("quarantine", quarantine)):
        sums.rows[kind][:] = rows
        sums.bytes[kind][:] = [10 * n for n in rows]
    return sums


def test_files_are_of_whole_shards_in_order():
    sums = sums_of([5, 0, 5, 5, 1, 0], [0, 2, 0, 0, 0, 0])
    spans = choose_spans(sums, 100)
    assert spans == (
        PartSpan("data", 0, 0, 3, 10),
        PartSpan("data", 1, 3, 5, 6),
        PartSpan("quarantine", 0, 1, 2, 2),
    )
    check_spans(spans, sums)
    assert choose_spans(sums_of([0, 0], [0, 0]), 100) == ()


def test_a_file_of_narrow_rows_ends_before_it_holds_too_many():
    rows = [MOST_PART_ROWS // 2, MOST_PART_ROWS // 2, 1, 3 * MOST_PART_ROWS, 1]
    spans = choose_spans(sums_of(rows, [0] * 5), 1 << 60)
    assert [(span.start, span.stop) for span in spans] == [(0, 2), (2, 3), (3, 4), (4, 5)]
    check_spans(spans, sums_of(rows, [0] * 5))


def test_a_file_of_a_few_rows_a_shard_ends_before_it_is_of_too_many_shards():
    sums = sums_of([1, 0] * MOST_PART_SHARDS + [1], [0] * (2 * MOST_PART_SHARDS + 1))
    spans = choose_spans(sums, 1 << 60)
    assert [span.rows for span in spans] == [MOST_PART_SHARDS, 1]
    check_spans(spans, sums)


@pytest.mark.parametrize(
    "change",
    [
        lambda spans: spans[1:],
        lambda spans: spans[:-1],
        lambda spans: (spans[0], replace(spans[1], start=2), *spans[2:]),
        lambda spans: (spans[0], replace(spans[1], index=2), *spans[2:]),
        lambda spans: (replace(spans[0], rows=9), *spans[1:]),
        lambda spans: (spans[0], spans[0], *spans[1:]),
        lambda spans: (replace(spans[0], start=-3), *spans[1:]),
    ],
)
def test_a_layout_that_leaves_out_or_doubles_is_told(change):
    sums = sums_of([5, 0, 5, 5, 1, 0], [0, 2, 0, 0, 0, 0])
    with pytest.raises(CorruptRun, match="layout"):
        check_spans(change(choose_spans(sums, 100)), sums)


def test_the_loser_of_the_race_for_a_layout_goes_by_the_winner_s(tmp_path):
    run = committed(tmp_path)
    found = []
    for file_bytes in (1, 1 << 20):
        spans = choose_spans(sums_of([4, 4], [1, 1]), file_bytes)
        made = PartLayout(run.plan.hash, "x", file_bytes, "_row", {}, layout_table(spans))
        put_layout(run.ledger, made, spans)
        found.append(read_layout(run.ledger, run.plan))
    assert found[0] == found[1] and len(found[0][1]) == 4
    tables = sorted(path.name for path in (tmp_path / "_raybatch").glob("layout-*"))
    assert len(tables) == 2
    reap(run.store, -60.0)
    assert [p.name for p in (tmp_path / "_raybatch").glob("layout-*")] == [found[0][0].table]


# --- notes --------------------------------------------------------------------------------------


class Counting(LocalStore):
    """Remembers which pieces were read."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.pieces: list[str] = []

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        if path.startswith(PIECES):
            self.pieces.append(path)
        return super().read(path, max_bytes)


def test_a_file_that_is_noted_and_there_is_not_made_again(tmp_path):
    run = committed(tmp_path)
    finalize(run.ledger, run.plan, run.shards, "_row", 1)
    assert len(list((tmp_path / PART_NOTES).iterdir())) == 4
    (tmp_path / PART_NOTES / "data-00001.json").write_bytes(b"{}")
    (tmp_path / PART_NOTES / "data-00001 2.json").write_bytes(b"{}")
    store = Counting(tmp_path)
    end(tmp_path, store)
    assert len(store.pieces) == 1 and "/00000001-" in store.pieces[0]
    (tmp_path / PART_NOTES / "data-00001 2.json").unlink()
    check(tmp_path)


@pytest.mark.parametrize("name", ["data/part-00000.parquet", "_raybatch/row_sums/data-part-00000"])
@pytest.mark.parametrize("how", ["replaced", "gone"])
def test_a_note_of_a_file_that_is_another_one_is_not_believed(tmp_path, name, how):
    run = committed(tmp_path)
    finalize(run.ledger, run.plan, run.shards, "_row", 1)
    (path,) = tmp_path.glob(f"{name}*")
    body = bytearray(path.read_bytes())
    path.unlink()
    if how == "replaced":
        body[len(body) // 2] ^= 1
        path.write_bytes(bytes(body))
    end(tmp_path)
    check(tmp_path)


# --- the end ------------------------------------------------------------------------------------


def test_many_files_are_in_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(success_module, "INLINE_PARTS", 2)
    run = committed(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "delete", lambda self, paths: None)
        found = finalize(run.ledger, run.plan, run.shards, "_row", 1)
        end(tmp_path)
    said = read_json(tmp_path / "_SUCCESS")
    assert said["parts"] == [] and len(list((tmp_path / PIECES).iterdir())) == 4
    table = tmp_path / "_raybatch" / said["parts_table"]
    assert [asdict(p) for p in run.ledger.finished(run.plan).parts] == [
        asdict(p) for p in found.parts
    ]
    whole = table.read_bytes()
    table.write_bytes(whole[:-1])
    for remove in (lambda: end(tmp_path), lambda: reap(run.store, -60.0)):
        with pytest.raises(CorruptRun, match="parts-"):
            remove()
    assert len(list((tmp_path / PIECES).iterdir())) == 4
    table.write_bytes(whole)
    reap(run.store, -60.0)
    assert table.exists()
    check(tmp_path)


def test_with_read_back_an_etag_is_not_believed(tmp_path, monkeypatch):
    """A store may say the right ETag and keep other bytes."""
    run = committed(tmp_path, output={"uri": "out", "read_back": True})
    opened: list[str] = []
    straight = LocalStore.open
    monkeypatch.setattr(
        LocalStore, "open", lambda self, path: opened.append(path) or straight(self, path)
    )
    stat = LocalStore.stat

    def with_etag(self: LocalStore, path: str) -> Any:
        body = Path(self.uri, path).read_bytes() if Path(self.uri, path).is_file() else b""
        return replace(stat(self, path), etag=hashlib.md5(body).hexdigest())

    monkeypatch.setattr(LocalStore, "stat", with_etag)
    monkeypatch.setattr("prefect_raybatch.ledger.part_files.is_remote", lambda uri: True)
    finalize(run.ledger, run.plan, run.shards, "_row", 1 << 20)
    once = opened.count("data/part-00000.parquet")  # the listing here says no ETag
    shutil.rmtree(tmp_path / "data")
    finalize(run.ledger, run.plan, run.shards, "_row", 1 << 20, read_back=True)
    assert opened.count("data/part-00000.parquet") == 2 * once + 1


# --- on S3 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "versioned", "locked"])
def test_finalizers_race_on_s3(tmp_path, s3: S3Server, kind: str):
    """Over a file of one that crashed. In a bucket that keeps versions, or locks them, too, unless
    the store is one that ignores the condition there, as radosgw does: then it is refused."""
    bucket = f"fence-{kind}"
    create_bucket(s3, bucket, kind)
    run = committed(tmp_path)
    store = open_store(f"s3://{bucket}/{uuid.uuid4()}", s3.options)
    if kind != "plain":
        with suppress(UnsafeStore):
            store.probe()
            race(tmp_path, run, store)
        return
    race(tmp_path, run, store)


def race(tmp_path: Path, run: SmallRun, store: Store) -> None:
    for path in tmp_path.rglob("*"):
        if path.is_file():
            store.put(str(path.relative_to(tmp_path)), path.read_bytes())
    store.put("data/part-00000.parquet", b"PAR1 and not much more")
    ledger, start = Ledger(store), threading.Barrier(4)

    def one(number: int) -> Any:
        start.wait()
        return finalize(ledger, run.plan, run.shards, "_row", 1 << 20).parts

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(one, range(4)))
    assert parts == [parts[0]] * 4
    for part in parts[0]:
        assert store.stat(part.path).etag == part.etag
    whole = store.read("data/part-00000.parquet")
    assert pq.read_table(pa.BufferReader(whole)).num_rows == 8
    end(tmp_path, store)
    assert not list(store.list(PIECES)) and verify(store).ok


def create_bucket(s3: S3Server, bucket: str, kind: str) -> None:
    import botocore.session

    client = botocore.session.get_session().create_client(
        "s3",
        endpoint_url=s3.endpoint,
        region_name="us-east-1",
        aws_access_key_id=s3.options["key"],
        aws_secret_access_key=s3.options["secret"],
    )
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=kind == "locked")
    if kind == "versioned":
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    if kind == "locked":
        rule = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}
        client.put_object_lock_configuration(
            Bucket=bucket,
            ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule},
        )
