"""The golden corpus: nothing that the package makes of a job changes unseen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from prefect_raybatch.job.batch_job import BatchJob

from .corpus import CASES, REWRITE, formatted, report, texts_now, write_corpus
from .jobs import golden_jobs
from .record import CLUSTERS, canonical, plain

JOBS = golden_jobs()


def test_the_package_makes_of_each_job_what_its_file_says():
    if text := report(texts_now()):
        pytest.fail(f"the package makes something else of these jobs\n{text}", pytrace=False)


def test_there_is_a_file_for_each_job_and_no_other():
    assert {path.name for path in CASES.iterdir()} == {f"{one.name}.json" for one in JOBS}


@pytest.mark.parametrize("golden", JOBS, ids=lambda one: one.name)
def test_each_file_holds_its_job_and_an_outcome(golden):
    text = (CASES / f"{golden.name}.json").read_text(encoding="utf-8")
    value = json.loads(text)
    assert text == formatted(value) + "\n", f"edited by hand? {REWRITE}"
    assert value["job"] == golden.job
    if golden.name.startswith("refused-"):
        assert set(value["refused"]) == {"error", "message"}
    else:
        assert set(value["clusters"]) == set(CLUSTERS)


# --- the fields of a job ------------------------------------------------------------------------


def groups_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the groups of fields that a type names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [group for part in get_args(annotation) for group in groups_in(part)]


def fields_of(group: type[BaseModel], place: str = "") -> Iterator[str]:
    """Return the paths of all fields of a job, without the groups that they are in."""
    for name, field in group.model_fields.items():
        inner = groups_in(field.annotation)
        if not inner:
            yield place + name
        for one in inner:
            yield from fields_of(one, f"{place}{name}.")


def set_in(value: BaseModel, place: str = "") -> Iterator[str]:
    """Return the paths of the fields that are not as they are by default."""
    for name, field in type(value).model_fields.items():
        given = getattr(value, name)
        members = given if isinstance(given, list) else [given]
        inner = [one for one in members if isinstance(one, BaseModel)]
        for one in inner:
            yield from set_in(one, f"{place}{name}.")
        usual = field.get_default(call_default_factory=True)
        if not inner and (usual is PydanticUndefined or given != usual):
            yield place + name


def test_each_field_of_a_job_is_set_in_a_job_that_runs():
    jobs = [one.job for one in JOBS if not one.name.startswith("refused-")]
    seen = {path for job in jobs for path in set_in(BatchJob.from_dict(job, "corpus"))}
    unset = sorted(set(fields_of(BatchJob)) - seen)
    assert not unset, f"set them in a job of tests/golden/jobs.py: {', '.join(unset)}"


# --- the tool -----------------------------------------------------------------------------------


def test_a_difference_is_shown_in_few_lines_with_the_command(tmp_path: Path):
    before = {tmp_path / "a.json": "{}\n", tmp_path / "b.json": formatted({"rows": [1] * 400})}
    assert write_corpus(before, tmp_path) == ["a.json", "b.json"]
    assert report(before) == ""
    now = {**before, tmp_path / "a.json": "{1}\n", tmp_path / "b.json": "[]"}
    text = report(now)
    assert "-{}\n+{1}\n" in text
    assert "These differ, too: b" in text
    assert text.endswith(REWRITE)
    long = report({tmp_path / "b.json": "[]"})
    assert "more lines" in long
    assert len(long.splitlines()) < 80


def test_files_of_no_job_are_removed_and_others_written(tmp_path: Path):
    (tmp_path / "old.json").write_text("{}", encoding="utf-8")
    assert write_corpus({tmp_path / "new.json": "{}\n"}, tmp_path) == ["new.json", "old.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["new.json"]
    assert write_corpus({tmp_path / "new.json": "{}\n"}, tmp_path) == []


def test_nothing_of_a_machine_or_a_day_is_recorded(tmp_path: Path):
    value = {
        "uri": f"{tmp_path}/data/x.parquet",
        "attempt": "0123456789abcdef0123456789abcdef",
        "table": "files-0123456789abcdef.parquet",
        "created": "2024-02-29T23:59:59+00:00",
        "identity": "a" * 64,
        "rate": 1 / 3,
        "text": "x" * 5000,
    }
    made = canonical(value, tmp_path)
    assert made.pop("text").startswith("sha256 ")
    assert made == {
        "uri": "FOLDER/data/x.parquet",
        "attempt": "UUID",
        "table": "files-HASH.parquet",
        "created": "TIME",
        "identity": "a" * 64,
        "rate": 0.333333,
    }


def test_objects_are_their_fields_and_unknown_kinds_are_refused():
    pair = make_dataclass("Pair", [("one", int), ("other", int, 2)])
    assert plain([pair(1), pair(1, 3)]) == [
        {"is": "Pair", "one": 1},
        {"is": "Pair", "one": 1, "other": 3},
    ]
    with pytest.raises(TypeError, match="object"):
        plain({"a": object()})
