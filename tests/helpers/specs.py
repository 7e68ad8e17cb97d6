"""Specs, stages and plans of jobs in a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from prefect_raybatch.compile.job import (
    compile_job,
    compile_judge,
    finish_spec,
    model_request,
    prompt_spec,
    public_job,
    read_spec,
    sampling_spec,
)
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.images import Images
from prefect_raybatch.job.output import Output
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.job.source import Source
from prefect_raybatch.ledger.records import InputFile, Plan
from prefect_raybatch.model import chat_template
from prefect_raybatch.plan.plan import check_against_schema, make_plan
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.spec.request import ImageSpec, PromptSpec, SamplingSpec
from prefect_raybatch.spec.result import ParsingSpec
from prefect_raybatch.stages.finish import Finish
from prefect_raybatch.stages.prepare import Prepare
from prefect_raybatch.stages.vectors import finish_of
from prefect_raybatch.storage import Store

PLAIN = BatchJob.from_dict(
    {
        "name": "nightly",
        "source": {"uri": "data/in.parquet"},
        "prompt": {"template": "What is {Company}?"},
        "output": {"uri": "out"},
    }
)


def prompt_of(prompt: Prompt) -> PromptSpec:
    return prompt_spec(PLAIN.model_copy(update={"prompt": prompt}))


def images_of(images: Images) -> ImageSpec:
    spec = prompt_of(PLAIN.prompt.model_copy(update={"images": images})).images
    assert spec is not None
    return spec


def sampling_of(**fields: Any) -> SamplingSpec:
    """How answers are drawn, as a job without fields of its own says it, with these changed."""
    return replace(sampling_spec(PLAIN), **fields)


def prepare_stage(
    prompt: Prompt,
    model: dict[str, Any],
    limit: int | None,
    most: int = 1,
    *,
    kind: type[Prepare] = Prepare,
    sampling: Mapping[str, Any] | None = None,
    fixed_form: str | None = None,
    **more: Any,
) -> Prepare:
    """The prepare stage of a prompt. `limit` is the context length in tokens, `most` the most
    tokens of an answer, `sampling` the fields that the job sets."""
    drawn = sampling_of(fields=sampling or {}, max_tokens=most, fixed_form=fixed_form)
    return kind(prompt_of(prompt), drawn, model, limit, **more)


def finish_stage(
    output: Output,
    model: dict[str, Any],
    store: Store,
    attempt: str,
    *,
    task: Any = None,
    parsing: ParsingSpec | None = None,
    calls: Any = None,
    **sampling: Any,
) -> Finish:
    """The finish stage of an output; `sampling` are fields of `SamplingSpec`."""
    spec = finish_spec(PLAIN.model_copy(update={"output": output}))
    more = {} if calls is None else {"calls": calls}
    spec, drawn = replace(spec, parsing=parsing), sampling_of(**sampling)
    return finish_of(task, spec, drawn, model, store, attempt, **more)


def new_plan_of(
    resolved: Resolved,
    run_key: str,
    files: Sequence[InputFile],
    schema: pa.Schema,
    *args: Any,
    **more: Any,
) -> tuple[Plan, dict[str, bytes]]:
    """The plan of a new run of a resolved job, and its tables."""
    spec = compile_job(resolved.job, schema.names)
    job = public_job(resolved.job, spec.finish)
    model = resolved.with_adapters()
    return make_plan(spec, resolved.identity, model, job, run_key, files, schema, *args, **more)


def check_columns(job: BatchJob, schema: pa.Schema) -> None:
    """Raise `ConfigError` where a job does not fit an input with that schema."""
    check_against_schema(compile_job(job, schema.names), schema, compile_judge(job))


def reads(**fields: Any) -> ReadSpec:
    """What to read, by the fields of `source` in a job."""
    return read_spec(Source(**fields))


def check_template_of(job: BatchJob, model: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where a chat template cannot follow what a job asks for."""
    chat_template.check_template(prompt_spec(job), model_request(job.engine), model)
