"""Folded commits: fewer reads, and nothing but time lost when a file is missing or wrong."""

from __future__ import annotations

import errno
import gzip
import os
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.small import Passes, SmallRun, small_run

from prefect_raybatch.driver.driver import Driver
from prefect_raybatch.errors import StoreError
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger import checkpoints
from prefect_raybatch.ledger.checkpoints import CheckpointWriter, Copies
from prefect_raybatch.ledger.layout import CHECKPOINTS, COMMITS, commit_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.result.finalize import finalize
from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import open_store


class Reads:
    """Names of the records read one by one since the last look."""

    def __init__(self, run: SmallRun, monkeypatch: pytest.MonkeyPatch):
        self.names: list[str] = []
        read = type(run.store).read

        def counting(store: Any, path: str, max_bytes: int | None = None) -> bytes:
            if path.startswith(COMMITS):
                self.names.append(path)
            return read(store, path, max_bytes)

        monkeypatch.setattr(type(run.store), "read", counting)

    def taken(self) -> list[str]:
        names, self.names = sorted(self.names), []
        return names


def fold(run: SmallRun, shards: range) -> None:
    folder = CheckpointWriter(run.store, run.plan.hash)
    for shard in shards:
        folder.add(run.ledger.read_commit(run.plan, shard))
    folder.flush(1)


def shards_of(run: SmallRun, exact: bool = False) -> list[int]:
    listing = run.ledger.listing(run.plan)
    return [c.shard for c in run.ledger.commits(run.plan, listing, exact)]


def test_what_is_folded_is_not_read_again(tmp_path, monkeypatch):
    run = small_run(tmp_path)
    run.commit_all()
    fold(run, range(3))
    reads = Reads(run, monkeypatch)
    assert shards_of(run) == [0, 1, 2, 3]
    assert reads.taken() == [commit_path(3)]
    # A local disk gives no checksum, so a proof reads each record.
    assert shards_of(run, exact=True) == [0, 1, 2, 3]
    assert len(reads.taken()) == 4


def test_a_checkpoint_cannot_say_that_a_shard_is_committed(tmp_path):
    run = small_run(tmp_path)
    run.commit_all()
    fold(run, range(4))
    (tmp_path / commit_path(2)).unlink()
    assert shards_of(run) == [0, 1, 3]


