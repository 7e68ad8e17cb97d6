"""`~`, $NAME and ${NAME} in a job file, and who may use them."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.policy.in_force import policy_applied
from prefect_raybatch.policy.policy import STRICT_POLICY

JOB = """\
name: j
source:
  uri: [~/a.csv, "$DATA/b.csv", "s3://${BUCKET}/c-$$x.csv", "/d/$9~.csv"]
prompt:
  template: "{A} costs $DATA"
engine:
  model: $DATA/model
  adapters: {a: ~/adapter}
output:
  uri: ${DATA}/out-{run_date}
  schema_model: ~/answer.json
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.setenv("BUCKET", "bucket")
    monkeypatch.delenv("UNSET", raising=False)
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_paths_of_a_job_file_are_expanded_and_other_texts_are_not(file: Path) -> None:
    text = JOB.replace("  adapters: {a: ~/adapter}\n", "")
    file.write_text(text)
    job = BatchJob.from_yaml(file)
    assert job.source.uri == [
        "/home/ada/a.csv",
        "/data/b.csv",
        "s3://bucket/c-$x.csv",
        "/d/$9~.csv",
    ]
    assert job.prompt.template == "{A} costs $DATA"
    assert job.engine.model == "/data/model"
    assert job.output.uri == "/data/out-{run_date}"
    assert job.output.schema_model == "/home/ada/answer.json"


def test_an_unset_variable_is_named_with_field_and_line_beside_other_faults(file: Path) -> None:
    file.write_text(
        JOB.replace("$DATA/b.csv", "$UNSET/b.csv").replace("~/adapter", "'${UNSET}'")
        + "  colunm: x\n"
    )
    with pytest.raises(ConfigError) as caught:
        BatchJob.from_yaml(file)
    lines = [line.removeprefix(f"{file}: ") for line in str(caught.value).splitlines()]
    told = "environment variable UNSET is not set; set it, or write $$"
    assert lines[0].startswith(f"line 3: source.uri.1: {told}")
    assert lines[1].startswith(f"line 8: engine.adapters.a: {told}")
    assert lines[2].startswith("line 12: output.colunm: ")


def test_an_inline_schema_and_an_inline_template_are_no_paths(file: Path) -> None:
    schema = '{"type": "object", "properties": {"a": {"const": "$DATA"}}}'
    file.write_text(
        f"name: j\nsource: {{uri: a}}\noutput: {{uri: o, schema_model: {schema}}}\n"
        "prompt: {template: x, chat_template: '$DATA {{ messages }}'}\n"
    )
    job = BatchJob.from_yaml(file)
    assert "$DATA" in str(job.output.schema_model)
    assert job.prompt.chat_template == "$DATA {{ messages }}"


def test_jobs_from_elsewhere_are_not_expanded(file: Path) -> None:
    value = {
        "name": "j",
        "source": {"uri": "$DATA/a.csv"},
        "prompt": {"template": "{A}"},
        "output": {"uri": "${UNSET}"},
    }
    assert BatchJob.from_dict(value).source.uri == "$DATA/a.csv"
    file.write_text(JOB.replace("  adapters: {a: ~/adapter}\n", ""))
    with policy_applied(STRICT_POLICY):
        job = BatchJob.from_yaml(file)
    assert job.source.uris[1] == "$DATA/b.csv"
    assert job.engine.model == "$DATA/model"
