"""Hugging Face datasets as input, with the real library against a Hub here: which rows, and what is
said. The library reads its Hub's address when it is imported, so all this is in a process of its
own."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import albums
from helpers.hub import COMMIT, OLD, Repositories, serve
from helpers.small import make_job
from helpers.specs import reads
from helpers.table_sources import companies, copied, refused
from PIL import Image

from prefect_raybatch.api import dry_run, plan_run
from prefect_raybatch.cli.show import show_plan
from prefect_raybatch.errors import ConfigError, SourceError, StoreUnavailable
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.source import detect_format, needs_snapshot, peek
from prefect_raybatch.source.filters import Filter
from prefect_raybatch.source.tables.copying import open_table
from prefect_raybatch.storage import open_store

URI = "hf://datasets/team/rows"


class Hub:
    """Repositories that a process reads, which has the library."""

    def __init__(self, there: Repositories, folder: Path, pool: ProcessPoolExecutor) -> None:
        self.there, self.folder, self._pool = there, folder, pool
        self.number = 0

    @property
    def name(self) -> str:
        """The dataset of this test: what a commit holds never changes, and is cached."""
        return f"team/rows{self.number}"

    @property
    def uri(self) -> str:
        return f"hf://datasets/{self.name}"

    def __call__(self, work: Callable[..., Any], *given: Any, **fields: Any) -> Any:
        return self._pool.submit(carried, work, *given, **fields).result(120)

    def add(self, files: dict[str, Any], commit: str = COMMIT, *names: str) -> None:
        """A dataset of the files: tables as Parquet, texts, bytes."""
        root = self.folder / self.name / commit
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, pa.Table):
                pq.write_table(content, root / path, row_group_size=1000)
            elif isinstance(content, bytes):
                (root / path).write_bytes(content)
            else:
                (root / path).write_text(content)
        self.there.add(f"datasets/{self.name}", root, commit, *names)


def carried(work: Callable[..., Any], *given: Any, **fields: Any) -> Any:
    """`work` in the process, whose failures are told as they cannot be sent."""
    try:
        return work(*given, **fields)
    except pytest.fail.Exception as failed:
        raise AssertionError(str(failed)) from None


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder, there = tmp_path_factory.mktemp("hub"), Repositories()
    with serve(there) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", url)
        patch.setenv("HF_HOME", str(folder / "home"))
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.delenv("HF_TOKEN", raising=False)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            yield Hub(there, folder, pool)


@pytest.fixture
def hub(running: Hub) -> Iterator[Hub]:
    running.there.asked.clear()
    running.number += 1
    yield running
    running.there.refuse = lambda path, headers: None


def image(colour: str) -> bytes:
    made = BytesIO()
    Image.new("RGB", (4, 4), colour).save(made, "PNG")
    return made.getvalue()


@pytest.mark.whole
def test_a_dataset_is_streamed_at_the_commit_that_its_revision_is(tmp_path, hub):
    rows = {"data/train-0.parquet": companies(0, 3000), "data/train-1.parquet": companies(3000, 9)}
    hub.add(rows)
    hub.add({"data/train-0.parquet": companies(0, 5)}, OLD, "v1")
    source = reads(uri=hub.uri)
    assert source.table_format == "huggingface" and needs_snapshot(source) and not source.stored
    made, table = hub(copied, tmp_path, hub.uri)
    assert table.equals(companies(0, 3009)) and made.format == "huggingface"
    assert made.table["version"] == COMMIT and made.table["made"].startswith("2026-07-01T12:00")
    assert made.table["uri"] == hub.uri and made.table["id"] == f"{hub.uri}/default/train"
    for revision in (
        {"uri": f"{hub.uri}@v1"},
        {"uri": hub.uri, "version": "v1"},
        {"uri": f"{hub.uri}@{OLD}"},
    ):
        made, table = hub(copied, tmp_path, **revision)
        assert table.equals(companies(0, 5)) and made.table["version"] == OLD
    found = hub(peek, reads(uri=hub.uri, columns=["id"], filter="city = 'Bonn'"))
    assert found.schema.names == ["id"] and found.rows in (1504, 1505)
    hub.there.asked.clear()
    chosen = {"columns": ["id"], "filter": "city = 'Bonn' AND id >= 2", "limit": 3}
    assert hub(copied, tmp_path, hub.uri, **chosen)[1].to_pydict() == {"id": [2, 4, 6]}


def test_a_configuration_and_a_split_are_chosen_and_asked_for_where_there_are_several(
    tmp_path, hub
):
    card = """---
