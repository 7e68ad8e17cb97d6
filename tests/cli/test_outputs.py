"""The commands for job files and output folders: init, schema, runs, history, prune."""

from __future__ import annotations

import io
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import write_deltalake
from helpers.retries import first_run

from prefect_raybatch import demo
from prefect_raybatch.cli.commands import main
from prefect_raybatch.job.batch_job import BatchJob

ROOT = Path(__file__).parents[2]


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """(exit status, what a command printed, what it said beside)."""
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    found = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), found.out, found.err


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    names = pa.array(["Acme", "Stone"])
    pq.write_table(
        pa.table({"id": [1, 2], "a: b": names, "Company": names}), tmp_path / "firms.parquet"
    )
    return tmp_path / "firms.parquet"


def test_init_writes_a_job_for_a_table_with_its_columns(table, capsys):
    code, _, err = said(capsys, "init", "firms.parquet")
    assert code == 0 and "wrote job.yaml: 3 columns in firms.parquet" in err
    job = BatchJob.from_yaml("job.yaml")
    assert (job.name, job.source.uri, job.source.limit) == ("firms", "firms.parquet", 100)
    assert job.prompt.template == "What is this? {Company}"
    text = Path("job.yaml").read_text()
    assert "#   id: int64\n#   a: b: string\n#   Company: string\n" in text


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_init_asks_about_the_longest_text(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"key": "T-0001", "body": "my parcel is late", "by": "Anna", "n": 10**12}] * 3
    frame = pd.DataFrame([*rows, {**rows[0], "body": None}])
    if kind == "parquet":
        frame.to_parquet("in.parquet")
    elif kind == "csv":
        frame.to_csv("in.csv", index=False)
    else:
        frame.to_json("in.jsonl", orient="records", lines=True)
    assert said(capsys, "init", f"in.{kind}")[0] == 0
    assert BatchJob.from_yaml("job.yaml").prompt.template == "What is this? {body}"


GERMAN = "id;Firma\n1;Müller & Söhne\n2;Bäckerei\n"
WRITTEN = [  # text, how it is written, what source.csv says then, whether that is a guess
    ("id,Firma\n1,Müller\n", "utf-8", {}, False),
    ("id,Firma\n1,Müller\n", "utf-8-sig", {}, False),
    (GERMAN, "utf-8", {"delimiter": ";"}, False),
    (GERMAN, "cp1252", {"delimiter": ";", "encoding": "cp1252"}, True),
    (GERMAN.replace("ü", "\x81"), "latin-1", {"delimiter": ";", "encoding": "iso8859-1"}, True),
    (GERMAN.replace(";", "\t"), "utf-16", {"delimiter": "\t", "encoding": "utf-16"}, False),
    (GERMAN.replace(";", "|"), "utf-16-le", {"delimiter": "|", "encoding": "utf-16-le"}, False),
    ("sep=;\n" + GERMAN, "utf-8", {"delimiter": ";", "skip_rows": 1}, False),
    ("Firma\nMüller; Söhne\n", "utf-8", {}, False),
]


