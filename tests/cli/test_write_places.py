"""A file that a command writes at its end is checked before the work begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers.command_line import called

FIELDS = {
    "name": "sorted",
    "source": {"uri": "in.parquet"},
    "prompt": {"template": "Say {text}"},
    "output": {"uri": "out"},
}


@pytest.mark.parametrize(
    "words",
    [
        ("tune", "job.yaml", "--write"),
        ("tune", "job.yaml", "--cascade", "--write"),
        ("diff", "job.yaml", "--against", "out/n1", "--html"),
        ("distill", "out/n1", "--encoder", "demo", "--write"),
    ],
)
@pytest.mark.parametrize(
    ("place", "message"),
    [("folder", "folder is a folder. Name a file"), ("file/x", "file is a file")],
)
def test_a_file_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    place: str,
    message: str,
) -> None:
    """There is neither input nor run, so nothing else was looked at."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_text("x")
    Path("job.yaml").write_text(yaml.safe_dump(FIELDS))
    code, _, err = called(capsys, *words, place)
    assert code == 2 and message in " ".join(err.split())


def test_a_demo_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    code, _, err = called(capsys, "demo", "--folder", str(tmp_path / "file"))
    assert code == 2 and "--folder:" in err and "Name a folder" in " ".join(err.split())
