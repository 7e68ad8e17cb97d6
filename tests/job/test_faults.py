"""What is said of a job file whose YAML says something else than its writer meant."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from helpers.small import job_dict

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.job_file import read_job_file
from prefect_raybatch.yaml_text import read_yaml

JOB = """\
name: j
source: {uri: in.csv}
prompt: {template: "{A}"}
output: {uri: out}
"""


def lines_of(folder: Path, text: str) -> list[str]:
    """What is said of the job file `text`, without the name of the file and the fields' lines."""
    return [re.sub(r"\Aline \d+: ", "", line) for line in numbered_lines_of(folder, text)]


def numbered_lines_of(folder: Path, text: str) -> list[str]:
    """What is said of the job file `text`, without the name of the file."""
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        BatchJob.from_yaml(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


def told(value: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        BatchJob.from_dict(value, "")
    return str(caught.value).splitlines()


# --- YAML ---------------------------------------------------------------------------------------


def test_a_key_that_is_given_twice_is_named_with_its_lines(tmp_path: Path) -> None:
    text = f"{JOB}sampling:\n  max_tokens: 8\n  temperature: 0\n  max_tokens: 64\nname: k\n"
    assert lines_of(tmp_path, text) == [
        "name: duplicate key in lines 1 and 9; remove all but one",
        "sampling.max_tokens: duplicate key in lines 6 and 8; remove all but one",
    ]


def test_a_key_of_a_list_is_named_with_its_place(tmp_path: Path) -> None:
    text = f"{JOB[: JOB.rfind('output')]}output:\n  uri: out\n  publish:\n"
    text += "    - format: delta\n      uri: a\n      uri: b\n      uri: c\n"
    assert lines_of(tmp_path, text) == [
        "output.publish.0.uri: duplicate key in lines 8, 9 and 10; remove all but one"
    ]


def test_keys_that_a_merge_brings_may_be_given_again() -> None:
    text = "c: {<<: &b {<<: &a {x: 1, y: 2}, y: 3}, y: 4}\nd: {<<: *b, y: 5}\n1: a\n'1': b\n"
    assert read_yaml(text).value == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: b: c", "line 1, column 5: is not valid YAML: text contains a colon and a space; p"),
        ("a: 1\n  b: 2", "line 2, column 4: is not valid YAML: the field is indented below a v"),
        ("a:\n\t- b", "line 2, column 1: is not valid YAML: there is a tab; indent with spaces"),
        ("a: 1\nb: [", "line 2, column 5: is not valid YAML: a bracket or brace is not closed"),
        (
            "a: {x: 1\nb: 3\n",
            "line 1, column 4: is not valid YAML: a bracket or brace is not closed",
        ),
        ("a: 1\nb 2\nc: 3", "line 2, column 1: is not valid YAML: a colon with a space behind it"),
        ("a: 1\nb:2\nc: 3", "line 2, column 1: is not valid YAML: a colon with a space behind it"),
        ("a: 1\nb: 'x\nc: 3", "line 2, column 4: is not valid YAML: a quote is opened and not cl"),
        ("a: 'it's'", "line 1, column 8: is not valid YAML: there is more text behind the end of"),
        ("a: {Company} is", "line 1, column 14: is not valid YAML: there is more text behind the"),
        ("a:\n  b: 1\n c: 2", "line 3, column 2: is not valid YAML: the indentation differs fr"),
        ("a: @x", "line 1, column 4: is not valid YAML: text begins with a character that has a"),
        ("a: *x", "line 1, column 4: is not valid YAML: text that begins with * is an alias; put"),
        ("a: {{x}}", "line 1, column 5: is not valid YAML: text begins with two braces; put quo"),
        ('a: "c:\\data"', "line 1, column 8: is not valid YAML: a backslash within double quotes"),
        ("a: 2026-99-99", "is not valid YAML: month must be in 1..12"),
        ("a: 1\n---\nb: 1\n", "line 2, column 1: is not valid YAML: expected a single document"),
    ],
)
def test_what_is_no_yaml_is_named_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    assert lines_of(tmp_path, text)[0].startswith(said)


