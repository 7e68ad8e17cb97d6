"""Jobs about OpenAI batch files: what such a file decides, and what does not go with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from prefect_raybatch.job.limits import FAILED_LIMITS

if TYPE_CHECKING:
    from prefect_raybatch.job.output import Output
    from prefect_raybatch.job.sampling import Sampling
    from prefect_raybatch.job.source import Source

BATCH_FORMAT = "openai_batch"
CHAT_REQUEST = "prefect_raybatch.batches.requests:chat_request"
EMBEDDING_REQUEST = "prefect_raybatch.batches.requests:embedding_request"
COMPLETION_REQUEST = "prefect_raybatch.batches.requests:completion_request"
REQUEST_FUNCTIONS = (CHAT_REQUEST, EMBEDDING_REQUEST, COMPLETION_REQUEST)
# The version of what these functions make of a line. Raise it if they make another request of the
# same line. It counts in place of their source, so that a new release continues a run.
REQUEST_FORM = "1"
HOSTED_TOKENS = 1024  # of an answer to a request without max_tokens, which a limiter must reserve
KEPT_COLUMNS = ("custom_id", "body")  # that output.jsonl is made of
ANSWER_EXTRAS = ("finish_reason", "prompt_tokens", "output_tokens")


def with_batch_fields(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a job; if it is about a batch file, with those that the file decides.

    What the job itself sets stays. Groups may be wrong: they are checked later.
    """
    source = _fields(job.get("source"))
    if source is None or source.get("format") != BATCH_FORMAT:
        return job
    names = ("prompt", "sampling", "engine", "limits", "output")
    groups = {name: fields for name in names if (fields := _fields(job.get(name, {}))) is not None}
    if len(groups) < len(names):
        return job
    prompt, sampling, engine, limits, output = (groups[name] for name in names)
    is_embedding = engine.get("task") == "embed"
    hosted = _fields(engine.get("endpoint")) or {}
    if _unset(prompt, "template", "function", "messages"):
        chat = COMPLETION_REQUEST if hosted.get("api") == "completions" else CHAT_REQUEST
        prompt["function"] = EMBEDDING_REQUEST if is_embedding else chat
        extras = ANSWER_EXTRAS[1:2] if is_embedding else ANSWER_EXTRAS
        if _unset(output, "columns"):
            output["columns"] = list(KEPT_COLUMNS)
        output["extras"] = list(dict.fromkeys([*(output.get("extras") or ()), *extras]))
        if _unset(limits, *FAILED_LIMITS):
            limits["max_failed_fraction"] = 1.0
        if not is_embedding:
            sampling.setdefault("temperature", 1.0)
            sampling.setdefault("max_tokens", None)
            output.setdefault("on_cut_off", "keep")
    if hosted.get("url") and sampling.get("max_tokens", 0) is None:
        sampling["max_tokens"] = HOSTED_TOKENS
    return {**job, **{name: fields for name, fields in groups.items() if fields}}


def without_batch_fields(job: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a job without those that `with_batch_fields` sets again.

    So they follow from the other fields once more after a change of these.
    """
    if job.get("source", {}).get("format") != BATCH_FORMAT:
        return job
    prompt, sampling, limits, output = (
        dict(job.get(name, {})) for name in ("prompt", "sampling", "limits", "output")
    )
    extras = [name for name in output.pop("extras", ()) if name not in ANSWER_EXTRAS]
    hosted = job.get("engine", {}).get("endpoint", {}).get("url")
    derived = (
        *((prompt, "function", name) for name in REQUEST_FUNCTIONS),
        *((limits, "max_failed_fraction", 1.0), (sampling, "temperature", 1.0)),
        *((sampling, "max_tokens", HOSTED_TOKENS if hosted else None),),
        *((output, "columns", list(KEPT_COLUMNS)), (output, "on_cut_off", "keep")),
    )
    for group, name, value in derived:
        if name in group and group[name] == value:
            del group[name]
    output.update({"extras": extras} if extras else {})
    groups = {"prompt": prompt, "sampling": sampling, "limits": limits, "output": output}
    return {**job, **groups}


def _unset(group: Mapping[str, Any], *names: str) -> bool:
    """Return whether a group has none of these fields."""
    return all(group.get(name) is None for name in names)


def _fields(group: object) -> dict[str, Any] | None:
    """Return the fields that are set in a group; None if it is no group."""
    if isinstance(group, BaseModel):
        return {name: value for name, value in group if name in group.model_fields_set}
    return dict(group) if isinstance(group, Mapping) else None


def check_batch_file(
    source: Source, function: str | None, sampling: Sampling, task: str, output: Output
) -> None:
    """Raise ValueError for a field that does not go with a batch file, or without one."""
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
