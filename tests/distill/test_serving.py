"""A distilled classifier as the first model of a cascade, and alone, with an engine that fakes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from helpers.nights import Killed, Nights, rows_in, words
from rich.console import Console

from prefect_raybatch.api import Sender, dry_run, plan_run, preview_rows
from prefect_raybatch.api import tune as tuning
from prefect_raybatch.api.distill import (
    Embedding,
    begin_distill,
    cascade_fields,
    finish_distill,
    prepare_distill,
)
from prefect_raybatch.api.sending import submission_of
from prefect_raybatch.api.submission import check_recorded_job
from prefect_raybatch.cli import ending, show
from prefect_raybatch.compile.resolved import fingerprint
from prefect_raybatch.demo import demo_model_path
from prefect_raybatch.distill.classifier import Classifier
from prefect_raybatch.distill.measure import Distilled
from prefect_raybatch.errors import ConfigError, CorruptRun, PlanMismatch, RayBatchError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import first_of, with_store_options
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.model import pinned as models
from prefect_raybatch.quality.accuracy import interval
from prefect_raybatch.report.html import html
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import cascade_text, markdown
from prefect_raybatch.report.run_history import history_rows
from prefect_raybatch.result.reap import reap
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.run_history import history_of
from prefect_raybatch.runs.status import report_of
from prefect_raybatch.stages.block import load_tokenizer
from prefect_raybatch.storage import open_store

LONG = "and more and more words"
TRAINED = [f"w{n} {LONG if n % 3 else 'x'}" for n in range(80)]
CHOICE = ["long", "short"]
# The fake vectors are (length, first letter): the last texts are near the border.
ESCALATE = {"to": {"model": "demo"}, "when": {"probability_below": 0.9}}
BORDER = ["v and more word"] * 3
TONIGHT = [*(f"v{n} {LONG}" for n in range(6)), *(f"v{n} y" for n in range(6)), *BORDER]


class Classified(Nights):
    """Nights whose first run was distilled to `file`."""

    def answer(self, prompt: str) -> str:
        return "long" if "more" in words(prompt) else "short"

    @property
    def file(self) -> Path:
        return self.folder / "classifier.json"

    @property
    def classifier(self) -> Classifier:
        return Classifier.from_bytes(self.file.read_bytes(), "classifier.json")

    def distill(self, **changes: Any) -> tuple[Embedding, Distilled]:
        prepared = prepare_distill(str(self.folder / "out/n1"), "demo", 0.9, 80, changes)
        run = begin_distill(prepared)
        self.infer(prepared.asked.job, run)
        found = finish_distill(prepared, run)
        self.file.write_bytes(found.classifier.to_bytes())
        return prepared, found

    def cascade(self, **groups: Any) -> BatchJob:
        output = {"uri": str(self.folder / "out"), "columns": ["text"]}
        value = {
            "sampling": {"choice": CHOICE},
            "prompt": {"template": "Say {text}", "system": "You sort texts."},
            "engine": {"model": "demo", "classifier": str(self.file), "device": "cpu"},
            **groups,
            "output": {**output, "escalate": ESCALATE, **groups.get("output", {})},
        }
        return self.job(**{**value, "reuse": groups.get("reuse")})

    def sure_of(self, text: str) -> bool:
        """Return whether the classifier answers a text, by its own file."""
        import numpy as np

        said = f"Say {text}"
        vectors = np.array([[len(said), ord(said[0])]], np.float32)
        return bool(self.classifier.probabilities(vectors).max() >= 0.9)


def trained_in(folder: Path) -> Classified:
    made = Classified(folder)
    made.write(*TRAINED)
    made.night("n1", made.job(sampling={"choice": CHOICE}))
    made.distill()
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a classifier, for tests that need nothing else of the run it learned from."""
    return trained_in(tmp_path_factory.mktemp("trained")).file.read_bytes()


