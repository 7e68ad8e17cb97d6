"""Run the commands of docs/tutorials/first-run.md in order, with an engine in this process that
answers as the bundled model does, and compare their outputs with the page. `make tour` runs them
with the real engine."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from helpers.command_line import called
from helpers.industries import ROWS, Industries, PowerCut, stand_in
from helpers.pages import Step, steps
from tour import ELSEWHERE, TOUR_PAGE

from prefect_raybatch.cli import terminal
from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import open_store

STEPS = list(steps(TOUR_PAGE.read_text(encoding="utf-8")))
PASSING = re.compile(r" left, \d+ failed$|^driver |^time left")  # seen while a run works


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Industries:
    return stand_in(tmp_path, monkeypatch)


def act(step: Step, engine: Industries, capsys: pytest.CaptureFixture[str]) -> str:
    """Does in this process what a reader does; returns what is printed."""
    text = step.does.text
    if step.does.language == "yaml":
        Path("job.yaml").write_text(text)
        return ""
    if step.does.language == "python":
        capsys.readouterr()
        exec(text.replace("10_000", str(ROWS)).replace("10001", str(ROWS + 1)), {})
        return capsys.readouterr().out
    printed = ""
    for line in text.splitlines():
        if ELSEWHERE.match(line) or line == "kill -9 %1":  # which struck when it was begun
            continue
        program, *arguments = shlex.split(line)
        assert program == "raybatch", line
        cut = arguments[-1] == "&"
        engine.stop_after = 2 if cut else None
        try:
            code, out, err = called(capsys, *arguments[: -1 if cut else None])
        except PowerCut:
            out, err = capsys.readouterr()
            code = 0
        assert code == 0, out + err
        printed += err + out
    return printed


def shape(text: str, folder: Path) -> str:
    """What is printed, as on any machine: without figures, folder and width."""
    text = re.sub(r"(\d+ (h|min) )*\d+ s\b", "0 s", text.replace(str(folder), "/tmp/tour"))
    text = re.sub(r"\d[\d,.:]*|(?<=\s)-(?=\s|$)", "0", text)
    return re.sub(r"[\s─]+", " ", text).strip()


def test_the_tour_is_what_happens(engine, prefect_api, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for console in (terminal.out, terminal.err):  # whose width may be settled by now
        monkeypatch.setattr(console, "width", 300)
    for step in STEPS:
        printed = act(step, engine, capsys)
        if step.shows is not None:
            there = shape(printed, tmp_path)
            lines = [line for line in step.shows.text.splitlines() if not PASSING.search(line)]
            told = [shape(line, tmp_path) for line in lines]
            missing = [line for line in told if line not in there]
            assert told and not missing, (
                f"{step.does.text}\ndoes not print\n{missing}\nbut\n{printed}"
            )
    verdict = verify(open_store(str(tmp_path / "out/monday")))
    assert (verdict.ok, verdict.rows, verdict.quarantined) == (True, ROWS + 1, 1)
