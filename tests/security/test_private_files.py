"""Folders and files that this package makes for itself are their owner's alone."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.small import small_run
from typer.testing import CliRunner

from prefect_raybatch.api import finalize_run, recorded_attempt
from prefect_raybatch.api.sending import sendable
from prefect_raybatch.cli import commands as cli
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.runs import tune
from prefect_raybatch.runs.attempts import INFERENCE
from prefect_raybatch.runs.run import run_of
from prefect_raybatch.stages.vllm import process_note
from prefect_raybatch.storage.private import open_lock, write_private

PLANTED = "PLANTEDvalue0008"


@pytest.fixture(autouse=True)
def everybody_may_read(tmp_path: Path) -> Iterator[None]:
    """The umask of most machines."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_file_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_private(path, "first")
    assert (path.read_text(), mode(path)) == ("first", 0o600)
    path.chmod(0o644)
    write_private(path, "second")
    assert (path.read_text(), mode(path)) == ("second", 0o600)


def test_a_lock_is_a_regular_file_and_no_link(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "elsewhere")
    os.mkfifo(pipe)
    for path in (link, pipe):
        with pytest.raises(OSError, match=path.name):
            open_lock(path)
    assert not (tmp_path / "elsewhere").exists()
    for _ in range(2):
        open_lock(tmp_path / "lock").close()
    assert mode(tmp_path / "lock") == 0o600


def test_a_tuned_job_file_is_its_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It repeats the job file, keys included."""
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: x\nsource: {uri: in}\nprompt: {template: '{a}'}\n"
        f"output: {{uri: out, options: {{secret: {PLANTED}}}}}\n"
    )
    trial = tune.Trial({}, 100.0)
    tuned = tune.Tuned((trial,), trial, 1000, 10.0)
    monkeypatch.setattr("prefect_raybatch.api.tune.tune", lambda *_, **__: tuned)
    (tmp_path / "job.tuned.yaml").write_text("of last week")
    done = CliRunner().invoke(cli.app, ["tune", str(job)])
    assert done.exit_code == 0, done.output
    made = tmp_path / "job.tuned.yaml"
    assert PLANTED in made.read_text() and mode(made) == 0o600
    assert PLANTED not in done.output


def test_notes_of_an_engine_lie_in_a_folder_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = process_note.ProcessNote("mine")
    mine.write(process_note.ROWS)
    (folder,) = tmp_path.iterdir()
    (path,) = folder.iterdir()
    assert mode(folder) == 0o700 and not mode(path) & 0o022
    mine.remove_note()


def test_records_of_a_run_hold_no_key(tmp_path: Path) -> None:
    """So that a run directory may have the mode that its readers need."""
    secrets = {"options": {"secret": PLANTED, "client_kwargs": {"k": PLANTED}}}
    run = small_run(
        tmp_path,
        source={"uri": "data/in.parquet", "rows_per_shard": 5, **secrets},
        output={"uri": "out", **secrets},
        engine={"hf_token": PLANTED, "env": {"HF_TOKEN": PLANTED}},
    )
    assert json.dumps(run.job.to_dict()).count(PLANTED) == 6
    key = run.plan.run_key
    with recorded_attempt(run.store, run.job, key, INFERENCE, begin=True):
        run.commit_all(failed=[(1, 2)])
    finalize_run(run.job, run_of(run.store, run.plan, run.ledger))
    with pytest.raises(ConfigError, match="may be a secret"):
        sendable(run.job)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not [path for path in written if PLANTED.encode() in path.read_bytes()]
