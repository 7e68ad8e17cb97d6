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
from prefect_raybatch.distill.measure import halves

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


SEED = next(s for s in range(100) if 79 in halves(range(80), s)[1])  # row 79 is tested


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


def refused_at_once(nights, capsys, monkeypatch, *words: str) -> str:
    """Run the command, which must end before an engine starts and before it writes a file."""

    def started(*_: object) -> None:
        raise AssertionError("an engine starts")

    monkeypatch.setattr(submission, "infer_in_place", started)
    before = sorted(nights.folder.rglob("*"))
    code, _, err = called(capsys, *words)
    assert code == 2 and sorted(nights.folder.rglob("*")) == before
    return " ".join(err.split())


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["w1 and more", "w2 x"] * 40, "with distinct texts cannot show an agreement of 0.9"),
        ([*TEXTS[:79], "w99 other"], "answers to learn from are 'short', so there is nothing"),
    ],
)
def test_too_few_texts_and_labels_are_refused_before_rows_are_embedded(
    nights, capsys, monkeypatch, texts, message
):
    if len(set(texts)) > 2:  # all but one, which is in the half that tests, have one label
        nights.answer = lambda prompt: "long" if "other" in words(prompt) else "short"
    nights.write(*texts)
    monkeypatch.setattr("prefect_raybatch.api.distill.split_seed", lambda plan: SEED)
    nights.night("n2", nights.job(sampling={"choice": ["long", "short"]}, reuse=None))
    assert message in refused_at_once(nights, capsys, monkeypatch, *distill("n2"))


def test_a_place_that_cannot_be_written_is_refused_before_rows_are_embedded(
    nights, capsys, monkeypatch
):
    Path("file").write_text("x")
    Path("taken.job.yaml").mkdir()
    Path("in-use.json").write_text("x")
    for place, message in (
        ("file/c.json", "file is a file. Name a file in a folder"),
        ("taken.json", "taken.job.yaml is a folder"),
        ("in-use.json", "exists with other content"),
    ):
        text = refused_at_once(nights, capsys, monkeypatch, *distill("n1", "--write", place))
        assert message in text


@pytest.mark.parametrize("changes", [("--sample", "60"), ("--set", "prompt.template=Other {text}")])
def test_a_classifier_of_another_sample_or_text_is_refused_before_rows_are_embedded(
    nights, capsys, monkeypatch, changes
):
    code, _, err = called(capsys, *distill("n1"))
    assert code == 0, err
    text = refused_at_once(nights, capsys, monkeypatch, *distill("n1", *changes))
    assert "--write classifier.json exists with other content" in text


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
    assert code != 0 and "--write out: out is a folder" in err
    code, _, err = called(capsys, *distill("n1", "--write", "s3://bucket/c.json"))
    assert code != 0 and "--write s3:/bucket/c.json: the classifier is written to a local" in err
    assert not Path("s3:").exists()
