"""Which columns a result has beside those of its input, and of which types, told before a run."""

from __future__ import annotations

import pyarrow as pa

from prefect_raybatch.job import tasks
from prefect_raybatch.job.answer_types import columns_of
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.images import DIGESTS_COLUMN
from prefect_raybatch.job.output import LOGPROBS, PROBABILITIES
from prefect_raybatch.job.sampling import Sampling
from prefect_raybatch.stages.answer_logprobs import logprobs_type, most_told
from prefect_raybatch.stages.block import DIGESTS_TYPE, PROBABILITIES_TYPE

LATER = "type fixed by the first shard"
CALLS = "list<item: struct<id: string, name: string, arguments: string>>"


def answers_of(sampling: Sampling) -> int:
    """How many answers a row has (n)."""
    return int((sampling.model_extra or {}).get("n") or 1)


def result_columns(job: BatchJob) -> tuple[tuple[str, str], ...]:
    """(name, type in words) of each column that is not the input's."""
    output, answers = job.output, answers_of(job.sampling)
    if output.postprocess is not None:
        given = (output.output_schema or {}).items()
        made = [(name, kind) for name, kind in given]
        made = made or [(f"what {output.postprocess} returns", LATER)]
    elif tasks.pools(job.engine.task):
        made = _pooled(job)
    elif (form := output.answer_form) is not None:
        made = _typed(form)
        if answers > 1:
            record = ", ".join(f"{name}: {kind}" for name, kind in made)
            made = [(output.column, f"list<item: struct<{record}>>")]
    else:
        made = [(output.column, "list<item: string>" if answers > 1 else "string")]
    if output.postprocess is None:
        kinds = {"output.reasoning_column": "string", "output.tool_calls_column": CALLS}
        for field, name in output.parsed_columns.items():
            made.append((name, f"list<item: {kinds[field]}>" if answers > 1 else kinds[field]))
    made += [(name, str(extra_type(name, answers))) for name in output.extras]
    if output.probabilities:
        made.append((PROBABILITIES, str(PROBABILITIES_TYPE)))
    if (most := most_told(job.sampling)) is not None:
        made.append((LOGPROBS, str(logprobs_type(most, answers))))
    return (*made, (output.row_number, "int64"))


def result_types(job: BatchJob, given: pa.Schema) -> tuple[pa.Schema, bool]:
    """(the result's columns whose types are known before a run, whether these are all); `given` are
    the input's."""
    output, answers, known = job.output, answers_of(job.sampling), True
    fields = [given.field(name) for name in job.kept(given.names) if name in given.names]
    text = pa.list_(pa.string()) if answers > 1 else pa.string()
    if output.postprocess is not None:
        fields += list(declared_schema(output.output_schema or {}))
        known = output.output_schema is not None
    elif (form := output.answer_form) is not None:
        fields += [shape.field(name) for name, shape in columns_of(form).items()]
    elif job.engine.task == "embed":
        number = pa.float16() if output.vector_type == "float16" else pa.float32()
        fields.append(pa.field(output.column, pa.list_(number)))
    elif job.engine.task == "generate":
        fields.append(pa.field(output.column, text))
    else:
        known = False
    if (output.postprocess is None and output.parsed_columns) or most_told(
        job.sampling
    ) is not None:
        known = False
    fields += [pa.field(name, extra_type(name, answers)) for name in output.extras]
    if output.probabilities:
        fields.append(pa.field(PROBABILITIES, PROBABILITIES_TYPE))
    return pa.schema([*fields, (output.row_number, pa.int64())]), known


def declared_schema(schema: dict[str, str]) -> pa.Schema:
    """`output.schema` as an Arrow schema; ValueError names the type that Arrow does not know."""
    fields = []
    for name, kind in schema.items():
        if kind.startswith("list<") and kind.endswith(">"):
            fields.append((name, pa.list_(pa.type_for_alias(kind[5:-1]))))
        else:
            fields.append((name, pa.type_for_alias(kind)))
    return pa.schema(fields)


def _typed(form: str) -> list[tuple[str, str]]:
    """Of the properties of a JSON Schema."""
    made = []
    for name, shape in columns_of(form).items():
        null = "" if shape.nullable else " not null"
        texts = "; ".join(f"{place} as JSON text, since {why}" for place, why in shape.texts(name))
        made.append((name, f"{shape.type()}{null}{f' ({texts})' if texts else ''}"))
    return made


def _pooled(job: BatchJob) -> list[tuple[str, str]]:
    """Of a task that pools; sizes and labels are the model's."""
    kinds = {
        "embed": [f"fixed_size_list<item: {job.output.vector_type}>"],
        "classify": ["string", "struct with the probability of each label, float32"],
        "score": ["float32"],
    }
    return list(zip(tasks.added_columns(job), kinds[job.engine.task], strict=True))


def extra_type(name: str, answers: int) -> pa.DataType:
    """The type of a column that tells about the answers."""
    if name == DIGESTS_COLUMN:
        return DIGESTS_TYPE
    kind = pa.string() if name == "finish_reason" else pa.int64()
    return pa.list_(kind) if answers > 1 and name != "prompt_tokens" else kind