@pytest.fixture
def nights(tmp_path: Path, trained: bytes) -> Classified:
    made = Classified(tmp_path)
    made.file.write_bytes(trained)
    made.write(*TONIGHT)
    return made


def whole(nights: Classified, key: str, report: RunReport) -> list[dict[str, Any]]:
    assert verify(open_store(str(nights.folder / "out" / key))).faults == []
    rows = sorted(nights.result(key), key=lambda row: row["_row"])
    assert [row["text"] for row in rows] == TONIGHT[: len(rows)] and report.rows == len(TONIGHT)
    return rows


def test_the_classifier_answers_what_it_is_sure_of_and_the_larger_model_the_rest(nights):
    report = nights.night("n2", nights.cascade())
    rows = whole(nights, "n2", report)
    sure = [row["answered_by"] == "classifier on demo" for row in rows]
    assert sure == [nights.sure_of(row["text"]) for row in rows]
    assert 0 < sum(sure) < len(rows), "both answered"
    assert all(row["response"] == nights.answer(f"Say {row['text']}") for row in rows)
    asked = [text for text in nights.asked if "You sort texts." in text]
    embedded = set(nights.asked) - set(asked)
    assert embedded == {f"Say {text}" for text in TONIGHT}, "as in training, without prompt.system"
    assert {words(text) for text in asked} == {*BORDER}
    first, larger = report.cascade
    assert (first.model, first.answered, larger.answered) == (
        "classifier on demo",
        sum(sure),
        len(rows) - sum(sure),
    )
    assert "probabilities" not in rows[0]


@pytest.mark.parametrize("alone", [False, True])
def test_the_report_names_the_classifier_its_training_and_what_was_measured(
    nights, alone, monkeypatch
):
    output = {"uri": str(nights.folder / "out"), "columns": ["text"]}
    engine = {"model": "demo", "device": "cpu", "classifier": str(nights.file)}
    job = nights.cascade()
    if alone:
        job = nights.job(reuse=None, output=output, engine={**engine, "task": "embed"})
    plan_run(job, "n2")
    note = report_of(str(nights.folder / "out/n2")).classifier
    report = nights.night("n2", job)
    measured = nights.classifier.measured
    assert measured is not None and (measured.run, measured.tested) == ("n1", 40)
    assert report.classifier == note and note is not None
    assert (note.file, note.encoder, note.labels) == (str(nights.file), "demo", ("long", "short"))
    assert (note.run, note.trained) == ("n1", measured.trained) and note.trained > 1.7e9
    assert (note.tested, note.same) == (40, measured.same)
    when = datetime.fromtimestamp(measured.trained, UTC).strftime("%Y-%m-%d %H:%M UTC")
    low, high = interval(measured.same, 40)
    text = (
        f"2 labels (long, short) by {nights.file} on demo, trained {when} on run n1, where it gave "
        f"{measured.same} of 40 other texts that run's answer: {measured.same / 40:.1%} "
        f"({low:.1%} to {high:.1%})"
    )
    assert note.text() == text
    told = io.StringIO()
    monkeypatch.setattr(ending, "out", Console(file=told, width=2000))
    ending.show_ending(report)
    assert f"labels  {text}" in told.getvalue()
    assert "trained " in markdown(report) and f"on run n1, where it gave {measured.same}" in html(
        report
    )
    assert report.to_dict()["classifier"]["labels"] == ("long", "short")
    assert RunReport.from_bytes(report.to_bytes()).classifier == note


def test_the_same_training_writes_the_same_file(tmp_path):
    """So that the command can be repeated, with another agreement too."""
    nights = trained_in(tmp_path)
    before = nights.file.read_bytes()
    nights.distill()
    assert nights.file.read_bytes() == before


