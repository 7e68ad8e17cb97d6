"""What `raybatch plan` says of models, adapters and answer schemas, before any engine starts."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from helpers import tiny_models
from helpers.command_line import called
from helpers.small import input_rows, job_dict

from prefect_raybatch import demo

BERT = {"architectures": ["BertModel"], "hidden_size": 8}
COLUMNS = {"type": "object", "required": ["a"], "properties": {"a": {"type": "string"}}}


@pytest.fixture
def plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Runs `raybatch plan` of a job with these groups, away from any cluster of other tests."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    pq.write_table(input_rows(0, 12), tmp_path / "in.parquet")

    def run(**groups: Any) -> tuple[int, str, str]:
        given = {"source": {"uri": str(tmp_path / "in.parquet")}, "output": {}, **groups}
        given["output"] = {"uri": str(tmp_path / "out"), **given["output"]}
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(job_dict(**given)), encoding="utf-8")
        return called(capsys, "plan", path, "--json")

    return partial(run)


def model(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def lora(folder: Path, **change: Any) -> str:
    """An adapter of the bundled model, or of one that differs so."""
    config = json.loads((Path(demo.demo_model_path()) / "config.json").read_text(encoding="utf-8"))
    return str(tiny_models.lora(folder, "demo", {**config, **change}))


def test_a_model_that_pools_is_told_when_it_is_asked_for_text(plan, tmp_path, monkeypatch):
    folder = model(tmp_path / "model", BERT)
    monkeypatch.setitem(sys.modules, "transformers", None)  # no tokenizer is loaded for it
    code, _, err = plan(engine={"model": folder})
    assert code == 2
    assert "is BertModel, which embeds or classifies and generates no text" in err


@pytest.mark.parametrize("task", ["embed", "score"])
def test_a_causal_model_may_embed(plan, task):
    prompt = {"template": "{Company}", **({"second": "a firm"} if task == "score" else {})}
    code, out, err = plan(engine={"task": task}, prompt=prompt)
    assert code == 0, err
    kinds = dict(json.loads(out)["result"])
    expected = "fixed_size_list<item: float32>" if task == "embed" else "float32"
    assert kinds == {"response": expected, "_row": "int64"}


def test_a_causal_model_has_no_labels(plan):
    code, _, err = plan(engine={"task": "classify"}, prompt={"template": "{Company}"})
    assert code == 2 and "LlamaForCausalLM, which does not classify. Name a model" in err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 64, "head_dim": 16}, "hidden_size 64, but the model has 256"),
        ({"num_hidden_layers": 99}, "it changes layer"),
    ],
)
def test_an_adapter_of_another_model_is_told(plan, tmp_path, change, said):
    code, _, err = plan(engine={"adapter": lora(tmp_path / "other", **change)})
    assert code == 2 and "does not fit the model demo" in err and said in err
    code, _, err = plan(engine={"adapter": lora(tmp_path / "own")})
    assert code == 0, err


def test_an_adapter_that_is_not_there_is_told_by_its_name(plan, tmp_path):
    adapters = {"de": lora(tmp_path / "de"), "fr": str(tmp_path / "fr")}
    prompt = {"template": "{Company}", "adapter_column": "Company"}
    code, _, err = plan(engine={"adapters": adapters}, prompt=prompt)
    assert code == 2 and "engine.adapters.fr: " in err and "neither a local folder" in err


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "(?=x)y"}, "look-ahead"),
        ({"type": "strng"}, "strng"),
        ({"$ref": "https://example.com/x.json"}, "https://example.com/x.json"),
    ],
)
def test_a_schema_that_no_engine_takes_is_told(plan, part, said):
    schema = {**COLUMNS, "properties": {"a": part}}
    code, _, err = plan(output={"schema_model": schema}, sampling={"max_tokens": 99})
    assert code == 2 and "output.schema_model" in err and said in err, err


def test_several_typed_answers_and_labels_that_begin_alike_are_planned(plan):
    sampling = {"max_tokens": 99, "n": 2, "temperature": 1.0, "logprobs": 0}
    code, out, err = plan(output={"schema_model": COLUMNS}, sampling=sampling)
    assert code == 0, err
    assert dict(json.loads(out)["result"])["response"] == ("list<item: struct<a: string not null>>")
    sampling = {"choice": ["Retail", "Retail trade"]}
    code, out, err = plan(output={"probabilities": True}, sampling=sampling)
    assert code == 0 and "probabilities" in dict(json.loads(out)["result"]), err