@pytest.mark.parametrize(("text", "encoding", "csv", "guessed"), WRITTEN)
def test_init_says_how_a_csv_file_is_written(
    text, encoding, csv, guessed, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("in.csv").write_bytes(text.encode(encoding))
    code, out, err = said(capsys, "init", "in.csv")
    assert code == 0, err
    assert ("is a guess" in err) is guessed and ("--no-answers" in out) is guessed
    job = BatchJob.from_yaml("job.yaml")
    assert job.source.csv.model_dump(exclude_unset=True) == csv
    code, shown, err = said(capsys, "preview", "job.yaml", "--no-answers")
    assert code == 0, err
    firms = [line.split(";")[-1] for line in GERMAN.splitlines()[1:]]
    if "id" in text and "\x81" not in text:
        assert "  Firma: string" in shown and firms[0].split(" ")[0] in shown


def test_init_looks_into_the_first_file_of_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for part in range(2):
        Path(f"in/{part}.csv").write_text(GERMAN, encoding="cp1252")
    assert said(capsys, "init", "in")[0] == 0
    assert BatchJob.from_yaml("job.yaml").source.csv.delimiter == ";"


def test_what_init_leaves_in_comments_can_be_taken_in(table, capsys):
    assert said(capsys, "init", "firms.parquet")[0] == 0
    text = Path("job.yaml").read_text()
    more = text.replace("  # choice:", "  choice:").replace("# limits:", "limits:")
    more = more.replace("#   max_failed_fraction", "  max_failed_fraction")
    assert more.count("#") == text.count("#") - 3
    Path("job.yaml").write_text(more)
    job = BatchJob.from_yaml("job.yaml")
    assert job.sampling.choice == ["yes", "no"] and job.limits.max_failed_fraction == 0.05


def test_init_takes_what_options_say_and_replaces_nothing_unasked(table, capsys):
    asked = ["--template", "Say: '{id}' # \"x\"", "--model", "a/b", "--output", "s3://b/out"]
    more = [*asked, "--name", "firms-2", "--file", "other.yaml"]
    assert said(capsys, "init", "firms.parquet", *more)[0] == 0
    job = BatchJob.from_yaml("other.yaml")
    assert job.prompt.template == "Say: '{id}' # \"x\""
    assert (job.name, job.engine.model, job.output.uri) == ("firms-2", "a/b", "s3://b/out")
    code, _, err = said(capsys, "init", "firms.parquet", "--file", "other.yaml")
    assert code == 2 and "other.yaml already exists" in err
    assert said(capsys, "init", "firms.parquet", "--file", "other.yaml", "--force")[0] == 0


def test_init_says_what_is_wrong_with_a_table(table, capsys):
    code, _, err = said(capsys, "init", "missing.parquet")
    assert code == 2 and "missing.parquet" in err and not Path("job.yaml").exists()


def write_tables(folder: Path) -> None:
    text = "id;web address;body;tag\n1;https://example.org/a/long/one/that/is/here;it is late;x\n"
    (folder / "in.txt").write_text(text, encoding="utf-8")
    (folder / "in$DATA.csv").write_text(text, encoding="utf-8")
    (folder / "in.tsv").write_bytes(text.replace(";", "\t").encode("utf-16"))
    with sqlite3.connect(folder / "in.db") as database:
        database.execute("CREATE TABLE t (id INTEGER, body TEXT)")
        database.execute("INSERT INTO t VALUES (1, 'it is late')")
    (folder / "hive/year=2024").mkdir(parents=True)
    (folder / "hive/year=2024/a.csv").write_text(text)
    write_deltalake(folder / "delta", pa.table({"id": [1], "body": ["it is late"]}))


@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        (["in.txt", "--format", "csv"], {"format": "csv", "csv": {"delimiter": ";"}}),
        (
            ["in.txt", "--format=csv", "--delimiter=;", "--set", 'source.csv.quote="\'"'],
            {"format": "csv", "csv": {"delimiter": ";", "quote": "'"}},
        ),
        (["in$DATA.csv"], {"csv": {"delimiter": ";"}}),
        (["in.tsv", "--encoding", "utf-16"], {"csv": {"encoding": "utf-16"}}),
        (
            ["sqlite:///in.db", "--query", "SELECT * FROM t"],
            {"query": "SELECT * FROM t"},
        ),
        (["hive"], {"csv": {"delimiter": ";"}}),
        (["hive/*/*.csv", "--set", "source.columns=[body]"], {"columns": ["body"]}),
        (["delta"], {}),
        (["delta", "--format", "delta", "--set", "source.version='0'"], {"version": "0"}),
    ],
)
def test_init_reads_every_table_that_plan_reads(
    argv: list[str],
    fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_tables(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, out, err = said(capsys, "init", *argv)
    assert code == 0, err
    assert out == "next    raybatch preview job.yaml\n"
    assert "only knows the industries of companies" in err
    job = BatchJob.from_yaml("job.yaml")
    assert job.source.uri == argv[0] and job.source.limit == 100
    found = job.source.model_dump(exclude_unset=True)
    assert {name: found.get(name) for name in fields} == fields
    assert job.prompt.template == "What is this? {body}"
    code, out, err = said(capsys, "plan", "job.yaml")
    assert code == 0, err


@pytest.mark.parametrize(("end", "warned"), [("", True), (" order  by id", False)])
def test_init_warns_of_a_query_without_an_order(end, warned, tmp_path, monkeypatch, capsys):
    write_tables(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, _, err = said(capsys, "init", "sqlite:///in.db", "--query", f"SELECT * FROM t{end}")
    assert code == 0 and ("End it with ORDER BY and a unique key" in err) is warned


def test_init_proposes_a_column_of_conversations(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chat = [[{"role": "user", "content": "Hello there"}]]
    pq.write_table(pa.table({"id": ["a long key"], "chat": chat}), "in.parquet")
    code, _, err = said(capsys, "init", "in.parquet", "--model", "owner/model")
    assert code == 0 and "only knows" not in err
    job = BatchJob.from_yaml("job.yaml")
    assert (job.prompt.messages, job.prompt.template, job.prompt.system) == ("chat", None, None)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["in.txt"], "(here: --format)"),
        (["sqlite:///in.db"], "is a database. Add --query"),
        (["in.db"], "Write: raybatch init sqlite:///in.db --query 'SELECT ... FROM"),
        (["in.db", "--query", "SELECT 1"], "init sqlite:///in.db --query 'SELECT 1'"),
        (["odd.dat"], "Write: raybatch init sqlite:///odd.dat --query"),
        (["latin.csv", "--encoding", "utf-8"], "is not UTF-8"),
        (["latin.csv", "--encoding", "utf-8"], "(here: --encoding)"),
        (["none/a.csv"], "no folder"),
        (["in.txt", "--format", "csv", "--template", "Is {bdy}?"], "did you mean 'body'?"),
        (["in.txt", "--format", "csv", "--template", "Is it?"], "names no column"),
        (["in.txt", "--template", "{id}", "--function", "a.py:b"], "exclude each other"),
        (["in.txt", "--set", "engine.model=x"], "init sets fields of source only"),
        (["odd.csv"], "a template can name no column"),
    ],
)
def test_init_says_what_to_add(
    argv: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_tables(tmp_path)
    (tmp_path / "odd.csv").write_text("a.b,c[0]\n1,2\n")
    (tmp_path / "odd.dat").write_bytes((tmp_path / "in.db").read_bytes())
    (tmp_path / "latin.csv").write_text("a\nMüller\n", encoding="latin-1")
    monkeypatch.chdir(tmp_path)
    code, _, err = said(capsys, "init", *argv)
    assert code != 0 and words in " ".join(err.split()) and not Path("job.yaml").exists()


def test_init_takes_a_function_of_a_file(table, capsys):
    Path("prompts.py").write_text("def ask(row):\n    return row['Company']\n")
    assert said(capsys, "init", "firms.parquet", "--function", "prompts.py:ask")[0] == 0
    code, out, err = said(capsys, "preview", "job.yaml", "--no-answers")
    assert code == 0 and "Acme" in out, err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("{'sampling': {}}", "a dict with the keys 'sampling'"),
        ("[]", "an empty list"),
        ("{'messages': {'role': 'user', 'content': 'a'}}", "its 'messages' are a dict"),
        ("__import__('numpy').array(['a', 'b'])", "it returned ndarray"),
        ("row['Compny']", "KeyError: 'Compny'"),
    ],
)
def test_a_function_that_makes_no_prompt_is_a_problem_of_the_plan(table, answer, words, capsys):
    Path("prompts.py").write_text(f"def ask(row):\n    return {answer}\n")
    assert said(capsys, "init", "firms.parquet", "--function", "prompts.py:ask")[0] == 0
    code, out, err = said(capsys, "plan", "job.yaml")
    assert code == 1 and "problem: prompt.function: none of 2 sampled rows" in out, err
    assert words in out and "next" not in out and not Path("out").exists()
    code, out, err = said(capsys, "preview", "job.yaml", "--no-answers")
    assert code == 1 and "no row made a prompt" in out, err
    assert words in out and out.endswith("next    raybatch preview job.yaml\n")
    assert said(capsys, "preview", "job.yaml", "--no-answers", "--json")[0] == 1