def test_the_first_model_keeps_the_probabilities_of_the_file(nights):
    nights.night("n2", nights.cascade())
    rows = rows_in(nights.folder / "out/n2/_raybatch/asks/data")
    assert [row["_row"] for row in rows] == list(range(len(TONIGHT)))
    for row in rows:
        chances = dict(row["probabilities"])
        assert sum(chances.values()) == pytest.approx(1) and set(chances) == set(CHOICE)
        assert next(iter(chances)) == max(chances, key=lambda label: chances[label])
        assert row["response"] == next(iter(chances))
        sure = nights.sure_of(TONIGHT[row["_row"]])
        assert (max(chances.values()) >= 0.9) == sure


@pytest.mark.parametrize("receipts", [0, 2, 5])
def test_a_killed_run_resumes_and_ends_with_the_same_answers(nights, receipts):
    job = nights.cascade()
    nights.night("whole", job)
    nights.stop_after = receipts
    with pytest.raises(Killed):
        nights.night("n2", job)
    nights.stop_after = None
    assert whole(nights, "n2", nights.night("n2", job)) == nights.result("whole")


def test_a_preview_reads_it_with_the_options_of_the_output(nights, s3):
    uri = "s3://serving/files/classifier.json"
    open_store("s3://serving/files", s3.options).put("classifier.json", nights.file.read_bytes())
    job = nights.cascade(
        engine={"model": "demo", "classifier": uri, "device": "cpu"},
        output={"uri": "s3://serving/out", "options": s3.options},
    )
    assert len(preview_rows(job, 2, answers=False).prompts) == 2


def test_rows_that_cannot_be_embedded_go_to_the_larger_model(tmp_path):
    """Distilling counts them as left to the model, so its bound holds only if they are."""
    nights = Classified(tmp_path)
    prompt = {"template": "{text}", "special_tokens_in_rows": "refuse"}
    nights.answer = lambda prompt: "long" if "more" in prompt else "short"
    nights.write(*TRAINED)
    nights.night("n1", nights.job(sampling={"choice": CHOICE}, prompt=prompt))
    nights.distill(**{"engine.max_model_len": 40})
    engine = {"model": "demo", "classifier": str(nights.file), "max_model_len": 40}
    control = sorted(load_tokenizer(str(demo_model_path()), None).all_special_tokens)[0]
    nights.write("v1 y", f"v2 {'more ' * 60}", None, "", f"v3 {control}")
    report = nights.night("n2", nights.cascade(engine=engine, prompt=prompt))
    rows = sorted(nights.result("n2"), key=lambda row: row["_row"])
    assert [(row["_row"], row["response"], row["answered_by"]) for row in rows] == [
        (0, "short", "classifier on demo"),
        (1, "long", "demo"),
        (3, "short", "demo"),
    ]
    failed = {row["_row"]: row["error"] for row in nights.quarantined("n2")}
    assert set(failed) == {2, 4}, "a null fails as ever"
    assert failed[4] == "ControlTokenInRow", "the larger model's tokenizer has the token too"
    assert report.cascade[1].asked == 3


@pytest.mark.parametrize("alone", [False, True])
def test_a_run_that_a_classifier_answered_is_not_distilled_again(nights, alone):
    """Else the classifier would be tested against its own answers."""
    engine = {"model": "demo", "task": "embed", "classifier": str(nights.file)}
    output = {"uri": str(nights.folder / "out")}
    job = nights.job(engine=engine, output=output, reuse=None) if alone else nights.cascade()
    nights.night("n2", job)
    with pytest.raises(ConfigError, match=r"n2: .*output\.escalate or engine\.classifier.*alone"):
        prepare_distill(str(nights.folder / "out/n2"), "demo", 0.9, 80)


def test_alone_it_answers_every_row(nights):
    job = nights.job(
        engine={"model": "demo", "task": "embed", "classifier": str(nights.file)},
        output={"uri": str(nights.folder / "out"), "probabilities": True},
        reuse=None,
    )
    nights.night("n2", job)
    rows = rows_in(nights.folder / "out/n2/data")
    assert [row["response"] for row in rows][:12] == ["long"] * 6 + ["short"] * 6
    assert all(dict(row["probabilities"]).keys() == set(CHOICE) for row in rows)


