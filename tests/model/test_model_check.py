"""A model that no engine could load or ask is refused when the plan is made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.small import job_dict

from prefect_raybatch import demo
from prefect_raybatch.api import dry_run, plan_run, precheck
from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.vllm import fields as vllm_fields
from prefect_raybatch.model import check as model_check
from prefect_raybatch.model import pinned as models
from prefect_raybatch.runs.run import run_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled model."""
    return Path(shutil.copytree(demo.demo_model_path(), tmp_path / "model"))


def refused(folder: Path, **groups: Any) -> str:
    """What is said at plan of a job with the model in `folder`, within the dry run too."""
    source = folder.parent / "in.csv"
    source.write_text("Company\nAcme\n")
    groups["engine"] = {"model": str(folder), **groups.get("engine", {})}
    value = job_dict(**groups)
    value["source"], value["output"] = {"uri": str(source)}, {"uri": str(folder.parent / "out")}
    job = BatchJob.from_dict(value)
    with pytest.raises(ConfigError) as error:
        dry_run(job)
    said = str(error.value)
    for command in (
        lambda: plan_run(job, "k"),
        lambda: precheck(job, run_store(job.output, "k")),
    ):
        with pytest.raises(ConfigError) as error:
            command()
        assert str(error.value) == said
    records = folder.parent / "out/k/_raybatch"
    assert [path.name for path in records.iterdir()] == ["last_attempt.json"]
    assert "\n" not in said
    return said


def accepted(job: BatchJob) -> None:
    spec = compile_job(job)
    model = models.pin(spec.engine.model)
    model_check.check(spec.engine.model, spec.prompt, spec.sampling, model)


def edit(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def test_the_bundled_model_passes_in_a_folder_of_its_own(folder: Path) -> None:
    job = BatchJob.from_dict(job_dict(engine={"model": str(folder)}))
    accepted(job)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no weights" in refused(folder)
    job = BatchJob.from_dict(job_dict(engine={"model": str(folder), "load_format": "dummy"}))
    accepted(job)  # needs none


def test_weights_cut_off(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert f"has {len(whole) - 1:,} bytes, but its header says {len(whole):,}" in refused(folder)
    weights.write_bytes(whole[:1000])
    assert "not a safetensors file" in refused(folder)
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "Git LFS" in refused(folder)
    weights.write_bytes(b"")
    assert "not a safetensors file" in refused(folder)


def test_a_weight_file_of_several_is_missing(folder: Path) -> None:
    names = {"a": "model.safetensors", "b": "model-00002.safetensors"}
    (folder / model_check.INDEX).write_text(json.dumps({"weight_map": names}))
    said = refused(folder)
    assert "lacks 1 of the 2 weight files" in said and "model-00002.safetensors" in said
    (folder / model_check.INDEX).write_text("[]")
    assert f"{model_check.INDEX} cannot be read" in refused(folder)


def test_no_tokenizer(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert "has no tokenizer" in refused(folder) and "engine.tokenizer" in refused(folder)
    other = {"model": str(folder), "tokenizer": demo.demo_model_path()}
    job = BatchJob.from_dict(job_dict(engine=other))
    accepted(job)


@pytest.mark.parametrize(
    "name", ["BertModel", "LlamaForSequenceClassification", "XLMRobertaForMaskedLM", "Qwen2Model"]
)
def test_a_pooling_model(folder: Path, name: str) -> None:
    said = refused(edit(folder, architectures=[name]))
    assert name in said and "generates no text" in said


def test_a_runner_that_pools(folder: Path) -> None:
    assert "engine.runner: 'pooling' generates no text" in refused(
        folder, engine={"runner": "pooling"}
    )


@pytest.mark.parametrize("name", ["ChatGLMModel", "GPT2LMHeadModel", "NewestForCausalLM"])
def test_generating_models_pass(folder: Path, name: str) -> None:
    job = BatchJob.from_dict(job_dict(engine={"model": str(edit(folder, architectures=[name]))}))
    accepted(job)


def test_vllms_own_lists_are_read() -> None:
    known = vllm_fields.generating_models()
    assert known is not None and len(known) > 150
    assert {"LlamaForCausalLM", "Qwen2_5_VLForConditionalGeneration"} <= known
    assert "BertModel" not in known


def test_an_answer_longer_than_the_context(folder: Path) -> None:
    said = refused(folder, sampling={"max_tokens": 2048})
    assert "sampling.max_tokens: 2,048" in said and "config.json" in said
    said = refused(folder, sampling={"max_tokens": 100}, engine={"max_model_len": 100})
    assert "100 tokens (engine.max_model_len)" in said


@pytest.mark.parametrize(
    "given", [{"logit_bias": {8: 1.0, "900": 1.0}}, {"allowed_token_ids": [8, 900]}]
)
def test_token_ids_that_the_model_has_not(folder: Path, given: dict[str, Any]) -> None:
    (name,) = given
    edit(folder, vocab_size=900)
    said = refused(folder, sampling=given)
    assert f"sampling.{name}: the model has no token 900. Its ids go from 0 to 899" in said
    edit(folder, vocab_size=None, text_config={"vocab_size": 800})
    assert "no token 900. Its ids go from 0 to 799" in refused(folder, sampling=given)


@pytest.mark.parametrize("below", ["", "/deeper/still"])
def test_an_output_that_is_a_file(folder: Path, below: str) -> None:
    taken = folder.parent / "taken"
    taken.write_text("")
    (folder.parent / "in.csv").write_text("Company\nAcme\n")
    value = job_dict()
    value["source"] = {"uri": str(folder.parent / "in.csv")}
    value["output"] = {"uri": f"{taken}{below}"}
    with pytest.raises(ConfigError, match=r"output\.uri: .*/taken is a file"):
        dry_run(BatchJob.from_dict(value))