configs:
- config_name: de
  data_files:
  - {split: train, path: de/train.parquet}
  - {split: test, path: de/test.parquet}
- config_name: fr
  data_files:
  - {split: train, path: fr/train.parquet}
dataset_info:
- config_name: de
- config_name: fr
  splits: [{name: train, num_examples: 4, num_bytes: 100}]
---
"""
    names = {"de/train": companies(0, 3), "de/test": companies(3, 2), "fr/train": companies(9, 4)}
    hub.add({"README.md": card, **{f"{k}.parquet": v for k, v in names.items()}})
    assert hub(copied, tmp_path, hub.uri, config="fr")[1].equals(companies(9, 4))
    assert hub(peek, reads(uri=hub.uri, config="fr")).rows == 4
    assert hub(copied, tmp_path, hub.uri, config="de", split="test")[1].equals(companies(3, 2))
    both = hub(copied, tmp_path, hub.uri, config="de", split="train+test")
    assert both[1].equals(companies(0, 5)) and both[0].table["id"] == f"{hub.uri}/de/train+test"
    for words, fields in (
        (("source.config", "several", "de, fr"), {}),
        (("source.config", "no configuration 'it'", "de, fr"), {"config": "it"}),
        (("source.split", "several", "train, test"), {"config": "de"}),
        (("source.split", "no split 'dev'", "train, test"), {"config": "de", "split": "train+dev"}),
    ):
        hub(refused, hub.uri, *words, error=ConfigError, **fields)


def test_text_gets_types_and_says_where_they_change(tmp_path, hub):
    lines = "".join(f'{{"id": {i}, "tags": ["a"], "at": null}}\n' for i in range(5))
    hub.add({"train.jsonl": lines})
    assert hub(copied, tmp_path, hub.uri)[1].schema.names == ["id", "tags", "at"]
    hub.add({"train.csv": "id,zip\n" + "".join(f"{i},{i}\n" for i in range(9))}, OLD, "v1")
    _, rows = hub(copied, tmp_path, f"{hub.uri}@v1", filter="zip > 6")
    assert rows.to_pydict() == {"id": [7, 8], "zip": [7, 8]}
    text = "id,zip\n" + "".join(f"{i},1\n" for i in range(10_000)) + "1,x\n"
    hub.add({"train.csv": text}, "c" * 40, "v2")
    said = hub(broken, tmp_path, f"{hub.uri}@v2")
    assert "column 'zip' is int64 in its first rows" in said and "rows from 10,000" in said
    assert hub(copied, tmp_path, f"{hub.uri}@v2", columns=["id"])[1].num_rows == 10_001


def broken(tmp_path: Path, uri: str, **fields: Any) -> str:
    """What is said of a source while its rows are copied."""
    with pytest.raises(SourceError) as caught:
        copied(tmp_path, uri, **fields)
    return str(caught.value)


def test_media_come_as_bytes_and_what_lies_outside_of_the_dataset_is_not_opened(tmp_path, hub):
    """Images within Parquet, as files beside their metadata, and in an archive."""
    outside = tmp_path / "secret.png"
    outside.write_bytes(image("red"))
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features = {"photo": {"_type": "Image"}, "id": {"dtype": "int64", "_type": "Value"}}
    table = pa.table(
        {
            "photo": pa.array(
                [
                    {"bytes": image("blue"), "path": "a.png"},
                    {"bytes": None, "path": str(outside)},
                    {"bytes": None, "path": "https://example.com/b.png"},
                    None,
                ],
                struct,
            ),
            "id": [0, 1, 2, 3],
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    hub.add({"train.parquet": table})
    rows = hub(copied, tmp_path, hub.uri)[1]
    assert rows.schema.field("photo").type == struct
    assert [v and v["bytes"] for v in rows["photo"].to_pylist()] == [image("blue"), *[None] * 3]
    assert rows["photo"][1].as_py()["path"] == str(outside)

    lines = "file_name,label\na.png,sky\nb.png,grass\n"
    files = {"train/a.png": image("blue"), "train/b.png": image("green")}
    hub.add({"train/metadata.csv": lines, **files}, OLD, "folder")
    rows = hub(copied, tmp_path, f"{hub.uri}@folder")[1]
    assert {r["label"]: r["image"]["bytes"] for r in rows.to_pylist()} == {
        "sky": image("blue"),
        "grass": image("green"),
    }
    assert hub(copied, tmp_path, f"{hub.uri}@folder", columns=["label"])[1].num_rows == 2

    archive = BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("c.png", image("white"))
    hub.add({"train.zip": archive.getvalue()}, "c" * 40, "zip")
    rows = hub(copied, tmp_path, f"{hub.uri}@zip")[1]
    assert rows["image"][0].as_py()["bytes"] == image("white")


def test_files_elsewhere_and_scripts_are_refused(tmp_path, hub):
    (tmp_path / "local.csv").write_text("id\n1\n")
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {tmp_path}/local.csv\n---\n"
    hub.add({"README.md": card, "train.csv": "id\n2\n"})
    hub(refused, hub.uri, "belong")
    hub.add({f"{hub.name[5:]}.py": "raise SystemExit", "train.csv": "id\n2\n"}, OLD, "script")
    hub(refused, f"{hub.uri}@script", "Python script")
    hub.add({"LICENSE": "none"}, "c" * 40, "empty")
    hub(refused, f"{hub.uri}@empty", hub.name)


def test_who_may_not_read_it_and_who_does_not_answer_is_told_apart(tmp_path, hub, monkeypatch):
    hub.add({"train.parquet": companies(0, 3)})
    hub(refused, "hf://datasets/team/gone", "team/gone", "does not exist, or is private")
    hub(refused, f"{hub.uri}@v9", "source.version", "no revision 'v9'")

    def only_with(key: str) -> Callable[[str, Any], Any]:
        def refuse(path: str, headers: Any) -> Any:
            given = {k.lower(): v for k, v in headers.items()}.get("authorization")
            message = {"X-Error-Message": "Invalid credentials in Authorization header"}
            if given == f"Bearer {key}" or (given is None and "resolve" in path and not key):
                return None
            return (401, message) if given else (401, {"X-Error-Code": "RepoNotFound"})

        return refuse

    hub.there.refuse = only_with("hf_right")
    hub(refused, hub.uri, "is private", "HF_TOKEN")
    said = hub(refused, hub.uri, "401", "access denied", options={"token": "hf_wrong"})
    assert "hf_wrong" not in said
    assert hub(copied, tmp_path, hub.uri, options={"token": "hf_right"})[1].equals(companies(0, 3))
    hub(setenv, "OUR_TOKEN", "hf_right")
    assert hub(copied, tmp_path, hub.uri, options={"token_env": "OUR_TOKEN"})[1].num_rows == 3
    missing = {"token_env": "NOT_SET"}
    hub(refused, hub.uri, "token_env", "NOT_SET is not set", error=ConfigError, options=missing)
    hub.there.refuse = lambda path, headers: (403, {"X-Error-Code": "GatedRepo"})
    hub(refused, hub.uri, "403", "request access")
    hub.there.refuse = lambda path, headers: (500, {})
    hub(refused, hub.uri, "500", error=StoreUnavailable)


def setenv(name: str, value: str) -> None:
    os.environ[name] = value


def test_files_that_fail_are_no_reason_to_take_what_the_cache_has(tmp_path, hub):
    hub.add({"train.parquet": companies(0, 3)})
    hub(cache, hub.name)
    hub.there.refuse = lambda path, headers: (400, {}) if "/tree/" in path else None
    hub(refused, hub.uri, hub.name, error=StoreUnavailable)


def cache(name: str) -> None:
    from datasets import load_dataset

    load_dataset(name)


def job_of(tmp_path: Path, **source: Any) -> Any:
    return make_job(source=source, output={"uri": str(tmp_path / "out")}, engine={"model": "demo"})


def planned(job: Any) -> tuple[Any, Any]:
    return dry_run(job), plan_run(job, "one")


def test_the_plan_keeps_the_commit_and_a_resume_asks_the_hub_nothing(tmp_path, hub, capsys):
    hub.add({"train.parquet": companies(0, 30)})
    chosen = {
        "uri": hub.uri,
        "filter": "id >= 10",
        "options": {"token": "hf_key"},
        "split": "train",
    }
    job = job_of(tmp_path, **chosen)
    seen, run = hub(planned, job)
    assert (seen.rows, seen.format, seen.table["version"]) == (20, "huggingface", COMMIT)
    assert run.rows == 20
    show_plan(seen)
    told = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "20 rows of a Hugging Face source at version" in told
    store = open_store(str(tmp_path / "out/one"))
    kept = Ledger(store).load_plan()
    assert kept.table["version"] == COMMIT and kept.parts["source.split"] == "train"
    assert b"hf_key" not in store.read("_raybatch/plan.json")
    hub.add({"train.parquet": companies(30, 30)}, OLD, "main")
    hub.there.commits[f"datasets/{hub.name}"].pop(COMMIT)
    hub.there.asked.clear()
    assert hub(plan_run, job, "one").plan_hash == run.plan_hash
    assert hub.there.asked == []
    hub(refused, f"{hub.uri}@{COMMIT}", "source.version", "no revision", "or no longer")


def saved(folder: Path, table: pa.Table) -> str:
    from datasets import Dataset

    Dataset(table).save_to_disk(str(folder))
    return str(folder)


def test_a_folder_that_save_to_disk_wrote_is_opened_by_name_and_pinned(tmp_path):
    from datasets import Array2D, ClassLabel, Dataset, DatasetDict, Features, Json

    uri = saved(tmp_path / "d", companies(0, 2500))
    assert detect_format(reads(uri=uri)) == "huggingface"
    made, rows = copied(tmp_path, uri)
    state = json.loads((tmp_path / "d/state.json").read_text())
    assert rows.equals(companies(0, 2500)) and made.table["version"] == state["_fingerprint"]
    assert peek(reads(uri=uri, filter="id < 10")).rows == 10
    assert copied(tmp_path, uri, columns=["id"], limit=2)[1].to_pydict() == {"id": [0, 1]}
    assert copied(tmp_path, f"{uri}/*.arrow")[1].num_rows == 2500  # as files it still is read
    saved(tmp_path / "d2", companies(0, 3))
    for file in (tmp_path / "d2").iterdir():
        shutil.copy(file, tmp_path / "d" / file.name)
    refused(uri, "source.version", "saved again", version=state["_fingerprint"])

    features = Features(
        {"m": Array2D((2, 2), "int8"), "c": ClassLabel(names=["x", "y"]), "j": Json()}
    )
    data = {"m": [[[1, 2], [3, 4]]], "c": ["y"], "j": [{"a": 1}]}
    both = DatasetDict(
        {"a": Dataset.from_dict(data, features=features), "b": Dataset(companies(0, 4))}
    )
    both.save_to_disk(str(tmp_path / "both"))
    rows = copied(tmp_path, str(tmp_path / "both"), split="a")[1]
    assert rows.to_pydict() == {"m": [[[1, 2], [3, 4]]], "c": [1], "j": ['{"a":1}']}
    refused(str(tmp_path / "both"), "source.split", "a, b", error=ConfigError)
    refused(uri, "source.split", "without splits", error=ConfigError, split="a")


def test_a_folder_on_s3_is_read_file_by_file(tmp_path, s3):
    from datasets import Dataset, DatasetDict

    rows = companies(0, 2500)
    Dataset(rows).save_to_disk(str(tmp_path / "d"), num_shards=3)
    DatasetDict({"a": Dataset(companies(0, 4))}).save_to_disk(str(tmp_path / "both"))
    bucket = "s3://huggingface/saved"
    store = open_store(bucket, s3.options)
    for path in [*(tmp_path / "d").rglob("*"), *(tmp_path / "both").rglob("*")]:
        if path.is_file():
            store.put(str(path.relative_to(tmp_path)), path.read_bytes())
    uri, keys = f"{bucket}/d", {"options": dict(s3.options)}
    assert detect_format(reads(uri=uri, **keys)) == "huggingface"
    made, found = copied(tmp_path, uri, **keys)
    state = json.loads((tmp_path / "d/state.json").read_text())
    assert found.equals(rows) and made.table["version"] == state["_fingerprint"]
    one = copied(tmp_path, uri, columns=["id"], filter="id > 2498", **keys)[1]
    assert one.to_pydict() == {"id": [2499]}
    assert copied(tmp_path, f"{bucket}/both", split="a", **keys)[1].num_rows == 4
    refused(uri, "source.version", "saved again", version="other", **keys)
    store.delete(["d/data-00001-of-00003.arrow"])
    refused(uri, "data-00001-of-00003.arrow", "a file is missing", **keys)
    refused(f"{bucket}/none", "no state.json", format="huggingface", **keys)
    store.put("d/state.json", b'{"_fingerprint": "x", "_data_files": [{"filename": "../a"}]}')
    refused(uri, "../a", "as one of its files", **keys)


def captioned(folder, uri):
    """Two nights of a dataset with images, and what the engine was asked in each."""
    asked = []
    with albums.opened(folder) as album:
        job = album.job(source={"uri": uri}, output_columns=["id"])
        for key in ("n1", "n2"):
            album.night(key, job)
            asked.append(album.told())
        return asked, [(row["id"], row["response"]) for row in album.result("n2")]


def test_images_of_a_dataset_are_asked_about_and_known_the_next_night(tmp_path, hub):
    """They are {bytes, path}, of its Parquet or of files that it names."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    shown = [{"bytes": albums.photo(grey), "path": f"{grey}.png"} for grey in (10, 20, 10)]
    rows = {"id": [1, 2, 3], "text": ["x"] * 3, "image": pa.array(shown, kind)}
    table = pa.table(rows).replace_schema_metadata({"huggingface": json.dumps(FEATURES)})
    hub.add({"data/train-0.parquet": table})
    asked, found = hub(captioned, tmp_path, hub.uri)
    assert asked == [["10 Say x", "20 Say x"], []]
    assert [number for number, _ in found] == [1, 2, 3] and found[0][1] == found[2][1]