def test_its_content_counts_and_not_its_name(nights):
    job, before = nights.cascade(), fingerprint(nights.cascade())
    other = nights.folder / "other.json"
    other.write_bytes(nights.file.read_bytes())
    engine = {"model": "demo", "classifier": str(other), "device": "cpu"}
    assert fingerprint(nights.cascade(engine=engine)) == before
    nights.stop_after = 1
    with pytest.raises(Killed):
        nights.night("n2", job)
    nights.stop_after = None
    made = nights.classifier
    nights.file.write_bytes(replace(made, bias=tuple(b + 1 for b in made.bias)).to_bytes())
    assert fingerprint(job) != before
    with pytest.raises(PlanMismatch, match=r"engine\.classifier"):
        plan_run(job, "n2")


@pytest.mark.parametrize("alone", [False, True])
def test_a_cluster_takes_a_classifier_that_moved_but_no_job_without_one(nights, alone):
    def job(file: Path | None) -> BatchJob:
        engine = {"model": "demo"} if file is None else {"model": "demo", "classifier": str(file)}
        if not alone:
            return nights.cascade(engine=engine)
        return nights.job(engine={**engine, "task": "embed"}, reuse=None)

    plan_run(job(nights.file), "n2")
    plan = Ledger(open_store(str(nights.folder / "out/n2"))).load_plan()
    moved = nights.file.rename(nights.folder / "moved.json")
    check_recorded_job(job(moved), (), plan, "a record")
    with pytest.raises(CorruptRun, match=r"engine\.classifier: True -> False"):
        check_recorded_job(job(None), (), plan, "a record")


@pytest.mark.parametrize("alone", [False, True])
def test_a_planned_run_needs_the_file_no_more(nights, alone):
    """As on the cluster of a job server, where there is none."""
    job = nights.cascade()
    if alone:
        engine = {"model": "demo", "classifier": str(nights.file), "task": "embed"}
        job = nights.job(engine=engine, reuse=None)
    run = plan_run(job, "n2")
    sure = [nights.sure_of(text) for text in TONIGHT]
    nights.file.unlink()
    rows = whole(nights, "n2", nights.drive(job, run))
    assert sum(sure) > 0 and (alone or [row["answered_by"] != "demo" for row in rows] == sure)
    kept = nights.folder / ("out/n2/_raybatch" if alone else "out/n2/_raybatch/asks/_raybatch")
    (table,) = kept.glob("classifier-*.parquet")
    store = open_store(str(nights.folder / "out/n2"))
    assert "tables" not in reap(store, older_than=-60.0).files
    table.unlink()
    faults = verify(store).faults
    assert len(faults) == 1 and table.name in faults[0]


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": {"template": "Tell {text}"}}, r"prompt\.template: .*'Say \{text\}'.*'Tell"),
    ({"prompt": {"template": "Say {text}", "on_null": "empty"}}, r"prompt\.on_null: .*'fail'"),
    ({"sampling": {"choice": ["long", "short", "odd"]}}, r"sampling\.choice: .*lacks.*'odd'"),
    ({"sampling": {"choice": ["long", "odd"]}}, r"sampling\.choice: the job lacks.*'short'"),
    ({"engine": {"dtype": "float16"}}, r"engine: .*trained with \{\}.*float16"),
    ({"engine": {"max_model_len": 64}}, r"engine\.max_model_len: .*None.*64"),
    ({"engine": {"classifier": "none.json"}}, r"engine\.classifier: no file none\.json"),
    ({"engine": {"classifier": "/tmp/"}}, r"engine\.classifier: /tmp/ is a folder"),
    ({"engine": {"model": "BAAI/other"}}, r"engine\.model: .*trained on.*demo.*BAAI/other"),
]


