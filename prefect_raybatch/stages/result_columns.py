"""The names and types of a result's columns, as far as they can be known before a run."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from prefect_raybatch.job.answer_types import columns_of
from prefect_raybatch.job.escalate import ANSWERED_BY
from prefect_raybatch.job.images import DIGESTS_COLUMN
from prefect_raybatch.job.output import LOGPROBS, PROBABILITIES
from prefect_raybatch.job.tasks import TaskName, pools, probabilities
from prefect_raybatch.spec.request import SamplingSpec
from prefect_raybatch.spec.result import FinishSpec
from prefect_raybatch.stages.answer_logprobs import logprobs_type
from prefect_raybatch.stages.columns import DIGESTS_TYPE, PROBABILITIES_TYPE

LATER = "type fixed by the first shard"
CALLS = "list<item: struct<id: string, name: string, arguments: string>>"


def answer_columns(column: str, task: TaskName) -> list[str]:
    """Return the names of a pooling task's answer columns; the first one is `column`.

    Task classify has a second column for probabilities.
    """
    return [column, probabilities(column)] if task == "classify" else [column]


def result_columns(
    output: FinishSpec, sampling: SamplingSpec, task: TaskName
) -> tuple[tuple[str, str], ...]:
    """Return (name, type as text) of each result column that is not from the input.

    If the types of a postprocess function's columns are not declared, a single entry stands for all
    of these columns.
    """
    answers, made = sampling.answers, named_answers(output, sampling, task)
    made += [(name, str(extra_type(name, answers))) for name in output.extras]
    if output.probabilities:
        made.append((PROBABILITIES, str(PROBABILITIES_TYPE)))
    if sampling.logprobs is not None:
        made.append((LOGPROBS, str(logprobs_type(sampling.logprobs, answers))))
    if output.answered_by:
        made.append((ANSWERED_BY, "string"))
    return (*made, (output.row_number, "int64"))


def named_answers(
    output: FinishSpec, sampling: SamplingSpec, task: TaskName
) -> list[tuple[str, str]]:
    """Return (name, type as text) of the answer's columns, thinking and tool calls included."""
    answers = sampling.answers
    if output.postprocess is not None:
        given = (output.types or {}).items()
        made = [(name, kind) for name, kind in given]
        made = made or [(f"what {output.postprocess} returns", LATER)]
    elif output.classifier is not None:
        made = [(output.column, "string")]
    elif pools(task):
        made = _pooled(output.column, task, output.vector_type)
    elif output.schema is not None:
        made = _typed(output.schema)
        if answers > 1:
            record = ", ".join(f"{name}: {kind}" for name, kind in made)
            made = [(output.column, f"list<item: struct<{record}>>")]
    else:
        made = [(output.column, "list<item: string>" if answers > 1 else "string")]
    if output.postprocess is None and output.parsing is not None:
        kinds = {"output.reasoning_column": "string", "output.tool_calls_column": CALLS}
        for field, name in output.parsing.columns.items():
            made.append((name, f"list<item: {kinds[field]}>" if answers > 1 else kinds[field]))
    return made


def result_types(
    output: FinishSpec, sampling: SamplingSpec, task: TaskName, input_schema: pa.Schema
) -> tuple[pa.Schema, bool]:
    """Return (result columns whose types are known before a run, whether these are all of them).

    Kept input columns are included; `input_schema` has their types.
    """
    answers, known = sampling.answers, True
    fields = [
        input_schema.field(name)
        for name in output.kept(input_schema.names)
        if name in input_schema.names
    ]
    text = pa.list_(pa.string()) if answers > 1 else pa.string()
    if output.postprocess is not None:
        fields += list(declared_schema(output.types or {}))
        known = output.types is not None
    elif output.schema is not None:
        properties = [shape.field(name) for name, shape in columns_of(output.schema).items()]
        record = pa.list_(pa.struct(properties))
        fields += [pa.field(output.column, record)] if answers > 1 else properties
    elif output.classifier is not None:
        fields.append(pa.field(output.column, text))
    elif task == "embed":
        number = pa.float16() if output.vector_type == "float16" else pa.float32()
        fields.append(pa.field(output.column, pa.list_(number)))
    elif task == "generate":
        fields.append(pa.field(output.column, text))
    else:
        known = False
    parsed = output.postprocess is None and output.parsing is not None
    if parsed or sampling.logprobs is not None:
        known = False
    fields += [pa.field(name, extra_type(name, answers)) for name in output.extras]
    if output.probabilities:
        fields.append(pa.field(PROBABILITIES, PROBABILITIES_TYPE))
    if output.answered_by:
        fields.append(pa.field(ANSWERED_BY, pa.string()))
    return pa.schema([*fields, (output.row_number, pa.int64())]), known


def declared_schema(schema: Mapping[str, str]) -> pa.Schema:
    """Return `output.schema` ({column: name of its type}) as an Arrow schema.

    Raises ValueError for an unknown type.
    """
    fields = []
    for name, kind in schema.items():
        if kind.startswith("list<") and kind.endswith(">"):
            fields.append((name, pa.list_(pa.type_for_alias(kind[5:-1]))))
        else:
            fields.append((name, pa.type_for_alias(kind)))
    return pa.schema(fields)


def _typed(form: str) -> list[tuple[str, str]]:
    """Return (name, type as text) of the column for each property of `form`, a JSON Schema."""
    made = []
    for name, shape in columns_of(form).items():
        null = "" if shape.nullable else " not null"
        texts = "; ".join(f"{place} as JSON text, since {why}" for place, why in shape.texts(name))
        made.append((name, f"{shape.type()}{null}{f' ({texts})' if texts else ''}"))
    return made


def _pooled(column: str, task: TaskName, vector_type: str) -> list[tuple[str, str]]:
    """Return (name, type as text) of the answer columns of a pooling task.

    Vector sizes and labels depend on the model and are left out.
    """
    kinds = {
        "embed": [f"fixed_size_list<item: {vector_type}>"],
        "classify": ["string", "struct with the probability of each label, float32"],
        "score": ["float32"],
    }
    return list(zip(answer_columns(column, task), kinds[task], strict=True))


def extra_type(name: str, answers: int) -> pa.DataType:
    """Return the type of the column `name`, one of `output.extras`.

    With several `answers` per row it is a list, except for `prompt_tokens`. For image digests it is
    always a list, with an entry for each image.
    """
    if name == DIGESTS_COLUMN:
        return DIGESTS_TYPE
    kind = pa.string() if name == "finish_reason" else pa.int64()
    return pa.list_(kind) if answers > 1 and name != "prompt_tokens" else kind
