"""Reads that are compared with checksums: any changed bit is found, wherever a read begins."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.storage import LocalStore, open_store
from prefect_raybatch.storage.checked import CHECKED_BLOCK, block_sums, open_checked

SIZE = 3 * CHECKED_BLOCK + 4321


def written(tmp_path: Path, size: int = SIZE) -> tuple[bytes, str]:
    data = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(data)
    return data, hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("size", [0, 1, CHECKED_BLOCK, SIZE])
def test_whatever_is_read_is_what_the_file_holds(tmp_path: Path, size: int) -> None:
    data, sha256 = written(tmp_path, size)
    store, draw = open_store(str(tmp_path)), random.Random(1)
    with open_checked(store, "file", block_sums(store, "file", sha256)) as stream:
        assert stream.read() == data
        assert stream.seek(-min(8, size), 2) == size - min(8, size)
        for _ in range(200):
            start, length = draw.randrange(size + 1), draw.choice((1, 100, CHECKED_BLOCK, SIZE))
            stream.seek(start)
            assert stream.read(length) == data[start : start + length]


def test_each_flipped_bit_is_found_by_the_read_that_meets_it(tmp_path: Path) -> None:
    data, sha256 = written(tmp_path)
    store, draw = open_store(str(tmp_path)), random.Random(2)
    sums = block_sums(store, "file", sha256)
    for _ in range(50):
        at = draw.randrange(SIZE)
        rotten = bytearray(data)
        rotten[at] ^= 1 << draw.randrange(8)
        (tmp_path / "file").write_bytes(rotten)
        with open_checked(store, "file", sums) as stream:
            stream.seek(at)
            with pytest.raises(CorruptRun, match="file was damaged or replaced"):
                stream.read(1)
        with pytest.raises(CorruptRun, match="file was damaged or replaced"):
            block_sums(store, "file", sha256)
    (tmp_path / "file").write_bytes(data[:-1])
    with open_checked(store, "file", sums) as stream, pytest.raises(CorruptRun):
        stream.read()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    _, sha256 = written(tmp_path)
    store = open_store(str(tmp_path))
    sums = block_sums(store, "file", sha256)
    (tmp_path / "file").unlink()
    for call in (
        lambda: block_sums(store, "file", sha256),
        lambda: open_checked(store, "file", sums),
    ):
        with pytest.raises(CorruptRun, match="file is missing"):
            call()


def test_a_file_is_read_whole_once_for_each_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, sha256 = written(tmp_path)
    store, opened = open_store(str(tmp_path)), []
    real = LocalStore.open
    monkeypatch.setattr(
        LocalStore, "open", lambda self, path: opened.append(path) or real(self, path)
    )
    for _ in range(3):
        block_sums(store, "file", sha256)
    assert opened == ["file"]
    written(tmp_path)
    block_sums(store, "file", sha256)
    assert opened == ["file"] * 2
