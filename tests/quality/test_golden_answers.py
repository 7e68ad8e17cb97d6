"""Golden rows whose right answer the job can never give are refused before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.command_line import called
from helpers.small import make_job

from prefect_raybatch.api import dry_run, plan_run
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob

LABELS = ["Manufacturing", "Retail", " Health care ", "HR"]
SECTORS = {"$ref": "#/$defs/Sector"}


def job_of(folder: Path, golden: str, answer: str = "", **groups: Any) -> BatchJob:
    """A job with rows 1 to 9 as input, and `golden` as the text of its golden file."""
    pq.write_table(pa.table({"id": range(1, 10), "Company": ["Acme"] * 9}), folder / "in.parquet")
    (folder / "golden.csv").write_text(golden, encoding="utf-8")
    output = {"uri": str(folder / "out"), "column": "sector", **groups.pop("output", {})}
    named = {"answer": answer} if answer else {}
    return make_job(
        source={"uri": str(folder / "in.parquet")},
        engine={"model": "demo"},
        output=output,
        quality={"golden": str(folder / "golden.csv"), "key": ["id"], **named},
        **groups,
    )


def schema_of(prop: dict[str, Any]) -> dict[str, Any]:
    """The group `output` of a job whose answers have the property `sector`."""
    return {
        "schema_model": {
            "type": "object",
            "properties": {"sector": prop, "note": {"type": "string"}},
            "required": ["sector", "note"],
            "additionalProperties": False,
            "$defs": {"Sector": {"type": "string", "enum": ["Manufacturing", "Retail"]}},
        }
    }


@pytest.mark.usefixtures("without_ray")
def test_a_label_that_no_answer_can_have_is_refused_with_line_and_nearest_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = "id,sector\n1,Retail\n2,Manufactring\n3,Health care\n4,Banking\n5,hr\n"
    job = job_of(tmp_path, golden, sampling={"choice": LABELS})
    message = (
        f"quality.golden: {tmp_path}/golden.csv, line 3: no answer can be 'Manufactring', because "
        "it is not in sampling.choice (nor are the answers of 2 other rows). Write "
        "'Manufacturing', or change sampling.choice"
    )
    for command in (dry_run, lambda job: plan_run(job, "never")):
        with pytest.raises(ConfigError) as error:
            command(job)
        assert str(error.value) == message
    assert not (tmp_path / "out" / "never" / "_raybatch" / "plan.json").exists()
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.to_dict()), encoding="utf-8")
    code, _, err = called(capsys, "plan", path)
    assert code == 2 and "golden.csv, line 3: no answer can be" in " ".join(err.split())


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        ("hr", "Write 'HR', or change"),
        ("health  care", "Write 'Health care', or change"),
        ("Banking", "Write 'Manufacturing', 'Retail', 'Health care' or 'HR', or change"),
    ],
)
def test_the_remedy_names_the_nearest_label_or_all(
    tmp_path: Path, answer: str, remedy: str
) -> None:
    job = job_of(tmp_path, f"id,sector\n1,{answer}\n", sampling={"choice": LABELS})
    with pytest.raises(ConfigError, match=remedy):
        dry_run(job)


@pytest.mark.parametrize(
    ("groups", "answer", "fault"),
    [
        ({"sampling": {"structured_outputs": {"choice": ["a", "b"]}}}, "c", "structured_outputs"),
        ({"output": schema_of(SECTORS)}, "Retial", "output.schema_model.*Write 'Retail'"),
        (
            {"output": schema_of({"anyOf": [SECTORS, {"type": "null"}]})},
            "retail",
            "Write 'Retail'",
        ),
        ({"output": schema_of({"const": "only"})}, "other", "Write 'only'"),
        ({"output": schema_of({"enum": [1, 2.5]})}, "2", "Write '1' or '2.5'"),
        ({"output": schema_of({"type": "boolean"})}, "True", "Write 'true'"),
    ],
)
def test_labels_of_other_forms_are_checked(
    tmp_path: Path, groups: dict[str, Any], answer: str, fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        dry_run(job_of(tmp_path, f"id,sector\n1,{answer}\n", "sector", **groups))


@pytest.mark.parametrize(
    ("groups", "answers"),
    [
        ({"sampling": {"choice": LABELS}}, ["Health care", " HR", "Retail "]),
        ({"output": schema_of({"enum": [1, 2.5]})}, ["1", "2.5"]),
        ({"output": schema_of({"enum": ["a", 1]})}, ["b"]),  # kept as JSON text
        ({"output": schema_of({"type": "string"})}, ["any"]),
        ({"output": schema_of({"type": "boolean"})}, ["true", "false"]),
        (  # each row may set its own choice
            {"sampling": {"choice": LABELS}, "prompt": {"function": "helpers.functions:as_text"}},
            ["Banking"],
        ),
        ({"sampling": {"choice": LABELS, "n": 2, "temperature": 1.0}}, ["Banking"]),
        (
            {
                "sampling": {"choice": LABELS},
                "output": {
                    "postprocess": "helpers.functions:shout",
                    "schema": {"sector": "string"},
                },
            },
            ["Banking"],
        ),
    ],
)
def test_answers_that_a_job_may_give_are_accepted(
    tmp_path: Path, groups: dict[str, Any], answers: list[str]
) -> None:
    rows = "".join(f'{number},"{answer}"\n' for number, answer in enumerate(answers, 1))
    assert dry_run(job_of(tmp_path, f"id,sector\n{rows}", "sector", **groups)).golden
