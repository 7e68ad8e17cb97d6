"""Files copied side by side, against one after the other: the same rows in the same order, the same
types, and the same words for what is wrong."""

import gzip
import json
import random
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import make_job
from helpers.specs import reads

from prefect_raybatch import cpu_limit
from prefect_raybatch.api import plan_run
from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.source import (
    csv_text,
    cuts,
    forget_copied,
    side_copies,
    snapshot,
    snapshots,
    streams,
)
from prefect_raybatch.storage import open_store

CUT, BLOCK = 2048, 512


def table_of(folder, name, uri, **fields):
    """(rows and types, read again; row group sizes aside) of a snapshot, or the error's text."""
    store = open_store(str(folder / name))
    try:
        made = snapshot(reads(uri=uri, **fields), store, "attempt")
    except RayBatchError as error:
        return f"{type(error).__name__}: {error}".replace(str(folder), "")
    read = [pq.read_table(folder / name / file.uri) for file in made.files]
    assert [file.rows for file in made.files] == [len(table) for table in read]
    assert all(table.schema.equals(made.schema) for table in read)
    rows = pa.concat_tables(read).combine_chunks() if read else None
    forget_copied(store, "attempt", {file.uri for file in made.files})  # as with a plan
    left = {p for p in (folder / name).rglob("*") if p.is_file()}
    assert left == {folder / name / file.uri for file in made.files}
    return rows


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cuts, "CUT_BYTES", CUT)
    monkeypatch.setattr(streams, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(side_copies, "SHARE_FILES", 3)


@pytest.fixture
def both(small, monkeypatch, tmp_path):
    """(rows or error of either way, which must agree; shares that were copied side by side)"""
    copied = side_copies.copy_shares
    number = iter(range(10_000))

    def copy(uri, **fields):
        shares = []

        def counted(given, *args, **more):
            shares.append(len(given))
            return copied(given, *args, **more)

        place = tmp_path / f"copy-{next(number)}"
        monkeypatch.setattr("prefect_raybatch.source.snapshots.copy_shares", counted)
        apart = table_of(place, "run", uri, **fields)
        shutil.rmtree(place, ignore_errors=True)
        with monkeypatch.context() as patch:
            patch.setattr(cuts, "CUT_BYTES", 1 << 40)
            patch.setattr(side_copies, "SHARE_FILES", 1 << 40)
            before = len(shares)
            alone = table_of(place, "run", uri, **fields)
            assert len(shares) == before
        if isinstance(alone, str) or alone is None:
            assert apart == alone
        else:
            assert not isinstance(apart, str), apart
            assert apart.schema.equals(alone.schema) and apart.equals(alone)
        return alone, sum(shares)

    return copy


def files(folder, *contents, end="csv"):
    folder.mkdir()
    for number, content in enumerate(contents):
        data = content.encode() if isinstance(content, str) else content
        (folder / f"{number:03d}.{end}").write_bytes(data)
    return str(folder)


def csv(*rows, header="a,b,c", line="\n"):
    return line.join([header, *rows]) + line


def numbered(count, *more):
    return [f"{i},name {i},{i % 7}" for i in range(count)] + list(more)


CSVS = {
    "plain": [csv(*numbered(900))],
    "quoted": [csv(*(f'{i},"a ""b"", {i}\n\n",""' for i in range(500)))],
    "quoted, CRLF": [csv(*(f'"{i}","x\n\ny","z"' for i in range(500)), line="\r\n")],
    "all within quotes": [csv(*(f'1,"{"n" * 90}{chr(10) * 9}",2' for _ in range(99)))],
    "a quote where none may stand": [csv(*numbered(300, '1,5" pipe,2', *numbered(300)))],
    "a quoted header": [csv(*numbered(500), header='"a\n""x""","b","c"')],
    "a mark, empty lines": ["\ufeff\n\n" + csv(*numbered(400), "", "", *numbered(200))],
    "no last line break": [csv(*numbered(600)).rstrip()],
    "carriage returns": [csv(*numbered(600), line="\r")],
    "floats late": [csv(*numbered(500, "1.5,x,2"), *numbered(99))],
    "long numbers before floats": [csv("12345678901234567,x,1", *numbered(400, "1.5,x,2"))],
    "long numbers after floats": [csv("1.5,x,1", *numbered(400, "12345678901234567,x,2"))],
    "text late": [csv(*numbered(700, "x,y,z"))],
    "leading zeros late": [csv(*numbered(700, "02139,y,3"))],
    "booleans": [csv(*("true,x,True" for _ in range(400)), *("FALSE,y,z" for _ in range(99)))],
    "null at first": [csv(*(",x," for _ in range(400)), *numbered(99))],
    "null only": [csv(*(",x," for _ in range(400)))],
    "null in one file": [csv(",,"), csv(*numbered(500)), csv(",x,"), csv("1.5,y,")],
    "many": [csv(*numbered(n % 5 + 1)) for n in range(40)],
    "a header and no rows": [csv(*numbered(5)), csv(), csv(*numbered(900)), csv()],
    "no rows at all": [csv() for _ in range(9)],
    "numbers, then text, in files": [csv("1,a,2"), *[csv("1,a,2")] * 7, csv(*["x,y,z"] * 200)],
    "numbers, then floats, in files": [csv("1,a,2"), *[csv("1.25,a,2")] * 7],
    "another column in one": [*[csv("1,a,2")] * 7, csv("1,2", header="a,b"), csv("1,a,2")],
    "a bad row in the eighth": [*[csv("1,a,2")] * 7, csv("1,a,2", "1,2"), csv("1,2")],
    "a bad row late": [csv(*numbered(700, "1,2"), *numbered(99))],
    "no UTF-8 late": [csv(*numbered(700)).encode() + b"1,\xff,2\n" + b"1,2,3\n" * 99],
    "a quote that is never closed": [csv(*numbered(300, '1,"open,2', *numbered(100)))],
    "an empty file": [csv(*numbered(900)), ""],
}


@pytest.mark.parametrize("name", CSVS)
def test_csv(name, both, tmp_path):
    both(files(tmp_path / "in", *CSVS[name]))


def test_line_breaks_in_quotes_stay_as_they_are_wherever_a_block_ends(both, tmp_path):
    rows = [f'"{i}","x\r\ny","z"' for i in range(500)]
    found, shares = both(files(tmp_path / "in", csv(*rows, line="\r\n")))
    assert set(found["b"].to_pylist()) == {"x\r\ny"} and shares > 1


@pytest.mark.parametrize("how", ["plain", "gz", "zst", "latin-1", "utf-16", "gz in latin-1"])
def test_so_they_do_in_files_that_are_compressed_or_recoded(how, both, monkeypatch, tmp_path):
    """Of a file whose blocks nobody can know; and of a plain one for which no size of a block will
    do."""
    monkeypatch.setattr(csv_text, "BLOCK_TRIES", 0)
    rows = ['"ä","x\r\ny\r\n\r\nz","\r\n"'] * 500
    encoding = next((name for name in ("latin-1", "utf-16") if name in how), "utf-8")
    data = csv(*rows, line="\r\n").encode(encoding)
    end = "csv"
    if "gz" in how:
        data, end = gzip.compress(data), "csv.gz"
    if "zst" in how:
        data, end = pa.compress(data, codec="zstd", asbytes=True), "csv.zst"
    found, _ = both(files(tmp_path / "in", data, end=end), csv={"encoding": encoding})
    assert found.num_rows == 500
    assert set(found["b"].to_pylist()) == {"x\r\ny\r\n\r\nz"}
    assert set(found["c"].to_pylist()) == {"\r\n"}


def test_a_large_csv_is_cut_and_many_small_ones_are_put_together(both, tmp_path):
    plain = files(tmp_path / "one", *CSVS["quoted"])
    assert both(plain)[1] > 5
    assert both(files(tmp_path / "many", *CSVS["many"]))[1] == 14
    # nobody can say what a quote in the middle of a value is, but who reads from the start
    assert both(files(tmp_path / "odd", *CSVS["a quote where none may stand"]))[1] == 0


OPTIONS = {
    "columns": {"columns": ["c", "a"]},
    "filter": {"filter": "c > 3 AND b <> 'name 9'"},
    "filter of no row": {"filter": "c > 300"},
    "filter that does not fit": {"filter": "b > 3"},
    "filter and columns": {"filter": "c = 3", "columns": ["b"]},
    "no header": {"csv": {"header": False}},
    "names": {"csv": {"names": ["x", "y", "z"]}},
    "nulls": {"csv": {"null_values": ["3", "name 8"]}},
    "no quotes": {"csv": {"quote": ""}},
    "single quotes": {"csv": {"quote": "'"}},
    "escapes": {"csv": {"escape": "\\"}},
    "skipped rows": {"csv": {"skip_rows": 3}},
    "another encoding": {"csv": {"encoding": "latin-1"}},
    "a limit": {"limit": 77},
    "an unknown column": {"columns": ["d"]},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, both, tmp_path):
    given = csv(*numbered(400, "8,'n\n',3"))
    both(files(tmp_path / "in", given, csv(*numbered(3)), given), **OPTIONS[name])


def lines(*rows):
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


ROWS = [{"a": i, "b": "x" * (i % 50), "c": {"d": i}} for i in range(300)]
JSONS = {
    "plain": [lines(*ROWS)],
    "floats late": [lines(*ROWS, {"a": 1.5}, *ROWS)],
    "a key late": [lines(*ROWS, {"e": [1]}, *ROWS), lines({"f": True})],
    "keys in another order": [lines(*ROWS), lines({"z": 1, "c": {"g": "x"}, "b": None})],
    "null at first": [lines(*({"a": None} for _ in range(300)), {"a": "x"})],
    "times": [lines(*({"a": "2026-01-01"} for _ in range(300)), {"a": "soon"})],
    "a mark, empty lines": ["\ufeff" + lines(*ROWS, "", " ", *ROWS)],
    "long lines": [lines(*ROWS[:9], {"b": "y" * 9000}, {"b": "z" * 5000}, *ROWS)],
    "an array": [json.dumps(ROWS)],
    "another type late": [lines(*ROWS, {"a": "x"}, *ROWS)],
    "another type in a file": [lines(*ROWS), lines({"a": "x"})],
    "a bad line in the eighth": [*[lines({"a": 1})] * 7, lines({"a": 1}, "{"), "{"],
    "a bad line late": [lines(*ROWS, "{", *ROWS)],
    "an array late": [lines(*ROWS, "[1]", *ROWS)],
    "no last line break": [lines(*ROWS).rstrip()],
}


@pytest.mark.parametrize("name", JSONS)
def test_json_lines(name, both, tmp_path):
    both(files(tmp_path / "in", *JSONS[name], end="jsonl"))


def test_compressed_files_and_columns_of_the_path(both, tmp_path):
    for number in range(9):
        folder = tmp_path / "in" / f"day={number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        data = gzip.compress(csv(*numbered(200)).encode())
        (folder / f"{number}.csv.gz").write_bytes(data)
    assert both(str(tmp_path / "in"))[1] > 1
    assert both(str(tmp_path / "in"), columns=["day", "b"])[1] > 1


def test_any_text(both, tmp_path):
    """Whatever stands in a CSV file, quotes above all: the same rows, or the same words."""
    chance = random.Random(11)
    cut = 0
    for number in range(25):
        cells = ["1", "x", "", '""', '"a\nb"', '"q""q"', "2.5", "true", 'a"b', '"a"b', " "]
        usual = chance.random() < 0.7
        rows = [
            ",".join(chance.choice(cells[:8] if usual else cells) for _ in range(2))
            for _ in range(chance.randrange(300, 600))
        ]
        uri = files(tmp_path / f"in-{number}", csv(*rows, header="a,b"))
        cut += both(uri)[1] > 0
    assert 9 < cut < 25


def test_a_filter_is_compared_with_the_types_of_all_parts(both, tmp_path):
    uri = files(tmp_path / "in", csv(*numbered(300, "02139,y,3", *numbered(400))))
    rows, shares = both(uri, filter="a = '02139'")
    assert rows["b"].to_pylist() == ["y"] and shares > 1
    error, _ = both(uri, filter="a = 2139")
    assert "column 'a' is string" in error


LONG = "12345678901234567"  # more digits than a float64 holds


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_numbers_that_fractions_elsewhere_would_round_stay_as_written(order, both, tmp_path):
    ids = [[LONG, "2"], ["1.5"], ["3"], ["4"]]
    texts = [csv(*(f"{i},x,y" for i in ids[at])) for at in order]
    rows, _ = both(files(tmp_path / "in", *texts))
    assert sorted(rows["a"].to_pylist()) == sorted([LONG, "2", "1.5", "3", "4"])
    lines = ["".join(json.dumps({"a": json.loads(i)}) + "\n" for i in ids[at]) for at in order]
    rows, _ = both(files(tmp_path / "lines", *lines, end="jsonl"))
    assert sorted(rows["a"].to_pylist()) == sorted([LONG, "2", "1.5", "3", "4"])
    texts = [text.replace(LONG, "1234567") for text in texts]
    rows, _ = both(files(tmp_path / "short", *texts))
    assert sorted(map(float, rows["a"].to_pylist())) == [1.5, 2.0, 3.0, 4.0, 1234567.0]


# --- a copy that was cut off --------------------------------------------------------------------


class Killed(BaseException):
    """In place of a kill: nothing in the package catches it to tidy up."""


@pytest.fixture
def copying(small, monkeypatch, tmp_path):
    """A function that copies `uri`, one share after the other, and gives (rows, files of the
    snapshot, places of the parts that were read to their end); killed once `kill_after` are."""
    read = snapshots.csv_tables
    monkeypatch.setattr(cpu_limit, "usable_cpus", lambda: 1)

    def copy(uri, kill_after=None, attempt="attempt", **fields):
        done = []

        def tables(file, *args, **more):
            if len(done) == kill_after:
                raise Killed
            yield from read(file, *args, **more)
            done.append((file.info.path, 0 if file.cut is None else file.cut.at))

        store = open_store(str(tmp_path / "run"))
        with monkeypatch.context() as patch:
            patch.setattr(snapshots, "csv_tables", tables)
            if kill_after is not None:
                with pytest.raises(Killed):
                    snapshot(reads(uri=uri, **fields), store, attempt)
                return None, (), done
            made = snapshot(reads(uri=uri, **fields), store, attempt)
        parts = [pq.read_table(tmp_path / "run" / file.uri) for file in made.files]
        assert all(part.schema.equals(made.schema) for part in parts)
        return pa.concat_tables(parts), made.files, done

    return copy


def stored(tmp_path):
    return {str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*.parquet")}


@pytest.mark.parametrize("late", [(), ("x,1.5,y",)])
def test_a_copy_that_was_killed_goes_on_from_its_parts(copying, tmp_path, late):
    uri = files(tmp_path / "in", csv(*numbered(900, *late)))
    want, whole, all_read = copying(uri, attempt="whole")
    shutil.rmtree(tmp_path / "run")
    before = copying(uri, kill_after=3, attempt="first")[2]
    kept = stored(tmp_path)
    assert len(before) == len(kept) == 3
    rows, found, after = copying(uri, attempt="second")
    assert rows.equals(want) and len(found) == len(whole)
    assert sorted(before + after) == sorted(all_read), "each part was to be read once"
    if not late:  # else they were read again for their types, by which nothing is kept
        assert kept < {file.uri for file in found}
    again = copying(uri, attempt="third")
    assert again[1] == found
    assert len(again[2]) == len(late), "but for the part that showed the types anew"


def changed_file(tmp_path, uri):
    path = tmp_path / "in/000.csv"
    path.write_text(path.read_text().replace("name 1,", "nama 1,"))


def changed_fields(tmp_path, uri):
    return {"columns": ["a", "c"]}


def lost_part(tmp_path, uri):
    for path in (tmp_path / "run").rglob("*.parquet"):
        path.unlink()


def changed_part(tmp_path, uri):
    for path in (tmp_path / "run").rglob("*.parquet"):
        path.write_bytes(path.read_bytes() + b"x")


def bad_record(tmp_path, uri):
    for path in (tmp_path / "run").rglob("*.json"):
        path.write_bytes(b"{}")


def foreign_record(tmp_path, uri):
    for path in (tmp_path / "run").rglob("*.json"):
        path.write_text(path.read_text().replace("_raybatch/input/first", "data/first"))


@pytest.mark.parametrize(
    "change",
    [changed_file, changed_fields, lost_part, changed_part, bad_record, foreign_record],
    ids=lambda change: change.__name__,
)
def test_what_was_copied_of_another_input_or_is_not_there_is_copied_again(
    copying, tmp_path, change
):
    uri = files(tmp_path / "in", csv(*numbered(900)))
    copying(uri, kill_after=3, attempt="first")
    kept = stored(tmp_path)
    fields = change(tmp_path, uri) or {}
    rows, found, after = copying(uri, attempt="second", **fields)
    assert not kept & {file.uri for file in found}
    shutil.rmtree(tmp_path / "run")
    want, _, all_read = copying(uri, attempt="third", **fields)
    assert rows.equals(want) and sorted(after) == sorted(all_read)


def test_records_and_parts_of_other_types_go_once_there_is_a_plan(copying, tmp_path):
    uri = files(tmp_path / "in", csv(*numbered(900, "x,1.5,y")))
    store = open_store(str(tmp_path / "run"))
    copying(uri, kill_after=2, attempt="first")
    earlier = stored(tmp_path)
    found = copying(uri, attempt="second")[1]
    assert len(stored(tmp_path)) > len(found)
    forget_copied(store, "second", {file.uri for file in found})
    assert stored(tmp_path) == earlier | {file.uri for file in found}
    assert not list((tmp_path / "run").rglob("*.json"))


def test_a_plan_takes_the_parts_of_a_run_that_was_killed_while_it_copied(copying, tmp_path):
    uri = files(tmp_path / "in", csv(*numbered(900)))
    copying(uri, kill_after=3, attempt="first")
    kept = stored(tmp_path)
    job = make_job(
        source={"uri": uri},
        prompt={"template": "{b}"},
        output={"uri": str(tmp_path)},
    )
    plan_run(job, "run")
    ledger = Ledger(open_store(str(tmp_path / "run")))
    named = {file.uri for file in ledger.files(ledger.load_plan())}
    assert kept < named == {path for path in stored(tmp_path) if "/input/" in path}
    assert not (tmp_path / "run/_raybatch/input/copied").exists()
