"""What an entry of source.uri reaches: tables, runs, links, wildcards, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import make_job
from helpers.specs import reads

from prefect_raybatch.compile.job import read_spec
from prefect_raybatch.errors import ConfigError, SourceError, StoreError, StoreUnavailable
from prefect_raybatch.runs.plan_run import check_places
from prefect_raybatch.source import detect_format, inventory
from prefect_raybatch.source.places import OPENED
from prefect_raybatch.storage import FileInfo, LocalStore


def parquet(path: Path, rows: int = 1) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"x": list(range(rows))}), path)
    return str(path)


def touch(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"{}")
    return str(path)


def names(uri: Any, **fields: Any) -> list[str]:
    return [Path(file.uri).name for file in inventory(reads(uri=uri, **fields)).files]


def refused(uri: Any, *words: str, **fields: Any) -> str:
    with pytest.raises(SourceError) as caught:
        inventory(reads(uri=uri, **fields))
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return str(caught.value)


# --- tables -----------------------------------------------------------------------------------


def delta(table: Path) -> Path:
    touch(table / "_delta_log/00000000000000000000.json")
    return Path(parquet(table / "a.parquet", 100)).parent


def iceberg(table: Path) -> Path:
    touch(table / "metadata/00001-0b5e.metadata.json")
    touch(table / "metadata/snap-1.avro")
    return Path(parquet(table / "data/a.parquet")).parent


def hadoop_iceberg(table: Path) -> Path:
    touch(table / "metadata/version-hint.text")
    return Path(parquet(table / "data/a.parquet")).parent


def hudi(table: Path) -> Path:
    touch(table / ".hoodie/hoodie.properties")
    return Path(parquet(table / "2026/a.parquet")).parent


def lance(table: Path) -> Path:
    touch(table / "_versions/1.manifest")
    return Path(touch(table / "data/0.lance")).parent


KINDS = {
    "Delta": delta,
    "Iceberg": iceberg,
    "Iceberg by Hadoop": hadoop_iceberg,
    "Hudi": hudi,
    "Lance": lance,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_refused_by_name_however_it_is_reached(tmp_path, kind):
    make: Callable[[Path], Path] = KINDS[kind]
    table = tmp_path / "lake/sales"
    data = make(table)
    file = next(path for path in data.iterdir() if path.is_file())
    said = f"{kind.split()[0]} table"
    opened = OPENED.get(kind.split()[0])
    remedy = "the folder of the table" if opened else "Parquet"
    for uri in (tmp_path / "lake", data, file, table):
        if uri != table or not opened:
            refused(str(uri), f"{table} is ", said, remedy)
    for uri in (
        f"{data}/*{file.suffix}",
        f"{tmp_path}/**/*{file.suffix}",
        f"{tmp_path}/*/sales/**",
    ):
        refused(uri, f"{table} is ", said)
    refused([str(table), parquet(tmp_path / "other.parquet")], f"{table} is ", said, remedy)
    if opened:
        assert detect_format(reads(uri=str(table), format="auto")) == opened
    else:
        with pytest.raises(SourceError, match=said):
            detect_format(reads(uri=str(table), format="auto"))
    refused([parquet(tmp_path / "plain.parquet"), str(file)], said)
    refused(str(table), said, format="parquet")


def test_a_table_that_is_not_reached_is_in_nobodys_way(tmp_path):
    delta(tmp_path / "lake/sales")
    iceberg(tmp_path / "lake/_old")
    parquet(tmp_path / "lake/plain/a.parquet")
    touch(tmp_path / "lake/plain/metadata/notes.txt")
    assert names(f"{tmp_path}/lake/plain/*.parquet") == ["a.parquet"]
    assert names(f"{tmp_path}/lake/pl*/*.parquet") == ["a.parquet"]
    (tmp_path / "lake/plain/metadata/notes.txt").unlink()
    assert names(f"{tmp_path}/lake/plain") == ["a.parquet"]
    (tmp_path / "lake/plain/_delta_log").mkdir()  # without a log it is no table
    assert names(f"{tmp_path}/lake/plain") == ["a.parquet"]


def test_a_name_that_is_not_utf_8_is_refused_with_the_file(tmp_path):
    place = os.fsencode(tmp_path) + b"/caf\xe9.csv"
    with open(place, "wb") as file:
        file.write(b"a\n1\n")
    for uri in (str(tmp_path), str(tmp_path / "*.csv")):
        refused(uri, r"caf\udce9.csv' is not UTF-8", "Rename the file or folder").encode()


@pytest.mark.parametrize("kind", KINDS)
def test_links_into_a_table_lead_into_a_table(tmp_path, kind):
    data = KINDS[kind](tmp_path / "lake/sales")
    file = next(path for path in data.iterdir() if path.is_file())
    (tmp_path / "in").mkdir()
    (tmp_path / "in/part").symlink_to(data)
    (tmp_path / "one").mkdir()
    (tmp_path / f"one/a{file.suffix}").symlink_to(file)
    for uri in ("in", "in/part", "one", f"one/a{file.suffix}", f"*/a{file.suffix}"):
        said = refused(f"{tmp_path}/{uri}", f"{kind.split()[0]} table")
        # A link to the folder of the table is the table by another name.
        assert any(f"{tmp_path}/{place} is " in said for place in ("lake/sales", "in/part"))


def test_a_table_without_files_of_its_own_is_named_too(tmp_path):
    touch(tmp_path / "t/_delta_log/00000000000000000000.json")
    refused(str(tmp_path / "t"), "Delta table", format="parquet")


# --- runs -------------------------------------------------------------------------------------


def run_directory(root: Path, finished: bool = True) -> Path:
    touch(root / "_raybatch/plan.json")
    parquet(root / "_raybatch/pieces/s0.parquet")
    parquet(root / "data/part-00000.parquet")
    parquet(root / "_quarantine/part-00000.parquet")
    if finished:
        touch(root / "_SUCCESS")
    return root


def test_the_result_of_a_run_is_read_once_it_is_finished(tmp_path):
    run = run_directory(tmp_path / "out/monday", finished=False)
    file = "part-00000.parquet"
    ways = [run / "data", run / f"data/{file}", f"{run}/data/*.parquet", f"{tmp_path}/out/*/data/*"]
    ways += [run / "_quarantine", run / "_raybatch/pieces/s0.parquet"]
    for uri in ways:
        refused(str(uri), f"{run} ", "not finished", "_SUCCESS")
    touch(run / "_SUCCESS")
    for uri in ways:
        assert len(names(str(uri))) == 1
    assert len(names([str(run / "data"), str(run / "_quarantine")])) == 2


def test_a_whole_run_directory_mixes_answers_and_failures(tmp_path):
    run = run_directory(tmp_path / "out/monday")
    for uri in (run, tmp_path / "out"):
        refused(str(uri), str(run), f"{run}/data", "quarantine")
    refused(str(run / "_raybatch"), "records", f"{run}/data")
    refused(str(run / "_raybatch/pieces"), "records", f"{run}/data")
    assert len(names(f"{run}/*/*.parquet")) == 1  # the answers: a star does not stand for _


# --- links ------------------------------------------------------------------------------------


def test_a_file_reached_by_two_names_is_refused_naming_both(tmp_path):
    folder = tmp_path / "in"
    a = parquet(folder / "a/1.parquet")
    parquet(folder / "b/2.parquet")
    (folder / "c").symlink_to("a")
    refused(str(folder), a, f"{folder}/c/1.parquet", "twice")
    refused(f"{folder}/**/*.parquet", a, f"{folder}/c/1.parquet")
    refused([f"{folder}/a", f"{folder}/c"], a, f"{folder}/c/1.parquet")
    assert names(f"{folder}/[bc]/*.parquet") == ["2.parquet", "1.parquet"]
    (folder / "c").unlink()
    (folder / "b/3.parquet").symlink_to(a)
    refused(str(folder), a, f"{folder}/b/3.parquet")
    (folder / "b/3.parquet").unlink()
    os.link(a, folder / "b/3.parquet")
    refused(str(folder), a, f"{folder}/b/3.parquet")
    (folder / "b/3.parquet").unlink()
    (folder / "a/loop").symlink_to(folder / "a")
    refused(str(folder), a, f"{folder}/a/loop/1.parquet")


def test_links_that_lead_elsewhere_are_followed(tmp_path):
    parquet(tmp_path / "else/1.parquet")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/there").symlink_to(tmp_path / "else")
    assert names(str(tmp_path / "in")) == ["1.parquet"]
    # What is not read may lead anywhere.
    (tmp_path / "in/_latest.parquet").symlink_to(tmp_path / "else/1.parquet")
    assert names(str(tmp_path / "in")) == ["1.parquet"]


# --- what is written, and what is read -----------------------------------------------------------


def test_a_name_with_brackets_that_exists_means_itself(tmp_path):
    parquet(tmp_path / "a1.parquet", 1)
    literal = parquet(tmp_path / "a[1].parquet", 2)
    found = inventory(reads(uri=literal))
    assert [f.uri for f in found.files] == [literal] and found.rows == 2
    assert names(f"{tmp_path}/a[[]1].parquet") == ["a[1].parquet"]
    assert names([f"{tmp_path}/a[1].parquet", f"{tmp_path}/a1.parquet"]) == [
        "a1.parquet",
        "a[1].parquet",
    ]
    Path(literal).unlink()
    assert names(literal) == ["a1.parquet"]


def test_a_folder_with_brackets_that_exists_means_itself(tmp_path):
    parquet(tmp_path / "d1/a.parquet")
    parquet(tmp_path / "d[1]/b.parquet")
    parquet(tmp_path / "d[1]/x/c.parquet")
    assert names(f"{tmp_path}/d[1]") == ["b.parquet", "c.parquet"]
    assert names(f"{tmp_path}/d[1]/*.parquet") == ["b.parquet"]
    assert names(f"{tmp_path}/d[1]/x/c.parquet") == ["c.parquet"]
    assert names(f"{tmp_path}/d[0-9]/*.parquet") == ["a.parquet"]


def test_a_star_takes_all_it_matches_even_where_a_file_is_called_so(tmp_path):
    parquet(tmp_path / "*.parquet")
    parquet(tmp_path / "b.parquet")
    assert names(f"{tmp_path}/*.parquet") == ["*.parquet", "b.parquet"]
    assert names(f"{tmp_path}/[*].parquet") == ["*.parquet"]


def test_the_table_of_what_a_uri_means(tmp_path, monkeypatch):
    for name in ("2026-01/x1.parquet", "2026-02/x2.parquet", "2026-02/y/x3.parquet"):
        parquet(tmp_path / name)
    for name in ("_h/a.parquet", "2026-01/.a.parquet", "2026-01/_x.parquet"):
        parquet(tmp_path / name)
    every = ["x1.parquet", "x2.parquet", "x3.parquet"]
    assert names(str(tmp_path / "2026-01/x1.parquet")) == every[:1]
    assert names(str(tmp_path)) == every
    assert names(f"{tmp_path}/2026-*/x?.parquet") == every[:2]
    assert names(f"{tmp_path}/2026-0[2]/*") == every[1:2]
    assert names(f"{tmp_path}/**/*.parquet") == every
    assert names(f"{tmp_path}/2026-02/**") == every[1:]
    assert names([f"{tmp_path}/2026-02", f"{tmp_path}/2026-01"]) == every  # by full name
    refused([f"{tmp_path}/2026-02", f"{tmp_path}/*/x2.parquet"], "listed twice", "x2.parquet")
    monkeypatch.chdir(tmp_path)
    assert names("2026-01") == every[:1] and names(f"file://{tmp_path}/2026-01") == every[:1]
    # Hidden ones only where the pattern's own part begins so.
    assert names("_*/*.parquet") == ["a.parquet"]
    assert names("2026-01/_*") == ["_x.parquet"]
    for uri in ("http://h/", "ftp://b/x.csv", "hf://d/x.csv", "s3://b*/x.csv"):
        with pytest.raises(ConfigError):
            inventory(read_spec(make_job(source={"uri": uri}).source))


@pytest.mark.parametrize(
    ("uri", "output", "inside"),
    [
        ("in", "in/out", True),
        ("in", "in", True),
        ("in/a.csv", "in", False),
        ("*.csv", "out", False),
        ("*/*.csv", "out", False),
        ("in/*.csv", "in/out", False),
        ("**/*.parquet", "out", True),
        ("in/**/data/*.parquet", "in/x", True),
        ("in/**/x/*.parquet", "in/x", False),
        ("**/*.csv", "out", False),
        ("*/*/data/*.parquet", "out", True),
        ("*/*/data/*.parquet", "a/out", False),
        ("*/monday/*/part-*", "out", True),
    ],
)
def test_an_output_where_the_next_night_would_read_it(tmp_path, monkeypatch, uri, output, inside):
    monkeypatch.chdir(tmp_path)
    job = make_job(source={"uri": uri}, output={"uri": output})
    if inside and uri == "in":  # the same in a folder whose name looks like a pattern
        (tmp_path / "d[1]/in").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "d[1]")
        other = make_job(source={"uri": f"{tmp_path}/d[1]/in"}, output={"uri": output})
        with pytest.raises(ConfigError, match="read its own results"):
            check_places(read_spec(other.source), other.output.uri, {})
    if inside:
        with pytest.raises(ConfigError, match="read its own results"):
            check_places(read_spec(job.source), job.output.uri, {})
    else:
        check_places(read_spec(job.source), job.output.uri, {})


def test_rights_that_end_at_the_input_are_enough(tmp_path, monkeypatch):
    parquet(tmp_path / "in/a.parquet")
    kept = LocalStore.stat
    errors: list[type[StoreError]] = [StoreError]

    def stat(self: LocalStore, path: str) -> FileInfo:
        if self.uri == str(tmp_path) and "/" in path:  # a look at what lies above the input
            raise errors[0](f"{self.uri}/{path}: no permission")
        return kept(self, path)

    monkeypatch.setattr(LocalStore, "stat", stat)
    assert names(str(tmp_path / "in")) == ["a.parquet"]
    errors[0] = StoreUnavailable  # what will answer later is asked later
    with pytest.raises(StoreUnavailable):
        inventory(reads(uri=str(tmp_path / "in")))
