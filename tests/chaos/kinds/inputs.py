"""The input changes between try and retry; duplicates; a run directory of another format."""

from __future__ import annotations

import json
import os
from typing import Any

from .. import inputs
from ..places import Folder
from ..trial import Bad, Trial
from . import kind

FILES, EACH = 6, 150


def begun(t: Trial) -> None:
    """A run over several files, with its driver killed on the way."""
    t.rows = inputs.rows(FILES * EACH, t.engine)
    for number in range(FILES):
        t.write_input(t.rows[number * EACH : (number + 1) * EACH], f"{number}.parquet")
    t.setup(per_shard=25)
    _killed(t)


def _killed(t: Trial) -> None:
    driver = t.start()
    t.orders(sleep=0.02)  # so that some of it is left
    t.wait_commits(t.rng.randint(2, t.shards // 3), driver)
    driver.kill()
    t.fault("driver killed")
    t.keep()
    t.orders(sleep=0.002)


def pending_file(t: Trial) -> str:
    """A file with rows that are not committed."""
    done = {int(name[-13:-5]) for name in t.commit_names()}
    pending = [shard for shard in range(t.shards) if shard not in done]
    return f"{t.rng.choice(pending) * t.per_shard // EACH}.parquet"


def put_back(t: Trial, name: str, data: bytes, stamp: os.stat_result | None) -> None:
    t.in_place.write(name, data)
    if stamp is not None and isinstance(t.in_place, Folder):
        os.utime(t.in_place.root / name, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def stamp_of(t: Trial, name: str) -> os.stat_result | None:
    return os.stat(t.in_place.root / name) if isinstance(t.in_place, Folder) else None


@kind("input file changed between try and retry", real=True)
def input_changed(t: Trial) -> None:
    begun(t)
    name = pending_file(t)
    old, stamp = t.in_place.read(name), stamp_of(t, name)
    first = int(name.split(".")[0]) * EACH
    rows: list[dict[str, Any]] = [dict(row) for row in t.rows[first : first + EACH]]
    if t.rng.random() < 0.5:
        rows[0]["text"] = rows[0]["text"][::-1]  # about the same size
    else:
        rows.pop()
    t.in_place.write(name, inputs.parquet(rows))
    t.expect_error(t.start(), "SourceError", name, "changed since the run was planned")
    t.fault(f"{name} changed")
    t.keep()
    put_back(t, name, old, stamp)


@kind("input file gone between try and retry")
def input_gone(t: Trial) -> None:
    begun(t)
    name = pending_file(t)
    old, stamp = t.in_place.read(name), stamp_of(t, name)
    t.in_place.remove(name)
    t.expect_error(t.start(), "SourceError", name, "no longer exists")
    t.fault(f"{name} gone")
    t.keep()
    put_back(t, name, old, stamp)


@kind("input grown between try and retry")
def input_grown(t: Trial) -> None:
    """New files are not of this run: they are left alone."""
    begun(t)
    t.write_input(inputs.rows(50, t.engine), "9.parquet")
    t.write_input(inputs.rows(50, t.engine), "0a.parquet")


@kind("source of a snapshot changed, grown or gone between try and retry")
def snapshot_source_changed(t: Trial) -> None:
    """What was copied is the input; the files are not looked at again."""
    t.rows = inputs.rows(FILES * EACH, t.engine)
    for number in range(FILES):
        part = t.rows[number * EACH : (number + 1) * EACH]
        t.in_place.write(f"{number}.csv", inputs.csv_text(part).encode())
    t.setup(per_shard=25)
    _killed(t)
    t.in_place.write("0.csv", b"id,text\n1,changed\n")
    t.in_place.write("7.csv", b"id,text\n1,new\n")
    t.in_place.remove("3.csv")


@kind("duplicate rows in the input", real=True)
def duplicate_rows(t: Trial) -> None:
    """Rows equal in every column are still rows of their own."""
    some = inputs.rows(200, t.engine)
    t.rows = [dict(t.rng.choice(some)) for _ in range(600)]
    t.rows[100:160] = [dict(t.rows[100]) for _ in range(60)]
    t.setup()
    _killed(t)


@kind("run directory of an older format version")
def old_format(t: Trial) -> None:
    begun(t)
    plan = t.place.read("_raybatch/plan.json")
    older = json.loads(plan)
    version = t.rng.choice([0, 2, "0.9", None])
    if version is None:
        older.pop("format")
    else:
        older["format"] = version
    t.place.write("_raybatch/plan.json", json.dumps(older).encode())
    before = {name: t.place.read(name) for name in t.place.names("")}
    t.expect_error(t.start(), "CorruptRun", "format")
    t.fault(f"format {version!r}", faults=0)
    if {name: t.place.read(name) for name in t.place.names("")} != before:
        raise Bad("a run of another format was touched")
    t.place.write("_raybatch/plan.json", plan)