@pytest.mark.parametrize(("groups", "message"), FIELDS)
def test_a_job_that_differs_from_the_training_is_refused(nights, groups, message):
    groups = dict(groups)
    if "engine" in groups:
        groups["engine"] = {"model": "demo", "classifier": str(nights.file), **groups["engine"]}
    job = nights.cascade(**groups)
    for check in (dry_run, lambda job: plan_run(job, "n2")):
        with pytest.raises(ConfigError, match=message):
            check(job)
    assert not (nights.folder / "out/n2").exists()


def test_another_encoder_under_the_same_name_is_refused(nights):
    made = nights.classifier
    training = replace(made.training, identity="0" * 64)
    nights.file.write_bytes(replace(made, training=training).to_bytes())
    with pytest.raises(ConfigError, match=r"engine\.model: .*demo \(files 0000.*raybatch distill"):
        plan_run(nights.cascade(), "n2")


def test_another_commit_of_the_encoder_is_refused(nights, monkeypatch):
    """The commit is known only once the model is pinned."""
    made = nights.classifier
    name = "BAAI/encoder"
    training = replace(made.training, encoder=name, identity=f"{name}@{'a' * 40}")
    nights.file.write_bytes(replace(made, training=training).to_bytes())
    monkeypatch.setattr(models, "hub_commit", lambda *_: "b" * 40)
    engine = {"model": name, "classifier": str(nights.file)}
    alone = nights.job(engine={**engine, "task": "embed"}, reuse=None)
    for job in (nights.cascade(engine=engine), alone):
        for check in (dry_run, lambda job: plan_run(job, "n2")):
            with pytest.raises(ConfigError, match=r"engine\.model: .*encoder@a+, .*encoder@b+\."):
                check(job)
    assert not (nights.folder / "out/n2/_raybatch/plan.json").exists()


def test_a_file_that_is_no_classifier_is_refused_with_its_name_and_field(nights):
    value = json.loads(nights.file.read_bytes())
    value["weights"][0][0] = "x"
    nights.file.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=r"engine\.classifier: .*json.*weights\.0\.0"):
        plan_run(nights.cascade(), "n2")


def test_vectors_of_another_length_end_the_run(nights):
    made = nights.classifier
    wider = tuple((*row, 0.0) for row in made.weights)
    nights.file.write_bytes(replace(made, weights=wider).to_bytes())
    with pytest.raises(RayBatchError, match=r"vectors of 3 numbers, and these have 2"):
        nights.night("n2", nights.cascade())


COMBINATIONS: list[tuple[dict[str, Any], str]] = [
    ({"output": {"escalate": {}}}, r"needs output\.escalate"),
    (
        {"output": {"escalate": {"to": {"model": "demo"}, "when": {"logprob_below": -1}}}},
        "only probabilities",
    ),
    ({"sampling": {"choice": CHOICE, "logprobs": 2}}, r"with sampling\.logprobs"),
    ({"output": {"extras": ["finish_reason"]}}, "finish_reason"),
    (
        {
            "output": {
                "escalate": {
                    "to": {"model": "demo", "classifier": "c.json"},
                    "when": {"probability_below": 0.9},
                }
            }
        },
        "classifier",
    ),
]


@pytest.mark.parametrize(("groups", "message"), COMBINATIONS)
def test_fields_that_do_not_go_with_it_are_refused(nights, groups, message):
    with pytest.raises(ConfigError, match=message):
        nights.cascade(**groups)


@pytest.mark.parametrize(
    ("groups", "name"),
    [
        ({"output": {"postprocess": "helpers.functions:whole_row"}}, r"output\.postprocess"),
        ({"output": {"keep_answers": 3}}, r"output\.keep_answers"),
        ({"reuse": "latest"}, "reuse"),
    ],
)
def test_fields_that_do_not_go_with_it_alone_are_refused(nights, groups, name):
    """In a cascade output.escalate refuses them already."""
    output = {"uri": "out", **groups.get("output", {})}
    engine = {"model": "demo", "task": "embed", "classifier": str(nights.file)}
    with pytest.raises(ConfigError, match=rf"engine\.classifier cannot be combined with {name};"):
        nights.job(**{"reuse": None, **groups, "output": output, "engine": engine})