def test_a_function_for_which_no_row_is_found_is_no_problem_of_the_plan(table, capsys):
    """The first block of a filtered input may have none, though others have."""
    Path("prompts.py").write_text("def ask(row):\n    return row['Company']\n")
    assert said(capsys, "init", "firms.parquet", "--function", "prompts.py:ask")[0] == 0
    _, out, err = said(capsys, "plan", "job.yaml", "--set", "source.filter=Company = 'none'")
    assert "columns" in out and "prompt.function" not in out, err


def test_init_asks_again_in_a_terminal(table, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("{Compny}?\n{Company}?\nowner/model\nresults\n"))
    code, _, err = said(capsys, "init", "firms.parquet")
    assert code == 0 and "did you mean 'Company'?" in err
    job = BatchJob.from_yaml("job.yaml")
    assert (job.prompt.template, job.engine.model) == ("{Company}?", "owner/model")
    assert job.output.uri == "results"


def test_init_writes_an_example_that_can_be_planned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, _ = said(capsys, "init", "--example")
    assert code == 0 and out == "next    raybatch preview companies.yaml\n"
    # The table of the deployments, which is made by the same generator.
    assert Path("companies.csv").read_bytes() == (ROOT / "deployments/customers.csv").read_bytes()
    assert len(Path("companies.yaml").read_text().splitlines()) <= 10
    job = BatchJob.from_yaml("companies.yaml")
    assert (job.engine.model, job.source.uri) == ("demo", "companies.csv")
    assert job.prompt.system == demo.SYSTEM and job.sampling.choice == list(demo.LABELS)
    code, text, err = said(capsys, "plan", "companies.yaml")
    assert code == 0, err
    assert "300 rows" in text and text.splitlines()[-1] == "next    raybatch run companies.yaml"


