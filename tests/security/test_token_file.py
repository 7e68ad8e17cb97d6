"""The file with Ray's token is its user's alone: whoever reads it can run anything as that user."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks import PLANTED_FILES

from prefect_raybatch import doctor
from prefect_raybatch.cluster.tokens import check_token_file, keep_token_private, token_sent
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.remote.client import connect_client


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    before = os.umask(0o022)
    yield tmp_path
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def marks() -> list[tuple[str, str]]:
    found = doctor.examine(checks={"Ray's token": doctor.CHECKS["Ray's token"]})
    return [(one.mark, one.remedy) for one in found]


def test_a_new_token_can_be_read_by_its_user_alone(home: Path) -> None:
    keep_token_private()
    file = home / ".ray/auth_token"
    assert (mode(file), mode(file.parent)) == (0o600, 0o700)
    token = file.read_text()
    assert len(bytes.fromhex(token)) == 32 and token_sent(ClusterAccess()) == token
    keep_token_private()
    assert file.read_text() == token and [one.name for one in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("by_path", [False, True])
def test_a_token_that_others_may_read_is_found_and_made_private(
    home: Path, monkeypatch: pytest.MonkeyPatch, by_path: bool
) -> None:
    file = home / ".ray/auth_token"
    if by_path:
        file = home / "elsewhere/token"
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    file.parent.mkdir()
    file.write_text("a" * 64)
    assert marks() == [("warn", f"chmod 600 {file}")]
    keep_token_private()
    assert mode(file) == 0o600 and file.read_text() == "a" * 64
    assert [mark for mark, _ in marks()] == ["pass"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "a" * 64), ("RAY_AUTH_TOKEN_PATH", "/no/x")],
)
def test_no_token_is_made_that_ray_would_not_use(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    keep_token_private()
    assert list(home.iterdir()) == [] and [mark for mark, _ in marks()] == ["pass"]


@pytest.mark.parametrize("kind", [*PLANTED_FILES, "folder"])
def test_what_is_planted_there_is_refused_and_not_waited_for(home: Path, kind: str) -> None:
    """Ray itself would wait for a pipe."""
    (home / ".ray").mkdir()
    {**PLANTED_FILES, "folder": os.mkdir}[kind](home / ".ray/auth_token")
    uses: dict[str, Callable[[], Any]] = {
        "it is sent": lambda: token_sent(ClusterAccess()),
        "a local cluster starts": check_token_file,
        "a job server is asked": lambda: connect_client("http://127.0.0.1:1"),
    }
    for use in uses.values():
        with pytest.raises(ConfigError, match=r"which is not a regular file. Remove it"):
            use()
    keep_token_private()


def test_a_link_to_a_token_is_followed_and_its_file_stays(home: Path) -> None:
    (home / ".ray").mkdir()
    other = home / "other"
    other.write_text("a token")
    other.chmod(0o644)
    (home / ".ray/auth_token").symlink_to(other)
    keep_token_private()
    assert mode(other) == 0o644 and token_sent(ClusterAccess()) == "a token"


@pytest.mark.timeout(300)
def test_a_local_cluster_takes_the_private_token(home: Path) -> None:
    script = """
import os
from prefect_raybatch.cluster.connect import connected
from prefect_raybatch.compile.job import cluster_spec
from helpers.small import make_job
os.umask(0o022)
with connected(cluster_spec(make_job())):
    import ray
    print("one", ray.get(ray.remote(num_cpus=0)(lambda: 1).remote()))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "one 1" in done.stdout, done.stderr[-2000:]
    assert mode(home / ".ray/auth_token") == 0o600