def test_each_wrong_field_is_named_with_its_line(tmp_path: Path) -> None:
    text = """\
name: a b
source:
  uri: in.csv
  limit: 0
prompt:
  function: m:f
  template: "{A}"
engine:
  replicas: many
  adapters: {a: yes}
output:
  uri: out
  colunm: x
"""
    lines = numbered_lines_of(tmp_path, text)
    assert [line.split(": ")[:2] for line in lines] == [
        ["line 1", "name"],
        ["line 4", "source.limit"],
        ["line 5", "prompt"],
        ["line 9", "engine.replicas"],
        ["line 10", "engine.adapters.a"],
        ["line 13", "output.colunm"],
    ]


def test_each_wrong_field_of_the_larger_model_is_named_with_its_line(tmp_path: Path) -> None:
    text = """\
output:
  uri: out
  escalate:
    when: {logprob_below: -1}
    to:
      tensor_parallel_size: x
      endpoint: {timeout: never}
      dtyp: 4
      env: {A: 1}
"""
    found = [line for line in numbered_lines_of(tmp_path, text) if "escalate" in line]
    assert found == [
        "line 5: output.escalate.to: unknown field 'dtyp'; did you mean 'dtype'?",
        "line 6: output.escalate.to: tensor_parallel_size: must be a whole number (value: 'x')",
        "line 7: output.escalate.to: endpoint.timeout: must be a number (value: 'never')",
        "line 9: output.escalate.to: env.A: must be text and is a number; quote it",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "engine: {endpoint: KEY}",
        "output: {escalate: {when: {logprob_below: -1}, to: {endpoint: KEY}}}",
        'quality: {judge: {prompt: "Is {a} right?", endpoint: KEY}}',
    ],
)
def test_a_wrong_key_is_not_shown(tmp_path: Path, text: str) -> None:
    wrong = '{url: "https://a/v1", model: m, key: "sk-SECRET 0123"}'
    lines = lines_of(tmp_path, text.replace("KEY", wrong))
    assert any("key" in line for line in lines) and "SECRET" not in str(lines)


def test_data_in_memory_is_no_source() -> None:
    (line,) = told(job_dict(source=pa.table({"a": [1]})))
    assert line == "source: must be a mapping and is a Table; call ask(...) for data in memory"


def test_all_fields_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    text = JOB.replace("{uri: in.csv}", "{uri: in.csv, media_root: a, query: SELECT 1, split: x}")
    lines = lines_of(tmp_path, text.replace("in.csv", "in.csv, format: csv"))
    assert [line.split(" ")[1] for line in lines] == ["query", "split"]
    text = JOB.replace("{uri: in.csv}", "{uri: in.csv, media_root: a}")
    text += "limits:\n  max_cost: 3\nengine:\n  adapter: x\n  adapters: {a: b}\n"
    lines = numbered_lines_of(tmp_path, text)
    assert [tuple(line.split(" ")[1:3]) for line in lines] == [
        ("2:", "source.media_root"),
        ("6:", "limits.max_cost"),
        ("8:", "engine.adapter"),
    ]


def test_libraries_that_change_the_reader_all_share_change_nothing_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's import does that, and a job is to read the same before and after it."""
    shared = yaml.SafeLoader.yaml_constructors
    text = shared["tag:yaml.org,2002:str"]
    monkeypatch.setitem(shared, "tag:yaml.org,2002:timestamp", text)
    assert yaml.safe_load("2026-01-01") == "2026-01-01"
    assert read_yaml("2026-01-01").value == date(2026, 1, 1)


# --- values that YAML reads as something else ---------------------------------------------------


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (
            "sampling: {choice: [maybe, yes, NO]}",
            [
                "sampling.choice.1: YAML reads yes without quotes as true; quote it: 'yes'",
                "sampling.choice.2: YAML reads NO without quotes as false; quote it: 'NO'",
            ],
        ),
        (
            "sampling: {choice: [1, 1.10, 2026-01-01, null, '2']}",
            [
                "sampling.choice.0: YAML reads 1 without quotes as a number; quote it: '1'",
                "sampling.choice.1: YAML reads 1.10 without quotes as a number; quote it: '1.10'",
                "sampling.choice.2: YAML reads 2026-01-01 without quotes as a date; quote it: "
                "'2026-01-01'",
                "sampling.choice.3: YAML reads null without quotes as no value; quote it: 'null'",
            ],
        ),
        ("engine: {env: {A: 1}}", ["engine.env.A: must be text and is a number; quote it"]),
        (
            "engine: {adapters: {a: on}}",
            ["engine.adapters.a: YAML reads on without quotes as true; quote it: 'on'"],
        ),
        (
            "reuse: 2026",
            ["reuse: YAML reads 2026 without quotes as a number; quote it: '2026'"],
        ),
    ],
)
def test_text_that_yaml_reads_as_something_else_is_to_be_quoted(
    tmp_path: Path, field: str, said: list[str]
) -> None:
    assert lines_of(tmp_path, f"{JOB}{field}\n") == said


