"""Folders and files that this package makes for itself are their owner's alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.small import small_run
from typer.testing import CliRunner

from prefect_raybatch.cli import commands as cli
from prefect_raybatch.cluster.tokens import keep_token_private, token_sent
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.cluster_access import ClusterAccess
from prefect_raybatch.model import adapters, pinned
from prefect_raybatch.private import made_folder, private_folder, put_private, write_private
from prefect_raybatch.remote.records import sendable
from prefect_raybatch.runs import tune
from prefect_raybatch.runs.attempts import INFERENCE, recorded_attempt
from prefect_raybatch.runs.finalize_run import finalize_run
from prefect_raybatch.runs.run import run_of
from prefect_raybatch.stages.vllm import note

PLANTED = "PLANTEDvalue0008"


@pytest.fixture(autouse=True)
def everybody_may_read(tmp_path: Path) -> Iterator[None]:
    """The umask of most machines."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    assert mode(private_folder(tmp_path / "a")) == 0o700
    (tmp_path / "open").mkdir(mode=0o777)
    assert mode(private_folder(tmp_path / "open")) == 0o700
    (tmp_path / "shared").mkdir(mode=0o755)  # by whoever operates the node, on purpose
    assert mode(made_folder(tmp_path / "shared")) == 0o755
    assert mode(made_folder(tmp_path / "x/new")) == 0o700


def test_a_planted_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "file", "pipe"):
        with pytest.raises(OSError):
            private_folder(tmp_path / name)
    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="not a folder of this user"):
        private_folder(tmp_path / "theirs")


def test_a_file_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert put_private(path, "first") and not put_private(path, "second")
    assert (path.read_text(), mode(path)) == ("first", 0o600)
    path.chmod(0o644)
    write_private(path, "third")
    assert (path.read_text(), mode(path)) == ("third", 0o600)
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_a_tuned_job_file_is_its_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It repeats the job file, keys included."""
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: x\nsource: {uri: in}\nprompt: {template: '{a}'}\n"
        f"output: {{uri: out, options: {{secret: {PLANTED}}}}}\n"
    )
    trial = tune.Trial({}, 100.0)
    tuned = tune.Tuned((trial,), trial, 1000, 10.0)
    monkeypatch.setattr(tune, "tune", lambda *_, **__: tuned)
    (tmp_path / "job.tuned.yaml").write_text("of last week")
    done = CliRunner().invoke(cli.app, ["tune", str(job)])
    assert done.exit_code == 0, done.output
    made = tmp_path / "job.tuned.yaml"
    assert PLANTED in made.read_text() and mode(made) == 0o600
    assert PLANTED not in done.output


def test_rays_token_is_its_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray writes ~/.ray/auth_token with the umask where there is none, and keeps the mode of one
    that is there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / ".ray/auth_token"
    keep_token_private()
    made = path.read_text()
    assert len(made) == 64 and (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert token_sent(ClusterAccess()) == made
    path.chmod(0o644)  # as Ray left it before
    keep_token_private()
    assert path.read_text() == made and mode(path) == 0o600
    path.unlink()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    keep_token_private()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    keep_token_private()
    assert not path.exists()


def test_copies_of_models_and_adapters_are_their_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYBATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    for name in adapters.ADAPTER_FILES:
        (tmp_path / "model" / name).write_text("{}")
    monkeypatch.setattr(pinned, "is_remote", lambda source: True)
    model = {"source": str(tmp_path / "model"), "identity": "a" * 64}
    copied = Path(pinned.local_path(model))
    assert copied.is_relative_to(tmp_path / "cache") and list(copied.iterdir())
    with pytest.raises(ConfigError):  # the adapter is copied, and is not the one of the plan
        adapters.adapter_path(model)
    for name in ("", "models", "adapters"):
        assert mode(tmp_path / "cache" / name) == 0o700


def test_notes_of_an_engine_lie_in_a_folder_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = note.Note("mine")
    mine.write(note.ROWS)
    (folder,) = tmp_path.iterdir()
    (path,) = folder.iterdir()
    assert mode(folder) == 0o700 and not mode(path) & 0o022
    mine.over()


@pytest.mark.timeout(60)  # it would wait for ever
def test_a_pipe_in_place_of_a_note_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = private_folder(tmp_path / f"raybatch-{os.getuid()}")
    os.mkfifo(folder / "mine-0.note")
    (tmp_path / "secret").write_text('{"doing": "rows", "times": 1, "before": ""}\n')
    (folder / "mine-1.note").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / f"raybatch-{os.getuid()}-mine-2.note")
    assert note.Note("mine").left() is None
    dead = multiprocessing.get_context("fork").Process(
        target=lambda: note.Note("mine").write(note.PROMPT)
    )
    dead.start()
    dead.join()
    assert note.Note("mine").left() == note.Left(note.PROMPT, 1, "", note.SILENT)
    assert (tmp_path / "secret").exists()


def test_a_folder_that_somebody_planted_keeps_no_engine_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"raybatch-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    mine = note.Note("mine")
    assert mine.left() is None
    mine.write(note.ROWS)
    mine.over()
    assert "is not noted for the next one" in caplog.text
    assert not list((tmp_path / "elsewhere").iterdir())


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
