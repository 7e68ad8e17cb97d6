"""Jobs whose input is an OpenAI batch file: the job fields that it sets, and those it excludes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from prefect_raybatch.job.limits import FAILED_LIMITS, Limits

if TYPE_CHECKING:
    from prefect_raybatch.job.output import Output
    from prefect_raybatch.job.sampling import Sampling
    from prefect_raybatch.job.source import Source

BATCH_FORMAT = "openai_batch"
CHAT_REQUEST = "prefect_raybatch.batches.requests:chat_request"
EMBEDDING_REQUEST = "prefect_raybatch.batches.requests:embedding_request"
COMPLETION_REQUEST = "prefect_raybatch.batches.requests:completion_request"
TEXT_REQUEST = "prefect_raybatch.batches.requests:text_request"  # a chat or a completion
REQUEST_FUNCTIONS = (CHAT_REQUEST, EMBEDDING_REQUEST, COMPLETION_REQUEST, TEXT_REQUEST)
# Version of the requests that these functions make; raise it if they change. It counts in the
# fingerprint in place of their source, so that a new release continues a run.
REQUEST_FORM = "1"
HOSTED_TOKENS = 1024  # max_tokens of requests that set none: a rate limiter must reserve some
KEPT_COLUMNS = ("custom_id", "body")  # input columns from which output.jsonl is written
NO_LIMIT = {"max_failed_fraction": 1.0}  # failed requests have a line in error.jsonl each
ANSWER_EXTRAS = ("finish_reason", "prompt_tokens", "output_tokens")


def with_batch_fields(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a job's fields, plus the fields that an OpenAI batch file as its input implies.

    Fields that the job sets are kept, with two exceptions: output.extras gets further entries, and
    for a hosted model a sampling.max_tokens of null becomes a number. If the job sets a prompt,
    only the second exception applies, and nothing else is added.

    Returns the job unchanged if its input is not a batch file. Does so as well if a group is not a
    mapping; later checks report that.
    """
    source = _fields(job.get("source"))
    if source is None or source.get("format") != BATCH_FORMAT:
        return job
    names = ("prompt", "sampling", "engine", "output")
    groups = {name: fields for name in names if (fields := _fields(job.get(name, {}))) is not None}
    if len(groups) < len(names):
        return job
    prompt, sampling, engine, output = (groups[name] for name in names)
    if _unset(prompt, "template", "function", "messages"):
        decided = _decided_fields(engine)
        for group, fields in decided.items():
            for name, value in fields.items():
                groups[group].setdefault(name, value)
        if _unset(output, "columns"):
            output["columns"] = list(KEPT_COLUMNS)
        extras = ANSWER_EXTRAS[1:2] if engine.get("task") == "embed" else ANSWER_EXTRAS
        output["extras"] = list(dict.fromkeys([*(output.get("extras") or ()), *extras]))
        prompt["function"] = decided["prompt"]["function"]
    if _is_hosted(engine) and sampling.get("max_tokens", 0) is None:
        sampling["max_tokens"] = HOSTED_TOKENS
    return {**job, **{name: fields for name, fields in groups.items() if fields}}