def test_init_replaces_no_example_unasked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("companies.yaml").write_text("mine")
    code, _, err = said(capsys, "init", "--example")
    assert code == 2 and "companies.yaml already exists" in err and "--force" in err
    assert not Path("companies.csv").exists() and Path("companies.yaml").read_text() == "mine"
    assert said(capsys, "init", "--example", "--force")[0] == 0
    assert BatchJob.from_yaml("companies.yaml").name == "companies"


@pytest.mark.parametrize("argv", [("init",), ("init", "in.csv", "--example")])
def test_init_takes_a_table_or_the_example(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, err = said(capsys, *argv)
    assert code == 2 and "either TABLE or --example" in err and not list(tmp_path.iterdir())


def test_the_schema_takes_every_job_file_of_ours_and_names_a_wrong_field(capsys):
    code, text, _ = said(capsys, "schema")
    assert code == 0
    checker = jsonschema.Draft202012Validator(json.loads(text))
    files = [*ROOT.glob("flows/*.yaml")]
    assert files
    for file in files:
        checker.validate(yaml.safe_load(file.read_text()))
    wrong = {**yaml.safe_load(files[0].read_text()), "nmae": 1}
    assert "nmae" in next(checker.iter_errors(wrong)).message


def test_preview_prints_types_and_prompts(table, capsys):
    assert said(capsys, "init", "firms.parquet")[0] == 0
    code, text, _ = said(capsys, "preview", "job.yaml", "--rows", "1", "--no-answers")
    assert code == 0 and "  Company: string" in text and "What is this? Acme" in text
    assert "prompt of row 0" in text and "took plan" in text and not Path("out").exists()
    code, text, _ = said(capsys, "plan", "job.yaml", "--tokens")
    assert code == 0 and "id: int64, a: b: string, Company: string" in text
    assert "What is this? Acme" in text and "firms.parquet, row 0" in text


def test_runs_are_listed_and_removed_only_when_that_is_confirmed(tmp_path, capsys, monkeypatch):
    for key in ("one", "two"):
        first_run(tmp_path, key=key)
    place = str(tmp_path)
    code, text, _ = said(capsys, "runs", place)
    assert code == 0 and "completed" in text and "age" in text
    code, text, _ = said(capsys, "runs", place, "--latest")
    assert (code, text.strip()) == (0, str(tmp_path / "two"))
    code, text, _ = said(capsys, "runs", place, "--json")
    assert {line["run_key"] for line in json.loads(text)["runs"]} == {"one", "two"}
    code, text, _ = said(capsys, "prune", place, "--keep", "1", "--dry-run")
    assert code == 0 and "would remove one" in text and "kept two" in text
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)  # nor on a terminal
    code, text, err = said(capsys, "prune", place, "--keep", "1")
    assert code == 2 and "add --yes" in err and (tmp_path / "one/_SUCCESS").exists()
    shown = r"would remove one \(20 rows, [\d.]+ MiB, \d{4}-\d\d-\d\d \d\d:\d\d UTC\)"
    assert re.search(shown, text) and "kept two" in text
    code, text, _ = said(capsys, "prune", place, "--keep", "1", "--yes", "--dry-run")
    assert code == 0 and (tmp_path / "one/_SUCCESS").exists()
    code, text, _ = said(capsys, "prune", place, "--keep", "1", "--yes", "--json")
    assert code == 0 and list(json.loads(text)["removed"]) == ["one"]
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize(
    "command", [("runs",), ("runs", "--json"), ("history",), ("prune", "--keep", "1")]
)
def test_a_folder_that_is_not_there_is_no_folder_without_runs(command, tmp_path, capsys):
    place = tmp_path / "out"
    code, text, err = said(capsys, command[0], str(place), *command[1:])
    assert (code, text) == (2, "") and f"{place}: there is no such folder" in " ".join(err.split())
    place.mkdir()
    code, text, err = said(capsys, command[0], str(place), *command[1:])
    assert code == 0 and ("no runs in" in text or '"runs": []' in text or "nothing to" in text)
    (place / "key/_raybatch").mkdir(parents=True)
    (place / "key/_raybatch/plan.json").write_text("{}")
    code, text, err = said(capsys, command[0], str(place / "key"), *command[1:])
    assert (code, text) == (2, "") and "is itself a run" in err
    (tmp_path / "file").touch()
    code, text, err = said(capsys, command[0], str(tmp_path / "file"), *command[1:])
    assert (code, text) == (2, "") and "is a file" in " ".join(err.split())


@pytest.mark.e2e
@pytest.mark.whole
def test_a_real_engine_answers_the_first_rows_without_leaving_anything(tmp_path):
    choice = ["Law Firm", "Real Estate", "Retail", "Other"]
    job = {
        "name": "industries",
        "source": {"uri": str(ROOT / "deployments/customers.csv")},
        "prompt": {"template": "What industry is this company in: {Company}"},
        "sampling": {"temperature": 0, "choice": choice},
        "engine": {"model": "demo"},
        "output": {"uri": "out"},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command = [str(Path(sys.executable).with_name("raybatch")), "preview", "job.yaml", "--json"]
    done = subprocess.run(
        [*command, "--rows", "3"],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"},  # who asks for Ray gets an error
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Ray" not in done.stderr, done.stderr
    assert "Loading" not in done.stderr and "%|" not in done.stderr, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["prompts"]) == len(found["answers"]) == 3
    assert {row["response"] for row in found["answers"]} <= set(choice)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml"]
