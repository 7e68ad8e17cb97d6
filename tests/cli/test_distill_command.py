"""`raybatch distill` as a command: which files it writes, and what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from helpers.command_line import called
from helpers.nights import Nights, words

from prefect_raybatch.api import submission
from prefect_raybatch.api.distill import prepare_distill

TEXTS = [f"w{n} {'and more and more words' if n % 3 else 'x'}" for n in range(10, 90)]


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    """A finished run whose labels can be learned, in the current folder."""
    made = Nights(tmp_path)
    made.answer = lambda prompt: "long" if "more" in words(prompt) else "short"  # type: ignore[method-assign]
    made.write(*TEXTS)
    made.night("n1", made.job(sampling={"choice": ["long", "short"]}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        submission, "infer_in_place", lambda job, keys, run, told: made.infer(job, run)
    )
    return made


def distill(run: str, *more: str) -> tuple[str, ...]:
    return ("distill", f"out/{run}", "--encoder", "demo", "--agreement", "0.9", *more)


def test_the_files_are_written_and_the_same_command_may_write_them_again(nights, capsys):
    for _ in range(2):
        code, out, err = called(capsys, *distill("n1"))
        assert code == 0, err
    shown = Path("classifier.job.yaml").read_text("utf-8")
    assert shown.partition("\n")[2].strip() in out
    file = yaml.safe_load(shown)["engine"]["classifier"]
    assert file == str(nights.folder / "classifier.json"), "a job may be started elsewhere"


def test_a_classifier_with_other_content_stays(nights, capsys):
    Path("classifier.json").write_text("in use")
    code, _, err = called(capsys, *distill("n1"))
    assert code != 0 and "--write classifier.json exists with other content" in err
    assert Path("classifier.json").read_text() == "in use"
    assert not Path("classifier.job.yaml").exists()
    code, _, err = called(capsys, *distill("n1", "--write", "classifier-0.95"))
    assert code == 0, err
    assert Path("classifier-0.95").exists() and Path("classifier-0.95.job.yaml").exists()


def test_nothing_is_written_if_the_classifier_can_answer_nothing(nights, capsys):
    nights.answer = lambda prompt: "long" if words(prompt)[2] in "02468" else "short"
    nights.night("n2", nights.job(sampling={"choice": ["long", "short"]}, reuse=None))
    code, out, _ = called(capsys, *distill("n2", "--json"))
    found = json.loads(out)
    assert code == 1 and found["answered"] == 0 and found["written"] is None
    assert not list(nights.folder.glob("classifier*"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extras": ["finish_reason"]}, "output.extras: finish_reason: .*remove it"),
        ({"on_cut_off": "fail"}, "output.on_cut_off: .*remove it"),
    ],
)
def test_fields_of_the_runs_job_that_no_cascade_can_have_are_named_first(nights, fields, message):
    output = {"uri": "out", "columns": ["text"], **fields}
    sampling = {"choice": ["long", "short"]}
    nights.night("n2", nights.job(sampling=sampling, reuse=None, output=output))
    prepared = prepare_distill("out/n2", "demo", 0.9, 80)
    assert re.search(f"the job of n2 with a classifier: {message}", prepared.problem)


def test_the_command_says_so_and_its_json_too(nights, capsys):
    """The job of n1 reuses answers, which no cascade can."""
    _, out, err = called(capsys, *distill("n1", "--json"))
    assert "cannot be combined with reuse" in err
    assert "cannot be combined with reuse" in json.loads(out)["problem"]


def test_a_folder_is_refused(nights, capsys):
    code, _, err = called(capsys, *distill("n1", "--write", "out"))
    assert code != 0 and "--write out is a folder" in err