def test_one_of_a_text_and_a_list_is_told_once(tmp_path: Path) -> None:
    text = JOB.replace("in.csv", "20261123")
    said = "YAML reads 20261123 without quotes as a number; quote it: '20261123'"
    assert lines_of(tmp_path, text) == [f"source.uri: {said}"]
    assert lines_of(tmp_path, text.replace("20261123", "[a, 20261123]")) == [
        f"source.uri.1: {said}"
    ]


def test_a_template_without_quotes_is_a_mapping(tmp_path: Path) -> None:
    said = "must be text and is a mapping; put quotes around text that begins with {"
    text = JOB.replace('template: "{A}"', "template: {A}")
    assert lines_of(tmp_path, text) == [f"prompt.template: {said}"]


def test_a_field_with_nothing_behind_it_is_empty(tmp_path: Path) -> None:
    text = f"{JOB[: JOB.rfind('output')]}output:\n  uri: out\n  column:\n"
    said = "must be text and is empty; set it, or remove the field"
    assert lines_of(tmp_path, text) == [f"output.column: {said}"]


def test_values_from_python_are_told_without_a_file() -> None:
    assert told(job_dict(sampling={"choice": [True, 2]})) == [
        "sampling.choice.0: must be text and is true; quote it: 'yes' (YAML reads yes, on and "
        "true as true)",
        "sampling.choice.1: must be text and is a number; quote it: '2' (YAML reads digits as a "
        "number)",
    ]


def test_off_is_what_early_stop_calls_it(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{JOB}engine: {{early_stop: off}}\n", encoding="utf-8")
    assert BatchJob.from_yaml(path).engine.early_stop == "off"


def test_stop_words_are_to_be_quoted() -> None:
    (line,) = told(job_dict(sampling={"stop": [False]}))
    assert line.startswith("sampling: stop must be ") and "quote" in line and "'no'" in line


# --- groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "value", "said"),
    [
        ("source", "in.csv", "must be a mapping and is text; write source: {uri: "),
        ("source", ["a.csv"], "must be a mapping and is a list; write source: {uri: "),
        ("prompt", "Hi {A}", "write prompt: {template: 'Hi {A}'}"),
        ("output", "out", "write output: {uri: 'out'}"),
        ("engine", "owner/name", "write engine: {model: 'owner/name'}"),
        ("sampling", "greedy", "write sampling: {temperature: ...}"),
        ("sampling", 0.7, "must be a mapping and is a value; write sampling: {temper"),
        ("limits", 3, "write limits: {max_failed_fraction: ...}"),
        ("cluster", "auto", "write cluster: {address: 'auto'}"),
        ("source", None, "is empty; write its fields indented below it, such as source: {uri: "),
    ],
)
def test_a_group_without_fields_says_what_to_write(group: str, value: Any, said: str) -> None:
    (line,) = [one for one in told({**job_dict(), group: value}) if one.startswith(f"{group}: ")]
    assert said in line and "instance" not in line and "dictionary" not in line


def test_a_group_in_a_list_says_what_to_write() -> None:
    lines = told(job_dict(output={"uri": "o", "publish": ["delta"]}))
    assert lines == ["output.publish.0: must be a mapping and is text; write - {format: 'delta'}"]


def test_a_text_in_place_of_a_list_says_what_to_write() -> None:
    lines = told(job_dict(sampling={"choice": "a"}, output={"uri": "o", "publish": "delta"}))
    assert lines == [
        "sampling.choice: must be a list and is text; write choice: ['a']",
        "output.publish: must be a list and is text; write publish: ['delta']",
    ]


# --- unknown fields -----------------------------------------------------------------------------


