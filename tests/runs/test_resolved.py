"""What a command looks up about its job, it looks up once: the model's files, the fingerprint, the
store's probe."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.retries import first_run
from helpers.small import job_dict
from prefect.logging import disable_run_logger

from prefect_raybatch import demo
from prefect_raybatch.api import infer_run, plan_run, retry
from prefect_raybatch.api.tune import tune
from prefect_raybatch.cli import commands as cli
from prefect_raybatch.cluster import connect
from prefect_raybatch.flow import tasks
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.storage.local import LocalStore

WEIGHTS = "model.safetensors"
# Once for the model's identity, once for whether its weights are whole.
ONCE = {"weights": 2, "function": 1, "probe": 1}
_counts: list[Counter[str]] = []


def _opened(event: str, arguments: tuple[Any, ...]) -> None:
    # Without a mode it is what an opener does for an `open` that is counted already.
    counts = event == "open" and _counts and arguments[1] is not None
    if counts and isinstance(arguments[0], (str, Path)):
        name = Path(arguments[0]).name
        _counts[-1]["weights"] += name == WEIGHTS
        _counts[-1]["function"] += name == "asked_once.py"


sys.addaudithook(_opened)  # hooks cannot be taken back: this one looks while a test counts


class Connecting(Exception):
    """All is looked up, and the cluster's turn."""


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()
    probe = LocalStore.probe

    def probed(store: LocalStore) -> None:
        found["probe"] += 1
        probe(store)

    def connected(*_: Any) -> Any:
        raise Connecting

    monkeypatch.setattr(LocalStore, "probe", probed)
    monkeypatch.setattr(connect, "connected", connected)
    _counts.append(found)
    yield found
    _counts.pop()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BatchJob:
    """A job with a model in a folder and a function, whose source is read for a fingerprint."""
    shutil.copytree(demo.demo_model_path(), tmp_path / "model")
    (tmp_path / "asked_once.py").write_text("def done(row):\n    return row\n")
    (tmp_path / "in.csv").write_text("Company\nAcme\nBolt\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("asked_once")
    monkeypatch.delitem(sys.modules, "asked_once")
    __import__("asked_once")
    value = job_dict(engine={"model": str(tmp_path / "model")})
    value["source"] = {"uri": str(tmp_path / "in.csv")}
    value["output"] = {"uri": str(tmp_path / "out"), "postprocess": "asked_once:done"}
    return BatchJob.from_dict(value)


@pytest.mark.parametrize("key", [(), ("--run-key", "key")])
def test_raybatch_run(job, key, tmp_path, counts):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.to_dict()))
    with pytest.raises(Connecting):
        cli.app(["run", str(path), *key, "--no-prefect"], standalone_mode=False)
    assert counts == ONCE


def test_raybatch_run_of_a_planned_run(job, tmp_path, counts):
    plan_run(job, "key")
    counts.clear()
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.to_dict()))
    with pytest.raises(Connecting):
        cli.app(["run", str(path), "--run-key", "key", "--no-prefect"], standalone_mode=False)
    assert counts == {**ONCE, "weights": 1}  # whether they are whole was seen by the plan


def test_the_tasks_of_a_flow(job, counts):
    with disable_run_logger():
        run = tasks.plan_shards.fn(job, "key")
    assert counts == ONCE
    with pytest.raises(Connecting):
        infer_run(job, run)
    assert counts == ONCE
    again = plan_run(job, "key")
    assert again == run
    with pytest.raises(Connecting):
        infer_run(job, again)  # another command: what the first one saw may have changed
    assert counts["probe"] == 2


def test_a_dry_run(job, tmp_path, counts):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.to_dict()))
    cli.app(["plan", str(path), "--json"], standalone_mode=False)
    assert counts == {"weights": 2, "function": 1}


def test_tuning(job, counts):
    """The trials run another job with the same model."""
    with pytest.raises(Connecting):
        tune(job)
    assert counts == {"weights": 3, "function": 2, "probe": 1}  # dry run and plan look both


def test_raybatch_retry_failed(job, tmp_path, counts):
    run = first_run(tmp_path / "out")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.to_dict()))
    counts.clear()
    arguments = ["retry-failed", run.store.uri, "--job", str(path), "--no-prefect"]
    with pytest.raises(Connecting):
        cli.app(arguments, standalone_mode=False)
    assert counts == ONCE


def test_the_retry_task(job, tmp_path, counts):
    run = first_run(tmp_path / "out")
    counts.clear()
    made = retry.plan_retry(run.store.uri, job=job)
    assert isinstance(made, retry.Retry)
    assert counts == ONCE
