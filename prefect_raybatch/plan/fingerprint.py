"""Which fields of a job decide its answers, and their hash."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import getitem
from typing import Any

from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import is_web
from prefect_raybatch.job.functions import source_digest
from prefect_raybatch.job.secrets import (
    catalog_place,
    counted_catalog,
    hide_argument,
    recorded,
    unsigned,
)
from prefect_raybatch.ledger.records import digest, dump
from prefect_raybatch.model import adapters

# Every job field is in exactly one of these two tables (a test proves it). The first decide what
# the answers are; the second only how, where or how fast they are made.
FINGERPRINTED = {
    "name": "part of what the run is called; a renamed job is another job",
    "source.uri": "other rows",
    "source.format": "other parsing, other values",
    "source.limit": "other rows",
    "source.columns": "other columns in the result",
    "source.version": "other rows",
    "source.filter": "other rows",
    "source.catalog": "another table; which catalog it is counts, its keys do not",
    "source.query": "other rows",
    "source.types": "other values",
    "source.config": "other rows",
    "source.split": "other rows",
    "source.csv": "other values",
    "prompt.template": "other requests",
    "prompt.system": "other requests",
    "prompt.function": "other requests; its module's source counts",
    "prompt.on_null": "decides between failing and asking",
    "prompt.on_too_long": "decides between failing and asking about less",
    "prompt.images.columns": "other images",
    "prompt.images.resize": "other images",
    "prompt.images.per_row": "decides between failing and asking",
    "prompt.images.max_pixels": "decides between failing and asking",
    "prompt.images.max_bytes": "decides between failing and asking",
    "prompt.messages": "other requests",
    "prompt.chat_template": "other prompts; its text counts, wherever it was read",
    "prompt.chat_template_kwargs": "other prompts",
    "prompt.prefill": "other prompts",
    "prompt.continue_final_message": "other prompts",
    "prompt.tools": "other prompts",
    "prompt.documents": "other prompts",
    "prompt.second": "other requests",
    "prompt.adapter_column": "other answers",
    "prompt.special_tokens_in_rows": "other prompts of rows that hold control tokens",
    "sampling": "decides the answers, every field of it",
    "engine.model": "another model",
    "engine.revision": "another model",
    "engine.max_model_len": "decides which prompts are too long",
    "engine.max_model_len_percentile": "decides it, where max_model_len is auto",
    "engine.task": "other answers",
    "engine.adapter": "other answers; its content counts",
    "engine.adapters": "other answers; their content counts",
    "engine.(extra)": "any other engine argument may change the answers, unless listed as free",
    "output.column": "other result columns",
    "output.columns": "other result columns",
    "output.postprocess": "other results; its module's source counts",
    "output.output_schema": "other result types",
    "output.row_number": "other result columns",
    "output.reasoning_parser": "what is answer and what is thinking",
    "output.reasoning_column": "other result columns; counts with a reasoning parser",
    "output.tool_parser": "what is text and what is a call",
    "output.tool_calls_column": "other result columns; counts with a tool parser",
    "output.on_cut_off": "decides which rows are good; counts where it is fail",
    "output.extras": "other result columns",
    "output.probabilities": "another result column",
    "output.schema_model": "decides the answers and the columns; its text counts",
    "output.normalize": "other vectors",
    "output.vector_type": "other vectors",
}

FREE = {
    "source.rows_per_shard": "the plan of a run keeps its own; rows and answers are the same",
    "source.options": "how to reach the input; may hold secrets",
    "source.credentials_block": "how to reach the input",
    "source.web": "how to reach the input",
    "source.media_root": "where the files lie that the rows name",
    "prompt.images.fetch_seconds": "how to reach the images",
    "prompt.images.allow_private": "how to reach the images",
    "engine.device": "where it runs",
    "engine.replicas": "how many work",
    "engine.tensor_parallel_size": "how one engine is spread",
    "engine.pipeline_parallel_size": "how one engine is spread",
    "engine.engines_per_gpu": "how many work on a GPU",
    "engine.order": "speed",
    "engine.deduplicate": "speed: only requests that have the same answer are asked once",
    "engine.early_stop": "speed: an answer is completed when it is certain",
    "engine.max_num_seqs": "speed",
    "engine.max_num_batched_tokens": "speed",
    "engine.batch_size": "size of shards, which the plan keeps",
    "engine.max_concurrent_batches": "speed",
    "engine.accelerator_type": "where it runs",
    "engine.num_cpus": "what Ray sets aside",
    "engine.env": "how the process runs; may hold secrets; VLLM_BATCH_INVARIANT counts where on",
    "output.uri": "where the run directory is",
    "output.compact": "layout of the result, not its rows",
    "output.file_mb": "layout of the result, not its rows",
    "output.read_back": "how the result is proved, not its rows",
    "output.publish": "where else the rows go, once they are there",
    "output.options": "how to reach the output; may hold secrets",
    "output.credentials_block": "how to reach the output",
    "output.keep_answers": "how long raw answers stay, beside the result",
    "reuse": "the same requests have the same answers; the plan of a run keeps its own",
    "limits": "when to give up; may be raised to finish a run",
    "cluster": "where it runs",
}

FREE_ENGINE_ARGUMENTS = frozenset(  # vLLM arguments that change speed or memory alone
    (
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "enforce_eager",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "async_scheduling",
        "block_size",
        "disable_log_stats",
        "download_dir",
        "cpu_offload_gb",
        "max_parallel_loading_workers",
        "distributed_executor_backend",
        "safetensors_load_strategy",
        "hf_token",
        "performance_mode",
        "optimization_level",
        "compilation_config",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "cudagraph_metrics",
        "stream_interval",
    )
)


BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"  # other kernels, whose answers differ in the last bits


def _uris(job: BatchJob) -> list[str]:
    return [unsigned(uri) if is_web(uri) else uri for uri in job.source.uris]


def _catalog(job: BatchJob) -> dict[str, Any]:
    return counted_catalog(job.source.catalog) if job.source.catalog else {}


def _engine_arguments(job: BatchJob) -> dict[str, Any]:
    arguments = job.engine.model_extra or {}
    return {k: v for k, v in sorted(arguments.items()) if k not in FREE_ENGINE_ARGUMENTS}


# Fields of FINGERPRINTED whose value is not what counts, and what counts in its place.
FIELD_READERS: dict[str, Callable[[BatchJob], Any]] = {
    "source.uri": _uris,
    "source.catalog": _catalog,
    "engine.(extra)": _engine_arguments,
    "output.schema_model": lambda job: job.output.answer_form,
    "output.on_cut_off": lambda job: "fail" if job.output.on_cut_off == "fail" else None,
}
COUNTED_WHEN: dict[str, Callable[[BatchJob], bool]] = {  # the other fields always count
    "engine.max_model_len_percentile": lambda job: job.engine.max_model_len == "auto",
    "output.reasoning_column": lambda job: job.output.reasoning_parser is not None,
    "output.tool_calls_column": lambda job: job.output.tool_parser is not None,
}
BY_CONTENT = ("engine.adapter", "engine.adapters")  # fields that `fingerprint` itself looks up
PART_NAMES = {"engine.(extra)": "engine", "output.output_schema": "output.schema"}


def fingerprint(
    job: BatchJob,
    model: Mapping[str, Any] | None = None,
    retry: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, Any]]:
    """(SHA-256, what went into it) of whatever in the job changes an answer.

    The identity of a model in a local or s3:// folder counts; a Hugging Face name counts as it is
    written, since the plan pins the commit it meant when the run began. `retry` says which failed
    rows of which run are the input ({parent, errors}), and takes the source's place.
    """
    parts = answer_fields(job)
    if found := adapters.identities(job.engine):
        parts["engine.adapters"] = found
    if job.prompt.function:
        parts["prompt.function.source"] = source_digest(job.prompt.function, "prompt.function")
    if job.output.postprocess:
        parts["output.postprocess.source"] = source_digest(
            job.output.postprocess, "output.postprocess"
        )
    if model is not None and "@" not in str(model["identity"]):
        parts["model.identity"] = model["identity"]
    if retry is not None:
        parts = {k: v for k, v in parts.items() if not k.startswith("source.")}
        parts["retry"] = dict(retry)
    return digest(dump(parts)), shown_parts(parts)


def shown_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a fingerprint as records and messages have them: without keys, which are
    counted."""
    shown = {**parts, "engine": hide_argument(parts["engine"], "engine")}
    if "source.uri" in parts:
        uris = parts["source.uri"]
        shown["source.uri"] = [recorded(uri) if is_web(uri) else uri for uri in uris]
    if parts.get("source.catalog"):
        shown["source.catalog"] = catalog_place(parts["source.catalog"])
    return shown


# Parts of a fingerprint that are looked up: in the functions' modules, adapters and model.
LOOKED_UP = (
    *("engine.adapters", "prompt.function.source", "output.postprocess.source"),
    *("model.identity", "retry"),
)


def answer_fields(job: BatchJob) -> dict[str, Any]:
    """Return the parts of the fingerprint that the job's own fields give, engine arguments that
    may be secret included."""
    values = job.model_dump(mode="json", exclude={"output": {"schema_model"}})
    parts = {
        PART_NAMES.get(name, name): FIELD_READERS[name](job)
        if name in FIELD_READERS
        else reduce(getitem, name.split("."), values)
        for name in FINGERPRINTED
        if name not in BY_CONTENT and (name not in COUNTED_WHEN or COUNTED_WHEN[name](job))
    }
    if job.engine.env.get(BATCH_INVARIANT, "0") not in ("", "0"):
        parts[f"engine.env.{BATCH_INVARIANT}"] = job.engine.env[BATCH_INVARIANT]
    return parts
