"""`distill`: a sample of a finished run, embedded beside it, and the classifier of its labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.nights import Killed, Nights, rows_in, words

from prefect_raybatch.api.distill import Embedding, begin_distill, finish_distill, prepare_distill
from prefect_raybatch.distill.measure import Distilled
from prefect_raybatch.errors import ConfigError, IncompleteRun
from prefect_raybatch.job.edits import edited
from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import open_store

NAMES = [f"w{n} {'and more and more words' if n % 3 else 'x'}" for n in range(80)]
CHOICE = {"choice": ["long", "short"]}


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    """A finished run whose label is the length of the text, as the fake vectors are."""
    made = Nights(tmp_path)
    made.answer = lambda prompt: "long" if "more" in words(prompt) else "short"  # type: ignore[method-assign]
    made.write(*NAMES)
    made.night("n1", made.job(sampling=CHOICE))
    made.asked.clear()
    return made


def prepared(nights: Nights, rows: int = 80, **changes: Any) -> Embedding:
    return prepare_distill(str(nights.folder / "out/n1"), "demo", 0.9, rows, changes)


def distilled(nights: Nights, made: Embedding) -> Distilled:
    run = begin_distill(made)
    nights.infer(made.asked.job, run)
    return finish_distill(made, run)


def test_labels_that_follow_from_the_vectors_are_learned_and_no_row_is_asked_again(nights):
    made = prepared(nights)
    assert made.line == "embeds 80 of 80 rows of n1 with demo"
    found = distilled(nights, made)
    assert sorted(nights.asked) == sorted(f"Say {name}" for name in NAMES), "embedded once each"
    assert found.classifier.labels == ("long", "short")
    assert (found.learned, found.tested, found.same, found.share) == (40, 40, 40, 1.0)
    assert found.classifier.training.fields["prompt.template"] == "Say {text}"
    assert found.classifier.training.encoder == "demo"
    assert found.classifier.training.choice == ("long", "short")
    assert verify(open_store(str(nights.folder / "out/n1"))).ok


def test_the_same_command_embeds_no_row_twice_and_finds_the_same(nights):
    nights.stop_after = 0
    with pytest.raises(Killed):
        distilled(nights, prepared(nights))
    nights.stop_after = None
    found = distilled(nights, prepared(nights))
    nights.asked.clear()
    assert distilled(nights, prepared(nights)) == found and nights.asked == []
    assert distilled(nights, prepared(nights, 70)).tested == 35, "another sample, another folder"
    assert len(nights.asked) == 70


def test_preparing_writes_nothing(nights):
    prepared(nights)
    assert not (nights.folder / "out/_distill").exists() and nights.asked == []


def test_rows_that_failed_in_the_run_are_left_out(tmp_path):
    nights = Nights(tmp_path, refuses=lambda prompt: words(prompt) in NAMES[:8])
    nights.write(*NAMES)
    nights.answer = lambda prompt: "long" if "more" in words(prompt) else "short"
    nights.night("n1", nights.job(sampling=CHOICE))
    assert len(nights.quarantined("n1")) == 8
    nights.refuses = lambda prompt: False
    found = distilled(nights, prepared(nights))
    assert (found.learned, found.tested, found.same, found.unanswered) == (36, 36, 36, 8)


def test_the_embedding_run_is_no_run_of_the_output_folder(nights):
    made = prepared(nights)
    distilled(nights, made)
    (folder,) = (nights.folder / "out/_distill").iterdir()
    (run,) = (folder / "runs").iterdir()
    assert len(rows_in(run / "data")) == 80 and verify(open_store(str(run))).ok


SETTLED = (
    "source.uri",
    "output.uri",
    "engine",
    "engine.model",
    "engine.task",
    "engine.endpoint.url",
)


@pytest.mark.parametrize("field", SETTLED)
def test_a_field_that_is_settled_cannot_be_set(nights, field):
    with pytest.raises(ConfigError, match=rf"--set {field}: only single fields of engine"):
        prepared(nights, **{field: "x"})


def test_fields_of_the_engine_and_the_template_can_be_set(nights):
    made = prepared(nights, **{"engine.dtype": "float32", "prompt.template": "query: {text}"})
    job = made.asked.job
    assert (
        job.engine.vllm_arguments["dtype"] == "float32" and job.prompt.template == "query: {text}"
    )
    assert distilled(nights, made).classifier.training.fields["prompt.template"] == "query: {text}"


def test_runs_that_cannot_be_distilled_are_refused(nights):
    nights.night("n2")
    with pytest.raises(ConfigError, match=r"n2 has no labels.*sampling\.choice"):
        prepare_distill(str(nights.folder / "out/n2"), "demo", 0.9, 80)
    with pytest.raises(ConfigError, match=r"20 rows.*at least 57"):
        prepared(nights, 20)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        prepare_distill(str(nights.folder / "out/n1"), "demo", 1.5, 80)
    nights.stop_after = 1
    other = nights.job(sampling=CHOICE, prompt={"template": "Tell {text}"})
    with pytest.raises(Killed):
        nights.night("n3", other)
    with pytest.raises(IncompleteRun):
        prepare_distill(str(nights.folder / "out/n3"), "demo", 0.9, 80)


@pytest.mark.parametrize(
    "changes",
    [
        {"output.postprocess": "helpers.functions:whole_row"},
        {"sampling.n": 2, "sampling.temperature": 1.0},
    ],
)
def test_a_run_without_one_label_a_row_is_refused(nights, changes):
    nights.night("n4", edited(nights.job(sampling=CHOICE, reuse=None), changes, "a test"))
    with pytest.raises(ConfigError, match=r"output\.postprocess or sampling\.n"):
        prepare_distill(str(nights.folder / "out/n4"), "demo", 0.9, 80)
    assert not (nights.folder / "out/_distill").exists()


def test_answers_that_are_all_equal_are_refused_before_rows_are_embedded(nights):
    nights.answer = lambda prompt: "short"
    nights.night("n5", nights.job(sampling={"choice": ["short", "other"]}))
    nights.asked.clear()
    with pytest.raises(ConfigError, match=r"all 80 answers.*'short'.*nothing to tell apart"):
        prepare_distill(str(nights.folder / "out/n5"), "demo", 0.9, 80)
    assert nights.asked == []


def test_a_column_that_the_run_does_not_keep_is_refused(tmp_path):
    nights = Nights(tmp_path)
    nights.write(*NAMES)
    nights.answer = lambda prompt: "long"
    output = {"uri": str(tmp_path / "out"), "columns": []}
    nights.night("n1", nights.job(sampling=CHOICE, output=output))
    with pytest.raises(ConfigError, match=r"does not keep the column 'text'"):
        prepared(nights)