def _decided_fields(engine: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields that a batch file as input implies, as {group: {field: value}}.

    `engine` holds the fields of the job's engine.
    """
    if engine.get("task") == "embed":
        return {"prompt": {"function": EMBEDDING_REQUEST}}
    function = TEXT_REQUEST
    if _is_hosted(engine):
        raw = (_fields(engine.get("endpoint")) or {}).get("api") == "completions"
        function = COMPLETION_REQUEST if raw else CHAT_REQUEST
    most = HOSTED_TOKENS if _is_hosted(engine) else None
    return {
        "prompt": {"function": function},
        "sampling": {"temperature": 1.0, "max_tokens": most},
        "output": {"on_cut_off": "keep"},
    }


def _is_hosted(engine: Mapping[str, Any]) -> bool:
    endpoint = _fields(engine.get("endpoint")) or {}
    return not _unset(endpoint, "url", "block")


def without_batch_fields(job: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a job without those that `with_batch_fields` added.

    Call this before other fields are changed. `with_batch_fields` then adds its fields anew, and
    they suit the changed job. A field whose value differs from the added one is kept.

    `job` has the validated groups, `fields` their plain values without defaults. Returns `fields`
    unchanged if the source is no batch file, or if prompt.function is not the one that
    `with_batch_fields` would set.
    """
    decided = _decided_fields(fields.get("engine", {}))
    own_function = job["prompt"].function != decided["prompt"]["function"]
    if job["source"].format != BATCH_FORMAT or own_function:
        return fields
    names = ("prompt", "sampling", "output")
    groups = {name: dict(fields.get(name, {})) for name in names}
    for group, values in decided.items():
        for name, value in values.items():
            actual = getattr(job[group], name)
            groups[group].pop(name, None)
            if actual != value:
                groups[group][name] = actual
    output = groups["output"]
    if output.get("columns") == list(KEPT_COLUMNS):
        del output["columns"]
    output["extras"] = [one for one in output.get("extras", ()) if one not in ANSWER_EXTRAS]
    return {**fields, **groups}


def with_batch_limits(source: Source, limits: Limits) -> Limits:
    """Return `limits`; for a batch file, let all rows fail if no limit on failed rows is set."""
    if source.format != BATCH_FORMAT or not _unset(dict(limits), *FAILED_LIMITS):
        return limits
    return limits.model_copy(update=NO_LIMIT)


def _unset(group: Mapping[str, Any], *names: str) -> bool:
    """Return whether each of these fields is missing in the group, or None."""
    return all(group.get(name) is None for name in names)


def _fields(group: object) -> dict[str, Any] | None:
    """Return the fields that are set in a group, {name: value}.

    Returns None if `group` is neither a pydantic model nor a mapping.
    """
    if isinstance(group, BaseModel):
        return {name: value for name, value in group if name in group.model_fields_set}
    return dict(group) if isinstance(group, Mapping) else None


def check_batch_file(
    source: Source, function: str | None, sampling: Sampling, task: str, output: Output
) -> None:
    """Raise ValueError for a field that conflicts with an OpenAI batch file as input.

    If the input is not such a file, raises it for a field that applies only to batch files.
    """
    if source.format != BATCH_FORMAT:
        if source.served_as is not None:
            raise ValueError(
                f"source.served_as applies only to format: {BATCH_FORMAT}; remove it, or set format"
            )
        return
    if function not in REQUEST_FUNCTIONS:
        raise ValueError(
            f"prompt: the requests are those of the {BATCH_FORMAT} file; remove template, function "
            "and messages"
        )
    if task not in ("generate", "embed"):
        raise ValueError(
            f"engine.task {task} does not apply to format: {BATCH_FORMAT}; use generate or embed"
        )
    for name in ("postprocess", "schema_model", "tool_parser"):
        if getattr(output, name):
            raise ValueError(
                f"output.{name} does not apply to format: {BATCH_FORMAT}, whose answers are "
                "written as they are; remove it"
            )
    if not output.compact:
        raise ValueError(f"output.compact must be true for format: {BATCH_FORMAT}; remove it")
    if (sampling.extra.get("n") or 1) > 1:
        raise ValueError(f"sampling.n must be 1 for format: {BATCH_FORMAT}; remove it")
    columns = source.columns, output.columns
    for group, names in zip(("source", "output"), columns, strict=True):
        wanted = ("line", "url", "fault", *KEPT_COLUMNS) if group == "source" else KEPT_COLUMNS
        for name in wanted:
            if names is not None and name not in names:
                raise ValueError(
                    f"{group}.columns: format: {BATCH_FORMAT} needs {name!r}; add it, or remove "
                    f"{group}.columns"
                )
