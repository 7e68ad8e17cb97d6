"""`raybatch warm`: an engine starts here with the arguments of a run and fills its caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest
import yaml
from helpers.engines import FakeEngine
from helpers.needs import needs_vllm

from prefect_raybatch.api import infer_run, plan_run, warm_caches
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.runs.warm_caches import cache_content, cache_folders
from prefect_raybatch.stages.engine import EngineLaunch

STARTED = "started.jsonl"  # beside the compile cache: the arguments of each engine that has started


class Compiling(FakeEngine):
    """Notes its arguments, and adds to vLLM's cache where it has not seen them."""

    def __init__(self, launch: EngineLaunch) -> None:
        super().__init__(launch)
        kept = {k: v for k, v in launch.arguments.items() if k != "use_tqdm_on_load"}
        text = json.dumps(kept, sort_keys=True, default=str)
        folder = Path(os.environ["VLLM_CACHE_ROOT"])
        folder.mkdir(exist_ok=True)
        with (folder.parent / STARTED).open("a") as file:
            file.write(text + "\n")
        if text not in [file.read_text() for file in folder.glob("*/code")]:
            new = folder / str(len(list(folder.iterdir())))
            new.mkdir()
            (new / "code").write_text(text)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    names = [f"Company {n} " * (n + 1) for n in range(20)]
    pa.csv.write_csv(pa.table({"Company": names}), tmp_path / "in.csv")
    return {
        "name": "small",
        "source": {"uri": str(tmp_path / "in.csv")},
        "prompt": {"template": "What is {Company}?"},
        "sampling": {"max_tokens": 4},
        "engine": {"model": "demo", "device": "cpu", "max_model_len": "auto"},
        "output": {"uri": str(tmp_path / "out")},
    }


def test_the_engine_is_that_of_a_run_of_all_rows(
    job: dict[str, Any], tmp_path: Path, without_ray: None
) -> None:
    batch = BatchJob.from_dict(job)
    (first,) = warm_caches(batch, Compiling)
    assert not first.were_warm
    assert [cache.compiled for cache in first.caches] == [True, False, False]
    assert first.caches[0].after > first.caches[0].before == 0
    infer_run(batch, plan_run(batch, "key"), engine=Compiling)
    (again,) = warm_caches(batch, Compiling)
    assert again.were_warm
    started = (tmp_path / STARTED).read_text().splitlines()
    assert len(started) == 3 and len(set(started)) == 1
    assert not (tmp_path / "out" / "preview").exists()


def test_a_hosted_model_has_nothing_to_compile(job: dict[str, Any]) -> None:
    job["engine"] = {"endpoint": {"url": "http://127.0.0.1:9/v1", "model": "m"}}
    with pytest.raises(ConfigError, match=r"engine\.endpoint"):
        warm_caches(BatchJob.from_dict(job))


def test_of_a_cascade_the_engines_of_both_models_start_and_none_for_a_hosted_one(
    job: dict[str, Any], tmp_path: Path
) -> None:
    job["engine"]["max_model_len"] = 512
    job["sampling"] = {"choice": ["a", "b"]}
    job["output"]["escalate"] = {
        "to": {"model": "demo", "device": "cpu", "max_model_len": 640},
        "when": {"probability_below": 0.9},
    }
    assert len(warm_caches(BatchJob.from_dict(job), Compiling)) == 2
    lengths = [
        json.loads(t)["max_model_len"] for t in (tmp_path / STARTED).read_text().split("\n")[:2]
    ]
    assert lengths == [512, 640]
    job["output"]["escalate"]["to"] = {"endpoint": {"url": "http://127.0.0.1:9/v1", "model": "m"}}
    assert len(warm_caches(BatchJob.from_dict(job), Compiling)) == 1


@pytest.mark.parametrize(
    ("variables", "paths"),
    [
        ({}, ["/h/.cache/vllm", "/h/.triton/cache", "/h/.cache/flashinfer"]),
        (
            {"XDG_CACHE_HOME": "/x", "TRITON_HOME": "/t", "FLASHINFER_WORKSPACE_BASE": "/f"},
            ["/x/vllm", "/t/.triton/cache", "/f/.cache/flashinfer"],
        ),
        (
            {"VLLM_CACHE_ROOT": "/v", "TRITON_CACHE_DIR": "/t"},
            ["/v", "/t", "/h/.cache/flashinfer"],
        ),
    ],
)
def test_the_folders_are_those_of_the_environment(
    variables: dict[str, str], paths: list[str]
) -> None:
    assert [f.path for f in cache_folders({"HOME": "/h", **variables})] == paths


def test_links_and_missing_folders_count_as_little(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(bytes(1000))
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert cache_content(str(tmp_path / "missing")).size == 0
    assert 1000 <= cache_content(str(tmp_path)).size < 2000


@needs_vllm
@pytest.mark.nightly
def test_a_real_engine_compiles_once(job: dict[str, Any], tmp_path: Path) -> None:
    job["engine"] |= {"enforce_eager": False, "max_model_len": 512}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "prefect_raybatch.cli", "warm", str(tmp_path / "job.yaml")]
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton")}

    def warmed() -> dict[str, Any]:
        done = subprocess.run([*command, "--json"], env=env, stdout=subprocess.PIPE, check=True)
        (engine,) = json.loads(done.stdout)["engines"]
        return dict(engine["caches"][0])

    first, second = warmed(), warmed()
    assert first["before"] == 0 and first["after"] > 0
    assert (first["compiled"], second["compiled"]) == (True, False)