def test_the_first_job_embeds_the_template_alone(nights):
    job = first_of(nights.cascade())
    assert job.engine.task == "embed" and job.prompt.system is None
    assert job.sampling.choice is None and job.output.probabilities


def test_checked_rows_are_asked_twice_and_the_report_says_how_many_agree(nights):
    usual, other = nights.answer, next(text for text in TONIGHT if nights.sure_of(text))
    nights.answer = lambda prompt: "short" if words(prompt) == other else usual(prompt)
    report = nights.night("n2", nights.cascade(output={"escalate": {**ESCALATE, "check": 100}}))
    rows = whole(nights, "n2", report)
    assert {words(text) for text in nights.asked if "You sort" in text} == {*TONIGHT}
    assert rows[0]["answered_by"] == "classifier on demo" and rows[0]["response"] == "long"
    assert [share.asked for share in report.cascade] == [15, 15]
    assert [share.answered for share in report.cascade] == [12, 3]
    assert report.notes[0].endswith(", and demo was asked about 3, and about 12 more to check")
    low, high = interval(11, 12)
    assert report.notes[1] == (
        "checked: demo gave 11 of 12 rows the answer of classifier on demo: 91.7% "
        f"({low:.1%} to {high:.1%}), 95 % interval"
    )
    assert (report.cascade[0].checked, report.cascade[0].agreed) == (12, 11)
    assert cascade_text(report) == (
        "12 by classifier on demo, 3 by demo; "
        f"they agree on 91.7% ({low:.1%} to {high:.1%}) of the checked rows"
    )
    (page,) = history_of(str(nights.folder / "out"), job="nightly")
    tonight = history_rows(page)[0]
    assert tonight["agreement"] == f"91.7% ({low:.1%} to {high:.1%})" and "judged" not in tonight


def test_checked_rows_that_the_larger_model_failed_are_counted_apart(nights):
    first, second = [text for text in TONIGHT if nights.sure_of(text)][:2]
    nights.refuses = lambda prompt: "You sort" in prompt and words(prompt) in (first, second)
    report = nights.night("n2", nights.cascade(output={"escalate": {**ESCALATE, "check": 100}}))
    share = report.cascade[0]
    assert (share.checked, share.agreed, share.unanswered) == (10, 10, 2)
    failed = "; 2 checked rows got no answer of the larger model"
    assert report.notes[1].endswith(f"95 % interval{failed}")
    assert cascade_text(report).endswith(f" of the checked rows{failed}")
    assert report.good == len(TONIGHT), "they keep the classifier's answer"
    nights.refuses = lambda prompt: "You sort" in prompt
    report = nights.night("n3", nights.cascade(output={"escalate": {**ESCALATE, "check": 100}}))
    assert (report.cascade[0].checked, report.cascade[0].unanswered) == (0, 12)
    assert report.notes[1] == "12 checked rows got no answer of the larger model"
    assert report.cascade[0].agreement() == ""


def test_the_plan_names_the_classifier_and_says_how_many_rows_are_checked(nights, monkeypatch):
    told = io.StringIO()
    monkeypatch.setattr(show, "out", Console(file=told, width=200))
    show.show_plan(dry_run(nights.cascade(output={"escalate": {**ESCALATE, "check": 9}})))
    first, larger = told.getvalue().split("Larger model")
    assert f"classifier         {nights.file}" in first and "classifier  " not in larger
    assert larger.startswith(", which answers at most 15 rows, and checks up to 9 of the others:")


