"""Compiles what the sizes of a run depend on from its job."""

from __future__ import annotations

from collections.abc import Mapping

from prefect_raybatch.job.answer_schema import BACKEND
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.early_stop import (
    choice_of,
    label_cap,
    labels_cut_short,
    may_ask_rest,
    may_stop_early,
)
from prefect_raybatch.job.precision import without_tries
from prefect_raybatch.job.tasks import pools
from prefect_raybatch.spec.sizes import Grammar, RowSpec, SizeSpec

# Expected length of an answer under a grammar, which ends by itself, as a fraction of max_tokens:
# 43 to 72 of 96 tokens were measured (record-15b.jsonl, record-8b.jsonl).
ENDS_AT = 0.6
FIRST_AND_REST = 2  # tokens of an answer whose first one is asked for: few leave several labels


def size_spec(job: BatchJob) -> SizeSpec:
    """Return what a job says about sizes.

    A context length of `auto` counts as the model's own until it is measured.
    """
    engine, replicas = job.engine, job.engine.replicas
    if isinstance(replicas, int):
        replicas = [replicas, replicas]
    return SizeSpec(
        model=engine.model,
        device=engine.device,
        replicas=None if replicas == "auto" else (replicas[0], replicas[1]),
        tensor=engine.tensor_parallel_size,
        pipeline=engine.pipeline_parallel_size,
        engines_per_gpu=None if engine.engines_per_gpu == "auto" else engine.engines_per_gpu,
        max_num_seqs=None if engine.max_num_seqs == "auto" else engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_concurrent_batches=engine.max_concurrent_batches,
        rows_per_shard=job.source.rows_per_shard,
        batch_size=engine.batch_size,
        context=engine.context,
        accelerator=engine.accelerator_type,
        spans_nodes=engine.spans_nodes,
        pools=pools(engine.task),
        cpus=engine.num_cpus,
        stage_cpus=job.cluster.prepare.num_cpus + job.cluster.finish.num_cpus,
        given=without_tries(engine),
        row=row_spec(job),
    )


def row_spec(job: BatchJob) -> RowSpec:
    prompt, fields = job.prompt, job.drawn.given()
    begin, _, rest = (prompt.template or "").partition("{")
    out, why = _most_out(job)
    return RowSpec(
        shared_characters=len(prompt.system or "") + len(begin),
        own_characters=len(rest),
        images=prompt.images.used,
        caches=job.engine.given.get("enable_prefix_caching") is not False,
        form=grammar_of(job),
        text=bool(fields.get("stop") or fields.get("detokenize")),
        out=out,
        out_why=why,
        expected=ENDS_AT * out if grammar_of(job) and not choice_of(fields) else 0.0,
    )


def grammar_of(job: BatchJob) -> Grammar:
    """Return the backend of the grammar that holds the job's answers, "" without one."""
    fields = job.drawn.given()
    typed = job.output.schema_model is not None
    if not (typed or fields.get("choice") or fields.get("structured_outputs")):
        return ""
    given = job.engine.given.get("structured_outputs_config")
    backend = given.get("backend") if isinstance(given, Mapping) else None
    return "guidance" if (backend or (BACKEND if typed else "")) == "guidance" else "xgrammar"


def answers_of(job: BatchJob) -> int:
    """Return the number of answers to a row."""
    return int(job.drawn.given().get("n") or 1)


def _most_out(job: BatchJob) -> tuple[int, str]:
    """Return the most tokens that a row's answers take, and the reason.

    A prompt.function may ask for more or fewer in `sampling`, which is not known before it runs.
    """
    if pools(job.engine.task):
        return 1, "the task draws no tokens"
    sampling, fields, answers = job.drawn, job.drawn.given(), answers_of(job)
    labels = choice_of(fields)
    if labels:
        # Tokens of one character are rare, so that half as many as characters is a safe bound.
        longest = max(len(str(label)) for label in labels) // 2 + 1
        return _most_of_label(job, min(sampling.max_tokens, longest), answers)
    return sampling.max_tokens * answers, "sampling.max_tokens"


def _most_of_label(job: BatchJob, longest: int, answers: int) -> tuple[int, str]:
    fields, early = job.drawn.given(), job.engine.early_stop
    if job.output.parsed_columns or not may_stop_early(job.engine.given):
        early = "off"
    labels = labels_cut_short(fields) if early != "off" else None
    cap = label_cap(labels) if labels else longest
    if early == "first_token" and may_ask_rest(fields) and min(cap, longest) > FIRST_AND_REST:
        return FIRST_AND_REST, "the first token of a choice, and what it leaves open"
    if cap < longest:
        return cap * answers, "what decides between the choices"
    return longest * answers, "the longest choice"