def spoil(path: Path, how: str, run: SmallRun) -> None:
    data = path.read_bytes()
    text = gzip.decompress(data)
    {
        "lost": lambda: path.unlink(),
        "cut": lambda: path.write_bytes(data[: len(data) // 2]),
        "empty": lambda: path.write_bytes(b""),
        "noise": lambda: path.write_bytes(bytes(range(256)) * 9),
        "another plan's": lambda: path.write_bytes(
            gzip.compress(text.replace(run.plan.hash.encode(), b"0" * 64, 1))
        ),
        "no numbers": lambda: path.write_bytes(gzip.compress(text.replace(b"\n1 ", b"\nx "))),
        "beyond the plan": lambda: path.write_bytes(gzip.compress(text.replace(b"\n1 ", b"\n77 "))),
        "negative": lambda: path.write_bytes(gzip.compress(text.replace(b"\n1 ", b"\n-1 "))),
        "other records": lambda: path.write_bytes(gzip.compress(text.replace(b'{"', b'{ "'))),
        "too large": lambda: path.write_bytes(gzip.compress(text + b"\n" * (1 << 22), 1)),
    }[how]()


@pytest.mark.parametrize(
    "how",
    [
        "lost",
        "cut",
        "empty",
        "noise",
        "another plan's",
        "no numbers",
        "beyond the plan",
        "negative",
        "other records",
        "too large",
    ],
)
def test_a_checkpoint_that_is_not_whole_costs_only_reads(tmp_path, how, monkeypatch):
    monkeypatch.setattr(checkpoints, "MAX_BYTES", 1 << 21)
    run = small_run(tmp_path)
    run.commit_all()
    fold(run, range(4))
    (path,) = (tmp_path / CHECKPOINTS).iterdir()
    spoil(path, how, run)
    reads = Reads(run, monkeypatch)
    assert shards_of(run) == [0, 1, 2, 3]
    assert commit_path(1) in reads.taken()
    assert finalize(run.ledger, run.plan, run.shards, "_row", 1 << 20).tally.rows == 20


def test_a_driver_folds_as_it_goes_and_folds_what_it_had_to_read(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "FOLD", 3)
    run = small_run(tmp_path, rows=40, per_shard=5)  # 8 shards
    for shard in range(4):
        run.commit(shard)
    reads = Reads(run, monkeypatch)

    def resume() -> Driver:
        driver = Driver(run.plan, run.shards, run.ledger, Limits())
        driver.resume()
        return driver

    driver = resume()
    assert len(reads.taken()) == 4
    assert driver.run(Passes(run), Passes(run).quarantine).done == 40
    assert len(list((tmp_path / CHECKPOINTS).iterdir())) == 2  # 3 that were read and 1, then 2
    resume()
    assert len(reads.taken()) == 2  # the 2 that were left over
    assert verify(run.store).committed_shards == 8


def test_a_full_disk_only_keeps_commits_from_being_folded(tmp_path, monkeypatch, caplog):
    run = small_run(tmp_path)
    run.commit_all()

    def full(store: Any, path: str, data: bytes) -> Any:
        raise StoreError("no space left")

    monkeypatch.setattr(type(run.store), "put", full)
    fold(run, range(4))
    assert "resume takes longer" in caplog.text and "no space left" in caplog.text
    assert shards_of(run) == [0, 1, 2, 3]


def test_on_s3_the_etag_proves_a_folded_record(tmp_path, s3, monkeypatch):
    run = small_run(tmp_path)
    run.commit_all()
    store = open_store("s3://checkpoints/run", s3.options)
    for info in run.store.list("_raybatch"):
        store.put(info.path, run.store.read(info.path))
    run.store, run.ledger = store, Ledger(store)
    fold(run, range(3))
    reads = Reads(run, monkeypatch)
    assert shards_of(run, exact=True) == [0, 1, 2, 3]
    assert reads.taken() == [commit_path(3)]
    # A folded copy of the same size that is not the stored record is not believed.
    (name,) = [info.path for info in store.list(CHECKPOINTS)]
    text = gzip.decompress(store.read(name)).replace(b'"attempt":"a"', b'"attempt":"b"')
    assert b'"attempt":"b"' in text
    store.put(name, gzip.compress(text))
    for exact in (False, True):
        assert shards_of(run, exact=exact) == [0, 1, 2, 3]
        assert len(reads.taken()) == 4


def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SmallRun, Reads]:
    """A run of folded commits, of which none fits into memory."""
    run = small_run(tmp_path, rows=40, per_shard=5)
    run.commit_all()
    monkeypatch.setattr(checkpoints, "FOLD", 3)
    fold(run, range(8))
    monkeypatch.setattr(checkpoints, "HELD_BYTES", 0)
    return run, Reads(run, monkeypatch)


def test_folded_records_that_are_many_wait_on_the_local_disk(tmp_path, monkeypatch):
    run, reads = many(tmp_path, monkeypatch)
    written: list[int] = []
    write = os.pwrite

    def counting(file: int, data: memoryview, at: int) -> int:
        done = write(file, data[:1_000], at)  # as a disk may: not all at once
        written.append(done)
        return done

    monkeypatch.setattr(os, "pwrite", counting)
    assert shards_of(run) == [*range(8)]
    assert not reads.taken()
    assert sum(written) == sum(p.stat().st_size for p in (tmp_path / COMMITS).iterdir())


def test_memory_does_not_grow_with_what_folded_records_say(monkeypatch):
    monkeypatch.setattr(checkpoints, "HELD_BYTES", 2 << 20)
    tracemalloc.start()
    with closing(Copies(20, lambda shard, body: body[0] == shard)) as found:
        for shard in range(20):
            found.add({shard: bytes([shard]) * (1 << 20)})  # 1 MiB of its number
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < 4 << 20
        assert [found.take(shard) for shard in range(20)] == [
            bytes([n]) * (1 << 20) for n in range(20)
        ]


def test_where_the_local_disk_is_full_folded_records_stay_in_memory(tmp_path, monkeypatch, caplog):
    run, reads = many(tmp_path, monkeypatch)
    write, calls = os.pwrite, iter(range(99))

    def full(file: int, data: memoryview, at: int) -> int:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, "no space left")
        return write(file, data[: len(data) // 2 + 1], at)  # the second half of a file is refused

    monkeypatch.setattr(os, "pwrite", full)
    assert shards_of(run) == [*range(8)]
    assert not reads.taken()
    assert caplog.text.count("they stay in memory") == 1


@pytest.mark.parametrize("how", ["cut", "refused"])
def test_what_the_local_disk_does_not_give_back_is_read_from_the_store(tmp_path, monkeypatch, how):
    run, reads = many(tmp_path, monkeypatch)
    read, sizes = os.pread, iter(range(99))

    def bad(file: int, size: int, at: int) -> bytes:
        if next(sizes) not in (1, 4):
            return read(file, size, at)
        if how == "refused":
            raise OSError(errno.EIO, "input/output error")
        return read(file, size - 1, at)

    monkeypatch.setattr(os, "pread", bad)
    assert shards_of(run) == [*range(8)]
    assert reads.taken() == [commit_path(1), commit_path(4)]