def test_the_sample_is_the_same_after_a_kill_and_another_in_another_run(nights):
    job = nights.cascade(output={"escalate": {**ESCALATE, "check": 4}})

    def checked() -> set[str]:
        found = {words(text) for text in nights.asked if "You sort" in text} - {*BORDER}
        nights.asked.clear()
        return found

    nights.night("whole", job)
    first = checked()
    nights.stop_after = 5
    with pytest.raises(Killed):
        nights.night("n2", job)
    nights.stop_after = None
    report = nights.night("n2", job)
    again = checked()
    assert len(first) == len(again) == 4 and first != again
    assert whole(nights, "n2", report) == nights.result("whole")
    assert report.notes[1].startswith("checked: demo gave 4 of 4 rows")


def test_a_resumed_run_checks_the_rows_of_its_plan(nights):
    """Rows committed before a change are not checked, so the sample would not be random."""
    nights.stop_after = 5
    with pytest.raises(Killed):
        nights.night("n2", nights.cascade())
    nights.stop_after = None
    more = nights.cascade(output={"escalate": {**ESCALATE, "check": 100}})
    report = nights.night("n2", more)
    assert {words(text) for text in nights.asked if "You sort" in text} == {*BORDER}
    assert not any(note.startswith("checked:") for note in report.notes)


def test_the_fields_that_distill_shows_make_a_job_that_runs(tmp_path):
    nights = trained_in(tmp_path)
    fields = cascade_fields(*nights.distill(**{"engine.max_model_len": 60}), str(nights.file))
    assert fields["engine"] == {
        "model": "demo",
        "max_model_len": 60,
        "classifier": str(nights.file),
    }
    assert fields["output"]["escalate"]["to"] == {"model": "demo"}
    nights.write(*TONIGHT)
    report = nights.night("n2", nights.cascade(**fields))
    assert sum(share.answered for share in report.cascade) == len(whole(nights, "n2", report))


def test_fields_for_a_model_whose_url_hides_a_token_leave_out_the_url(tmp_path):
    """The plan has `...` in its place, which would reach nothing or another model."""
    nights = trained_in(tmp_path)
    prepared, found = nights.distill()
    job = dict(prepared.member.plan.job)
    for url, kept in (("https://h/token/.../v1", {}), ("https://h/v1", {"url": "https://h/v1"})):
        job["engine"] = {"endpoint": {"url": url, "model": "m"}}
        member = replace(prepared.member, plan=replace(prepared.member.plan, job=job))
        fields = cascade_fields(replace(prepared, member=member), found, str(nights.file))
        assert fields["output"]["escalate"]["to"] == {"endpoint": {**kept, "model": "m"}}


def test_no_fields_are_shown_for_other_texts_than_the_runs(tmp_path):
    nights = trained_in(tmp_path)
    made = nights.distill(**{"prompt.template": "query: {text}"})
    with pytest.raises(ConfigError, match=r"other texts.*--set prompt\.template"):
        cascade_fields(*made, "c.json")


def test_tune_finds_the_threshold_on_rows_of_tonight(nights, monkeypatch):
    nights.write(*(f"v{n} {LONG if n % 2 else 'y'}" for n in range(40)), *BORDER)
    monkeypatch.setattr(tuning, "infer_in_place", lambda job, keys, run, *_: nights.infer(job, run))
    found = tuning.tune_cascade(nights.cascade(), 0.9)
    assert found.field == "output.escalate.when.probability_below"
    assert found.rows == 43 and found.found is not None and found.same >= 40


def test_tune_sends_the_job_of_a_block_without_its_keys(nights, s3, monkeypatch):
    output = {"uri": "s3://serving/tuned", "credentials_block": "aws-credentials/mine"}
    plain = nights.cascade(output=output)
    sent = []

    def infer(job, keys, run, *_):
        sent.append(submission_of(job, keys, "http://prefect/api"))
        nights.infer(keys, run)

    monkeypatch.setattr(tuning, "infer_in_place", infer)
    nights.write(*(f"v{n} {LONG if n % 2 else 'y'}" for n in range(40)), *BORDER)
    tuning.tune_cascade(with_store_options(plain, {}, s3.options), 0.9, Sender(plain))
    assert len(sent) == 2
    assert s3.options["secret"] not in str([(one.job, one.env) for one in sent])
