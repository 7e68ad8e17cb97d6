"""Pipes and devices in the place of files: nobody waits for them or reads them without end."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from attacks import PLANTED_FILES
from helpers.small import small_run

from prefect_raybatch.errors import ConfigError, RayBatchError, StoreError
from prefect_raybatch.job.answer_schema import schema_text
from prefect_raybatch.job.kubernetes import Kubernetes
from prefect_raybatch.job.ray_cluster import given_manifest
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.model import chat_template, pinned
from prefect_raybatch.model.pinned import local_path
from prefect_raybatch.policy.policy_file import read_policy
from prefect_raybatch.remote.records import JobRecords
from prefect_raybatch.runs.status import report_of, state_of
from prefect_raybatch.storage import open_store


@pytest.mark.parametrize("kind", PLANTED_FILES)
def test_no_file_of_a_run_directory_is_waited_for(tmp_path: Path, kind: str) -> None:
    run = small_run(tmp_path / "run")
    run.commit_all(failed=[(0, 1)])
    JobRecords(run.store, "key", run.plan.hash).add(1, {}, "http://head:8265", None)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        data = path.read_bytes()
        path.unlink()
        PLANTED_FILES[kind](path)
        with pytest.raises(StoreError, match="a pipe or a device"):
            run.store.read(str(path.relative_to(tmp_path / "run")))
        for look in (state_of, report_of, _look):
            with suppress(RayBatchError):
                look(str(tmp_path / "run"))
        path.unlink()
        path.write_bytes(data)
    assert _look(str(tmp_path / "run")) == run.plan.shards


def _look(uri: str) -> int:
    ledger = Ledger(open_store(uri))
    plan = ledger.load_plan()
    if plan is None:
        return 0
    JobRecords(ledger.store, "key", plan.hash).newest()
    return len(list(ledger.commits(plan, ledger.listing(plan))))


@pytest.mark.parametrize("kind", PLANTED_FILES)
def test_no_lock_of_the_cache_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("RAYBATCH_CACHE", str(tmp_path))
    (tmp_path / "models").mkdir(mode=0o700)
    PLANTED_FILES[kind](tmp_path / "models" / f"{'0' * 64}.lock")
    with pytest.raises(ConfigError, match=r"regular file|symbolic links"):
        local_path({"source": "s3://bucket/model", "identity": "0" * 64, "revision": None})


@pytest.mark.parametrize("kind", PLANTED_FILES)
def test_no_file_that_a_job_names_is_waited_for(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "planted.json"
    PLANTED_FILES[kind](place)
    readers: dict[str, Callable[[str], Any]] = {
        "chat template": chat_template.template_text,
        "schema": schema_text,
        "manifest": lambda name: given_manifest(Kubernetes(manifest_file=name)),
        "policy": read_policy,
    }
    for reader in readers.values():
        with pytest.raises(ConfigError, match="not a regular file"):
            reader(str(place))


def test_no_configuration_of_a_model_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert pinned.context_length({"source": str(tmp_path)}) is None
    with pytest.raises(ConfigError, match="not a regular file"):
        pinned.read_config({"source": str(tmp_path)})