def test_all_unknown_fields_of_vllm_are_named_each_with_the_nearest() -> None:
    lines = told(
        job_dict(
            sampling={"temprature": 1, "top_pp": 1, "zzzz": 1},
            engine={"tensor_paralel_size": 2, "gpu_memory_utilisation": 0.9},
        )
    )
    assert lines == [
        "sampling: unknown field 'temprature'; did you mean 'temperature'?",
        "sampling: unknown field 'top_pp'; did you mean 'top_p'?",
        "sampling: unknown field 'zzzz'; remove it",
        "engine: unknown field 'tensor_paralel_size'; did you mean 'tensor_parallel_size'?",
        "engine: unknown field 'gpu_memory_utilisation'; did you mean 'gpu_memory_utilization'?",
    ]


def test_an_unknown_field_is_told_beside_what_is_wrong_with_others() -> None:
    """It was the next error, once the first was mended."""
    sampling = {"temprature": 1, "max_tokens": "many", "choice": ["a", "a"]}
    lines = told(job_dict(sampling=sampling, engine={"replicas": -1, "max_num_seq": 2}))
    assert [line.split(":")[0] for line in lines] == [
        "sampling.max_tokens",
        "sampling.choice",
        "sampling",
        "engine.replicas",
        "engine",
    ]
    assert "(value: 'many')" in lines[0] and "duplicate label 'a'" in lines[1]
    assert "unknown field 'temprature'; did you mean 'temperature'?" in lines[2]
    assert "unknown field 'max_num_seq'; did you mean 'max_num_seqs'?" in lines[4]


def test_unknown_fields_in_lists_are_named_with_the_nearest() -> None:
    publish = [{"format": "delta", "uri": "a"}, {"formt": "delta", "uri": "b", "keys": ["a"]}]
    assert told(job_dict(output={"uri": "o", "publish": publish})) == [
        "output.publish.1.formt: unknown field; did you mean 'format'?",
        "output.publish.1.keys: unknown field; did you mean 'key'?",
    ]


def test_what_a_union_takes_is_told_on_one_line() -> None:
    (line,) = told(job_dict(engine={"max_model_len": "long"}))
    assert line == "engine.max_model_len: must be a whole number or 'auto' (value: 'long')"


@pytest.mark.parametrize(
    ("group", "field", "value", "needed"),
    [
        ("source", "limit", 1.5, "a whole number"),
        ("source", "limit", 0, "greater than 0"),
        ("sampling", "temperature", "hot", "a number"),
        ("limits", "max_failed_fraction", 1.5, "at most 1"),
        ("limits", "max_failed_fraction", float("nan"), "a finite number"),
        ("output", "compact", "maybe", "true or false"),
        ("output", "on_cut_off", "drop", "'auto', 'keep' or 'fail'"),
        ("engine", "env", [1], "a mapping"),
        ("output", "columns", "a", "a list"),
    ],
)
def test_a_wrong_value_is_told_in_our_words(
    group: str, field: str, value: object, needed: str
) -> None:
    lines = told(job_dict(**{group: {**job_dict().get(group, {}), field: value}}))
    assert lines[0].startswith(f"{group}.{field}: must be {needed}")
    assert not any("Input" in line or "should" in line for line in lines)


# --- braces -------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ['{"a": 1}', '{\n  "a": "{A}"\n}', "{", "}", "{a.b}"])
def test_literal_braces_are_written_twice(template: str) -> None:
    (line,) = told(job_dict(prompt={"template": template}))
    assert line.startswith("prompt.template: ")
    assert "write {{ and }} for literal braces" in line


def test_aliases_and_merge_keys_are_bounded_before_they_are_put_in(tmp_path):
    bomb = "a0: &a0 {k: v}\n" + "".join(
        f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
    )
    aliases = "a0: &a0 [x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    path = tmp_path / "job.yaml"
    for text in (bomb, aliases):
        assert len(text) < 1000
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"contains over 100,000 values \(aliases count"):
            read_job_file(path)


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "a: &a {<<: *a}"])
def test_an_alias_within_what_it_refers_to_is_refused(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="an alias refers to a value that contains it"):
        read_job_file(path)


@pytest.mark.parametrize("levels", [3000, 20_000])
def test_a_job_file_that_is_nested_too_deep_is_refused(tmp_path, levels):
    path = tmp_path / "job.yaml"
    path.write_text("[" * levels + "]" * levels)
    with pytest.raises(ConfigError, match="is nested too deeply"):
        read_job_file(path)


def test_a_merge_key_is_put_in(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3}\n")
    assert read_job_file(path).value["more"] == {"a": 1, "b": 3}
