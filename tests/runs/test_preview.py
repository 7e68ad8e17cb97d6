"""The first rows of a job in this process: types, prompts, answers, and nothing that stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest
from helpers.engines import FakeEngine

from prefect_raybatch.api import preview_rows
from prefect_raybatch.errors import (
    ConfigError,
    EngineFailure,
    EngineStartError,
    InsufficientResources,
)
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.stages.block import lost_block_like


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BatchJob:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    names = [f"Company {n}" if n != 2 else None for n in range(20)]
    table = pa.table({"id": list(range(20)), "Company": names})
    pa.csv.write_csv(table, tmp_path / "in.csv")
    return BatchJob.from_dict(
        {
            "name": "small",
            "source": {"uri": str(tmp_path / "in.csv")},
            "prompt": {"template": "What is {Company}?"},
            "engine": {"model": "demo", "device": "cpu"},
            "output": {"uri": str(tmp_path / "out")},
        }
    )


def test_types_prompts_answers_and_failed_rows_are_shown_and_nothing_stays(job, tmp_path):
    found = preview_rows(job, 4, engine=FakeEngine)
    assert found.columns == (("id", "int64"), ("Company", "string"))
    assert found.asked == ("Company",)
    assert [one.row for one in found.prompts] == [0, 1, 2, 3]
    first, null = found.prompts[0], found.prompts[2]
    assert "What is Company 0?" in first.text and first.tokens > 5
    assert (null.tokens, null.text) == (0, "") and "Company" in null.trouble
    assert [row["id"] for row in found.answers] == [0, 1, 3]
    assert all(row["response"] for row in found.answers)
    assert [row["stage"] for row in found.failed] == ["prepare"]
    assert list(found.seconds) == ["plan", "prompts", "engine's start", "answers"]
    assert not (tmp_path / "out").exists() and not list((tmp_path / "tmp").iterdir())


def test_a_job_that_keeps_its_answers_is_asked_here_too(job):
    kept = job.model_copy(update={"output": job.output.model_copy(update={"keep_answers": 7.0})})
    assert [row["id"] for row in preview_rows(kept, 2, engine=FakeEngine).answers] == [0, 1]


def test_golden_rows_are_not_read(job, tmp_path):
    golden = {"quality": {"golden": str(tmp_path / "golden.csv")}}
    measured = BatchJob.from_dict({**job.to_dict(), **golden})
    assert preview_rows(measured, 2, answers=False).prompts


@pytest.mark.parametrize(
    ("task", "context", "words", "fits"),
    [
        ("generate", 64, 200, False),
        ("embed", 64, 200, False),
        ("generate", 8192, 4000, True),  # for embed, the tokenizer's length still counts
    ],
)
def test_a_prompt_fits_into_the_context_length_that_the_job_overrides(
    job, tmp_path, task, context, words, fits
):
    """Without the override, 200 words fit into the 2,048 tokens of the model, and 4,000 do not."""
    pa.csv.write_csv(pa.table({"Company": ["word " * words]}), tmp_path / "in.csv")
    overrides = {"hf_overrides": {"max_position_embeddings": context}}
    sampling = {"max_tokens": 8} if task == "generate" else {}
    engine = {**job.to_dict()["engine"], **overrides, "task": task}
    long = BatchJob.from_dict({**job.to_dict(), "engine": engine, "sampling": sampling})
    (prompt,) = preview_rows(long, 1, answers=False).prompts
    assert (prompt.trouble == "") == fits, prompt.trouble
    assert fits or f"engine.max_model_len {context}" in prompt.trouble


def test_without_answers_no_engine_is_made(job):
    class Refused(FakeEngine):
        def __init__(self, spec: Any) -> None:
            raise AssertionError("an engine was started")

    found = preview_rows(job, 2, answers=False, engine=Refused)
    assert len(found.prompts) == 2 and found.answers == found.failed == ()


def test_it_looks_at_this_machine_and_not_at_the_cluster(job, monkeypatch):
    """A cluster with GPUs is where the run will be; here there is a CPU."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    seen = []

    class Seen(FakeEngine):
        def __init__(self, spec: Any) -> None:
            seen.append(spec)
            super().__init__(spec)

    by_itself = job.model_copy(update={"engine": Engine(model="demo")})
    assert preview_rows(by_itself, 2, engine=Seen).answers
    assert seen[0].env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "the engine of a CPU"
    assert seen[0].arguments["use_tqdm_on_load"] is False, "no bars in the midst of what is shown"
    shown = by_itself.model_copy(update={"engine": Engine(model="demo", use_tqdm_on_load=True)})
    assert preview_rows(shown, 2, engine=Seen).answers
    assert seen[1].arguments["use_tqdm_on_load"] is True, "as the job says"


def test_gpus_that_this_machine_lacks_are_told_before_an_engine_starts(job):
    on_gpus = job.model_copy(update={"engine": Engine(model="demo", device="gpu")})
    with pytest.raises(InsufficientResources, match=r"needs 1 GPU, and this machine.*no-answers"):
        preview_rows(on_gpus, 2)
    assert len(preview_rows(on_gpus, 2, answers=False).prompts) == 2


@pytest.mark.parametrize(("fatal", "error"), [(True, EngineStartError), (False, EngineFailure)])
def test_an_engine_that_is_lost_says_why(job, fatal, error):
    ended = []

    class Lost(FakeEngine):
        def __call__(self, table: pa.Table) -> pa.Table:
            return lost_block_like(table, Loss("RuntimeError", "no memory left", fatal))

        def close(self) -> None:
            ended.append(self)

    with pytest.raises(error, match="no memory left"):
        preview_rows(job, 2, engine=Lost)
    assert len(ended) == 1  # its GPU is free for another engine


def test_the_limit_of_the_job_counts_and_its_mistakes_are_told(job):
    short = job.model_copy(update={"source": job.source.model_copy(update={"limit": 1})})
    assert len(preview_rows(short, 5, answers=False).prompts) == 1
    with pytest.raises(ConfigError, match="rows 0"):
        preview_rows(job, 0)
    prompt = job.prompt.model_copy(update={"template": "What is {Compny}?"})
    with pytest.raises(ConfigError, match="Compny"):
        preview_rows(job.model_copy(update={"prompt": prompt}))