FEATURES = {
    "info": {
        "features": {
            "id": {"dtype": "int64", "_type": "Value"},
            "text": {"dtype": "string", "_type": "Value"},
            "image": {"_type": "Image"},
        }
    }
}


def row_groups_read(uri, condition):
    """How many rows a Hub gives where it is told the filter."""
    with open_table("huggingface", reads(uri=uri)) as table:
        return sum(batch.num_rows for batch in table.batches(table.schema.names, Filter(condition)))


def test_a_filter_is_handed_to_the_reader_of_parquet(tmp_path, hub):
    hub.add({"data/train-0.parquet": companies(0, 3000)})
    assert hub(row_groups_read, hub.uri, "id >= 2990") == 10
    assert hub(row_groups_read, hub.uri, "Company LIKE 'no such%'") == 0
    table = hub(copied, tmp_path, hub.uri, columns=["Company"], filter="id >= 2990")[1]
    assert table.equals(companies(2990, 10).select(["Company"]))
    hub.number += 1
    hub.add({"train.csv": "id,company\n1,a\n2,b\n"})
    assert hub(row_groups_read, hub.uri, "id > 1") == 2  # is applied to what comes
    assert hub(copied, tmp_path, hub.uri, filter="id > 1")[1].num_rows == 1


def test_what_is_no_dataset_is_told(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    refused(str(tmp_path / "empty"), "no state.json", format="huggingface")
    (tmp_path / "a.csv").write_text("id\n1\n")
    refused(str(tmp_path / "a.csv"), "source.split", "save_to_disk", error=ConfigError, split="a")
    uri = saved(tmp_path / "d", companies(0, 3))
    state = json.loads((tmp_path / "d/state.json").read_text())
    shutil.move(tmp_path / "d/data-00000-of-00001.arrow", tmp_path / "outside.arrow")
    state["_data_files"] = [{"filename": "../outside.arrow"}]
    (tmp_path / "d/state.json").write_text(json.dumps(state))
    refused(uri, "outside.arrow", "as one of its files")
    monkeypatch.setattr("prefect_raybatch.source.tables.copying.find_spec", lambda name: None)
    refused(URI, 'pip install "prefect-raybatch[huggingface]"', error=ConfigError)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"uri": "hf://team/rows"}, "hf://datasets/OWNER/NAME"),
        ({"uri": "hf://datasets/rows"}, "hf://datasets/OWNER/NAME"),
        ({"uri": f"{URI}/train.parquet"}, "hf://datasets/OWNER/NAME"),
        ({"uri": f"{URI}@v1", "version": "v2"}, "remove one of them"),
        ({"uri": "a.parquet", "config": "de"}, "config applies only to"),
        ({"uri": "a.parquet", "format": "parquet", "split": "train"}, "split applies only to"),
        ({"uri": URI, "format": "delta"}, "cannot be read as format"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        reads(**fields)
    assert reads(uri=f"{URI}@refs/convert/parquet").table_format == "huggingface"
