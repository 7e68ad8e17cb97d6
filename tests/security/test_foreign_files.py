"""Tables in an allowed folder whose own records name files elsewhere, which are not read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.policies import set_policy
from helpers.specs import reads

from prefect_raybatch.compile.job import read_spec
from prefect_raybatch.errors import ConfigError, CorruptRun
from prefect_raybatch.job.source import Source
from prefect_raybatch.ledger.records import InputFile
from prefect_raybatch.policy.in_force import operator_policy, policy_applied
from prefect_raybatch.source import peek
from prefect_raybatch.source.find import check_planned
from prefect_raybatch.source.tables.copying import head_of
from prefect_raybatch.spec.read import ReadSpec

OURS, SECRET = (pa.table({"Company": [text]}) for text in ("ours", "secret"))


def delta(named: str) -> Callable[[Path], str]:
    """Return what makes a Delta table whose log names a file so."""

    def make(root: Path) -> str:
        from deltalake import write_deltalake

        place, secret = root / "in/t", root / "secret/s.parquet"
        write_deltalake(str(place), OURS)
        pq.write_table(SECRET, secret)
        log = place / "_delta_log/00000000000000000000.json"
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        (added,) = (entry["add"] for entry in entries if "add" in entry)
        added |= {"path": named.format(root=root), "size": secret.stat().st_size, "stats": None}
        log.write_text("\n".join(map(json.dumps, entries)))
        return str(place)

    return make


def iceberg(root: Path) -> str:
    from pyiceberg.catalog.memory import InMemoryCatalog

    catalog = InMemoryCatalog("x", warehouse=f"file://{root}/secret")
    catalog.create_namespace("n")
    table = catalog.create_table("n.t", schema=SECRET.schema)
    table.append(SECRET)
    (root / "in/t/metadata").mkdir(parents=True)
    metadata = table.metadata_location.removeprefix("file://")
    shutil.copy(metadata, root / "in/t/metadata/00001-x.metadata.json")
    return f"{root}/in/t"


def lance_link(root: Path) -> str:
    import lance

    for name, rows in (("secret", SECRET), ("in", OURS)):
        lance.write_dataset(rows, f"{root}/{name}/t")
    (ours,), (secret,) = ((root / name / "t/data").iterdir() for name in ("in", "secret"))
    ours.unlink()
    ours.symlink_to(secret)
    return f"{root}/in/t"


def lance_base(root: Path) -> str:
    from lance import DatasetBasePath, write_dataset

    base = DatasetBasePath(f"{root}/secret/base", "b")
    write_dataset(SECRET, f"{root}/in/t", mode="create", initial_bases=[base], target_bases=["b"])
    return f"{root}/in/t"


def lance_clone(root: Path) -> str:
    import lance

    made = lance.write_dataset(SECRET, f"{root}/secret/t")
    made.shallow_clone(f"{root}/in/t", made.version)
    return f"{root}/in/t"


TABLES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "delta, above": ("delta", delta("../../secret/s.parquet")),
    "delta, above and escaped": ("delta", delta("%2e%2e/%2e%2e/secret/s.parquet")),
    "delta, a URL": ("delta", delta("file://{root}/secret/s.parquet")),
    "delta, a path": ("delta", delta("{root}/secret/s.parquet")),
    "iceberg": ("iceberg", iceberg),
    "lance, a link": ("lance", lance_link),
    "lance, another base": ("lance", lance_base),
    "lance, a clone": ("lance", lance_clone),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_brings_in_no_file_of_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for folder in ("in", "secret"):
        (tmp_path / folder).mkdir()
    kind, make = TABLES[name]
    source = Source.model_validate({"uri": make(tmp_path), "format": kind})
    set_policy(monkeypatch, tmp_path, read=["in"])
    with policy_applied(operator_policy()), pytest.raises(ConfigError, match=r"may not read"):
        read(read_spec(source))
    set_policy(monkeypatch, tmp_path, read=["in", "secret"])
    with policy_applied(operator_policy()):
        assert read(read_spec(source)) == ["secret"]


def read(source: ReadSpec) -> list[str]:
    peek(source)
    ((_, rows),) = head_of(str(source.format), source)
    return list(rows["Company"].to_pylist())


def test_a_forged_plan_reads_through_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/link").symlink_to("/etc")
    source = reads(uri=f"{tmp_path}/in")
    file = InputFile(uri=f"{tmp_path}/in/link/passwd", size=1, etag=None, mtime_ns=1, rows=1)
    set_policy(monkeypatch, tmp_path, read=["in"])
    with policy_applied(operator_policy()), pytest.raises(ConfigError, match="may not read"):
        check_planned([file], source, snapshot=False)
    with pytest.raises(CorruptRun):
        check_planned([file], source, snapshot=True)
