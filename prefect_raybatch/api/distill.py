"""Trains a classifier on a finished run: embeds a sample of its rows, and learns its answers."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from prefect_raybatch.api import finalize_run, plan_run
from prefect_raybatch.api.diff import ROWS_FILE
from prefect_raybatch.compare.sample import DrawnRows, check_kept, draw
from prefect_raybatch.compile.job import compile_plan, planned_job, public_job
from prefect_raybatch.compile.resolved import Resolved, resolve
from prefect_raybatch.distill.classifier import Measured, Training, check_can_train
from prefect_raybatch.distill.measure import (
    Distilled,
    EmbeddedRows,
    check_agreement,
    check_rows,
    check_texts,
    distill,
)
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.edits import job_of_fields, larger_of
from prefect_raybatch.job.escalate import LARGER, check_second_engine
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.job.secrets import ELLIPSIS
from prefect_raybatch.job.trusted_places import check_run_place
from prefect_raybatch.ledger.family import Member, locate_run
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.runs.finalize_run import load_report
from prefect_raybatch.runs.publish_run import finished_member
from prefect_raybatch.runs.run import Run
from prefect_raybatch.storage import join, open_store
from prefect_raybatch.words import counted

DISTILL_FOLDER = "_distill"  # beside the run; no run key begins with an underscore
SETTABLE = ("engine.", "cluster.", "limits.", "prompt.template")
# Fields that the larger model's engine does not get: `order` changes no answer, and the percentile
# is used only with max_model_len: auto, which a second engine cannot have.
NOT_OF_LARGER = ("order", "max_model_len_percentile")
ROWS_TO_CHECK = 200  # output.escalate.check in the job that is shown
NOT_SETTABLE = ("engine.model.", "engine.task.", "engine.endpoint.")


@dataclass(frozen=True)
class Embedding:
    """A sample of a finished run's rows, and the job that computes their embeddings.

    `member` is the run. `asked` is the job that computes the embeddings; it works in the folder
    `place` beside the run. The embeddings train a classifier for a cascade, which answers the rows
    that it is sure of and leaves the others to the run's model. `agreement` is the share of the
    run's answers that the cascade must keep. `tested` is how many rows of the sample will test the
    classifier. `problem` says why the run's job with a classifier added would be invalid; "" if it
    would be valid.
    """

    asked: Resolved
    place: str
    sample: DrawnRows
    member: Member
    agreement: float
    tested: int
    problem: str = ""

    @property
    def line(self) -> str:
        """Return a line of text: how many rows of the run will be embedded, and by which model."""
        return (
            f"embeds {len(self.sample.numbers):,} of {counted(self.sample.total, 'row')} of "
            f"{self.member.key} with {self.asked.job.engine.model}"
        )


def prepare_distill(
    run_dir: str,
    encoder: str,
    agreement: float,
    rows: int,
    changes: Mapping[str, object] | None = None,
) -> Embedding:
    """Choose rows of a run and resolve the job that embeds them; write nothing, start nothing.

    `encoder` is the model that embeds, `changes` are fields of that job as {field: value}.
    `agreement` is the share of the run's answers that a cascade with the classifier must keep. Only
    prompt and labels are taken from the run, so that no run directory decides where rows are sent.

    Raises `IncompleteRun` for an unfinished run, and `ConfigError` if there are too few rows, for
    fields that cannot be set, for a run without labels or prompt.template, and for one with several
    models, images, output.postprocess or sampling.n.
    """
    check_agreement(agreement)
    for name in changes or ():
        if not name.startswith(SETTABLE) or f"{name}.".startswith(NOT_SETTABLE):
            raise ConfigError(
                f"--set {name}: only single fields of engine, cluster and limits, and "
                "prompt.template, can be set here. --encoder names the model, which runs in vLLM"
            )
    check_run_place(run_dir)
    root, key = locate_run(run_dir)
    member = finished_member(open_store(join(root.uri, key)))
    job = planned_job(member.plan)
    if job.output.escalate.engine is not None or job.engine.classifier is not None:
        raise ConfigError(
            f"{run_dir}: its job sets output.escalate or engine.classifier, so a classifier would "
            "be trained on, and tested against, answers of another small model. Name a run that "
            "the larger model alone answered"
        )
    if not job.sampling.choice:
        raise ConfigError(
            f"{run_dir} has no labels to learn: its job does not set sampling.choice. Name a run "
            "that chooses among labels"
        )
    if job.prompt.template is None or job.prompt.images.used:
        raise ConfigError(
            f"{run_dir}: only prompts of prompt.template without images can be embedded"
        )
    if job.output.postprocess is not None or (job.sampling.extra.get("n") or 1) > 1:
        raise ConfigError(
            f"{run_dir}: its job sets output.postprocess or sampling.n, so its result may not hold "
            "one label a row. Name a run without them"
        )
    report = load_report(member.ledger.store)
    check_rows(min(rows, report.rows), agreement)
    sample = draw(report, member.plan, None, rows)
    folder = hashlib.sha256(f"{member.plan.hash}\n{rows}".encode()).hexdigest()[:16]
    at = join(root.uri, f"{DISTILL_FOLDER}/{folder}")
    fields = _embedding_fields(job.prompt, encoder, at)
    asked = resolve(job_of_fields(fields, changes or {}, "the job that embeds"))
    check_kept(sample, asked.job.prompt.columns, report.run)
    answers = _answers(sample, compile_plan(member.plan).finish.column)
    check_can_train(answers)
    tested = check_texts(_texts(sample, asked), answers, agreement, split_seed(member.plan))
    return Embedding(asked, at, sample, member, agreement, tested, _problem(member, asked))


def _embedding_fields(prompt: Prompt, encoder: str, at: str) -> dict[str, Any]:
    """Return the job fields for embedding a sample, stored in folder `at`, with model `encoder`.

    `prompt` is the sampled run's prompt, whose template makes the texts to embed.
    """
    return {
        "name": "distill",
        "source": {"uri": join(at, ROWS_FILE)},
        "prompt": {
            "template": prompt.template,
            "on_null": prompt.on_null,
            "special_tokens_in_rows": prompt.special_tokens_in_rows,
        },
        "engine": {"model": encoder, "task": "embed"},
        "output": {"uri": join(at, "runs"), "columns": []},
        "limits": {"max_failed_fraction": 1.0},  # such rows are left to the model
    }


def begin_distill(prepared: Embedding) -> Run:
    """Write the sampled rows; plan the run that embeds them, or adopt the existing one."""
    store = open_store(prepared.place)
    store.put_if_absent(ROWS_FILE, prepared.sample.to_parquet())
    return plan_run(prepared.asked, prepared.asked.identity.fingerprint[:16])


def finish_distill(prepared: Embedding, run: Run) -> Distilled:
    """Finalize `run`, which embedded the sample; train a classifier on half of the sample.

    Test the classifier on the other half. Return it with the outcome: the share of texts that it
    can answer itself while at least the share `prepared.agreement` of the sampled run's answers
    stays the same.
    """
    job, sample, plan = prepared.asked.job, prepared.sample, prepared.member.plan
    table = finalize_run(job, run).to_arrow()
    embedding = finished_member(open_store(run.uri))
    embedded, success = embedding.plan, embedding.summary
    finish = compile_plan(embedded).finish
    column = compile_plan(plan).finish.column
    texts, answers = _texts(sample, prepared.asked), _answers(sample, column)
    numbers = table[finish.row_number].to_numpy()
    rows = EmbeddedRows(texts, answers, _vectors(table[finish.column], numbers, len(texts)))
    training = Training.of(
        job.engine.model,
        str(embedded.model["identity"]),
        planned_job(plan).sampling.choice or (),
        prepared.asked.identity.parts,
    )
    found = distill(prepared.member.key, rows, prepared.agreement, split_seed(plan), training)
    trained = 0.0 if success is None else success.finished
    measured = Measured(found.run, trained, found.learned, found.tested, found.same)
    return replace(found, classifier=replace(found.classifier, measured=measured))


def cascade_fields(prepared: Embedding, distilled: Distilled, file: str) -> dict[str, Any]:
    """Return the job fields of a cascade: the classifier in `file`, then the run's model.

    Keys and other possible secrets are left out, also a URL that contains one. Raises `ConfigError`
    if no job can use the classifier. That is so if it can answer no text, if it was trained on
    texts of another template than the run's, or if the run's model cannot be the larger model of a
    cascade.
    """
    if distilled.found is None or not distilled.answered:
        raise ConfigError("the classifier could answer no text. Lower --agreement")
    identity = distilled.classifier.training.identity
    fields = _fields(prepared.member, prepared.asked, file, distilled.found.below)
    if "@" in identity:
        fields["engine"]["revision"] = identity.rpartition("@")[2]
    endpoint = fields["output"]["escalate"]["to"].get("endpoint", {})
    if ELLIPSIS in endpoint.get("url", ""):  # not the whole URL: the job must name it
        del endpoint["url"]
    return fields


def _problem(member: Member, asked: Resolved) -> str:
    """Return why the run's job would be invalid with a classifier added; "" if it would be valid.

    `asked` is the job that embeds the rows.
    """
    value = planned_job(member.plan).to_dict()
    try:
        fields = _fields(member, asked, "classifier.json", 0.5)
        output = {**value["output"], **fields["output"]}
        where = f"the job of {member.key} with a classifier"
        job_of_fields({**value, "engine": fields["engine"], "output": output}, {}, where)
    except ConfigError as error:
        return str(error)
    return ""


def _fields(member: Member, asked: Resolved, file: str, below: float) -> dict[str, Any]:
    """Return the job fields of a cascade: the classifier in `file`, then the run's model.

    The run's model answers rows for which the classifier's probability is under `below`. `asked` is
    the job that embedded the rows. Raises `ConfigError` if its template is not the run's, or if the
    run's model cannot be the larger model.
    """
    job, embeds = planned_job(member.plan), asked.job
    if embeds.prompt.template != job.prompt.template:
        raise ConfigError(
            "no cascade can use the classifier, because it learned other texts than those that "
            "the run's model gets. Leave out --set prompt.template"
        )
    engine = {"model": embeds.engine.model, **public_job(embeds)["engine"], "classifier": file}
    del engine["task"]
    larger = public_job(larger_of(job)).get("engine", {})
    if "endpoint" not in larger:
        larger = {"model": larger_of(job).engine.model, **larger}
    larger = {name: value for name, value in larger.items() if name not in NOT_OF_LARGER}
    try:
        check_second_engine(larger, LARGER)
    except ValueError as error:
        raise ConfigError(f"no cascade can use the run's model as it is: engine.{error}") from None
    when = {"probability_below": below}
    return {
        "engine": engine,
        "output": {"escalate": {"to": larger, "when": when, "check": ROWS_TO_CHECK}},
    }


def _answers(sample: DrawnRows, column: str) -> list[str | None]:
    """Return the label of each sampled row, from `column`; None for a row that failed."""
    return [None if answer is None else answer[column] for answer in sample.answers]


def _texts(sample: DrawnRows, asked: Resolved) -> list[Hashable]:
    """Return a tuple for each sampled row: its values, as text, in the columns of the prompt."""
    columns = list(asked.job.prompt.columns)
    return [tuple(map(str, row.values())) for row in sample.inputs.select(columns).to_pylist()]


def split_seed(plan: Plan) -> int:
    """Return the seed that splits the rows for training and test, the same for the same plan."""
    return int(plan.hash[:15], 16)


def _vectors(column: pa.ChunkedArray, numbers: np.ndarray, rows: int) -> np.ndarray:
    """Return the embeddings as float32[rows, dimension]; rows without one are NaN.

    `column` has the embeddings, and `numbers` the row of each. Raises `ConfigError` if `column` is
    empty.
    """
    if not len(numbers):
        raise ConfigError(
            "the encoder embedded no row. The report of its run says why: see _distill beside the "
            "run"
        )
    found = column.combine_chunks()
    size = found.type.list_size
    vectors = np.full((rows, size), np.nan, np.float32)
    vectors[numbers] = found.flatten().to_numpy(zero_copy_only=False).reshape(-1, size)
    return vectors
