"""The jobs of the corpus. Each is a way through the package; together they set every field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .world import CATALOG, MANIFEST

SCHEMA = {
    "type": "object",
    "properties": {"industry": {"type": "string"}, "employees": {"type": "integer"}},
    "required": ["industry", "employees"],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a company up",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}
LLAMA = {"model": "models/llama-8b"}


@dataclass(frozen=True)
class GoldenJob:
    """A job as a user writes it. `remote`: its input lies where no test reaches, so a file of the
    corpus's folder is read in its place."""

    name: str
    about: str
    job: dict[str, Any]
    remote: bool = False


def golden_jobs() -> list[GoldenJob]:
    jobs = [
        *_inputs(),
        *_prompts(),
        *_answers(),
        *_engines(),
        *_endpoints(),
        *_cascades(),
        *_classifiers(),
        *_tasks(),
        *_runs(),
        *_refused(),
    ]
    return sorted(jobs, key=lambda one: one.name)


def made(
    name: str,
    about: str,
    /,
    *,
    remote: bool = False,
    source: dict[str, Any] | None = None,
    prompt: dict[str, Any] | None = None,
    output: dict[str, Any] | None = None,
    **groups: Any,
) -> GoldenJob:
    job = {
        "name": name,
        "source": {"uri": "data/rows.parquet", **(source or {})},
        "prompt": prompt or {"template": "What does {Company} do?"},
        "output": {"uri": "out", **(output or {})},
        **groups,
    }
    return GoldenJob(name, about, job, remote)


def _inputs() -> Iterator[GoldenJob]:
    yield made("input-parquet", "The shortest job: all defaults, a Parquet file in place.")
    yield made("input-csv", "A CSV file as it usually is.", source={"uri": "data/rows.csv"})
    yield made(
        "input-csv-dialect",
        "A CSV file in which nothing is usual.",
        source={
            "uri": "data/rows.txt",
            "format": "csv",
            "types": {"amount": "string"},
            "csv": {
                "delimiter": ";",
                "encoding": "cp1252",
                "quote": "'",
                "escape": "~",
                "header": False,
                "names": ["id", "Company", "Country", "amount"],
                "skip_rows": 1,
                "null_values": ["NULL"],
            },
        },
    )
    yield made("input-json-lines", "JSON Lines.", source={"uri": "data/rows.jsonl"})
    yield made(
        "input-batch-file",
        "Requests of an OpenAI batch file.",
        source={"uri": "data/requests.jsonl", "format": "openai_batch", "served_as": ["demo"]},
        prompt={"system": "Answer in French."},
    )
    yield made("input-arrow", "An Arrow file.", source={"uri": "data/rows.arrow"})
    yield made(
        "input-several-files",
        "A list of files and a glob; some rows and columns of them.",
        source={
            "uri": ["data/several/c.csv", "data/several/[ab].csv"],
            "limit": 20,
            "columns": ["Company", "id"],
            "rows_per_shard": 6,
        },
    )
    yield made(
        "input-sample",
        "Rows of a file chosen by a hash.",
        source={"uri": "data/several/[ab].csv", "sample": 12, "sample_seed": 3},
    )
    yield made(
        "input-partitions",
        "Folders key=value, with a declared type and a filter.",
        source={
            "uri": "data/parts",
            "types": {"year": "int16"},
            "filter": "year = 2024 AND country = 'DE'",
        },
        prompt={"template": "{Company} in {country}, {year}?"},
    )
    yield made(
        "input-database",
        "A query of a database.",
        source={
            "uri": "sqlite:///data/rows.db",
            "query": "SELECT id, Company, amount FROM companies ORDER BY id",
            "types": {"amount": "decimal(38,9)"},
        },
    )
    yield made(
        "input-iceberg",
        "An Iceberg table of a catalog at a snapshot.",
        remote=True,
        source={
            "uri": "sales.companies",
            "format": "iceberg",
            "version": "77",
            "catalog": {"type": "rest", "uri": "http://localhost:8181", "token": "a-key"},
        },
    )
    yield made(
        "input-hugging-face",
        "A data set on Hugging Face.",
        remote=True,
        source={
            "uri": "hf://datasets/owner/companies",
            "config": "large",
            "split": "train+test",
            "version": "main",
        },
    )
    yield made(
        "input-s3",
        "Input and output with keys, of options and of blocks.",
        remote=True,
        source={
            "uri": "s3://bucket/rows/*.csv",
            "options": {"key": "a-key", "secret": "a-secret", "endpoint_url": "http://localhost"},
            "credentials_block": "aws-credentials/input",
        },
        output={
            "options": {"key": "another-key", "secret": "another-secret"},
            "credentials_block": "aws-credentials/output",
        },
    )
    yield made(
        "input-web",
        "A signed file by http, of this network.",
        remote=True,
        source={
            "uri": "http://localhost:8080/rows.csv?X-Amz-Signature=abc",
            "web": {"max_mb": 50, "allow_private": True},
        },
    )
    yield made(
        "input-names-taken",
        "The result of another job is the input: names of our columns give way.",
        source={"uri": "data/answered.parquet"},
    )


def _prompts() -> Iterator[GoldenJob]:
    yield made(
        "prompt-system-prefill",
        "A system message, the begin of the answer, and rows that may hold control tokens.",
        prompt={
            "system": "Answer in one word.",
            "template": "Industry of {Company}, {Country}:",
            "prefill": "The industry is",
            "on_null": "empty",
            "special_tokens_in_rows": "allow",
        },
    )
    yield made(
        "prompt-conversations",
        "Conversations of a column, continued.",
        prompt={"messages": "begun", "continue_final_message": True},
    )
    yield made(
        "prompt-chat-template",
        "A chat template of a file, with arguments, tools and documents.",
        prompt={
            "messages": "chat",
            "chat_template": "chat.jinja",
            "chat_template_kwargs": {"tone": "dry", "enable_thinking": False},
            "tools": [TOOL],
            "documents": "pages",
        },
    )
    yield made(
        "prompt-function",
        "A function makes the prompts; control tokens in rows are refused.",
        prompt={"function": "golden.functions:ask", "special_tokens_in_rows": "refuse"},
    )
    yield made(
        "prompt-truncated-left",
        "Long prompts lose their beginning.",
        prompt={"template": "{Company}: {Note}", "on_too_long": "truncate_left"},
        engine={"max_model_len": 64},
    )
    yield made(
        "prompt-truncated-right",
        "Long prompts lose their end.",
        prompt={"template": "{Company}: {Note}", "on_too_long": "truncate_right"},
    )
    yield made(
        "prompt-length-auto",
        "The context length follows from the rows.",
        prompt={"template": "{Company}: {Note}"},
        engine={**LLAMA, "max_model_len": "auto", "max_model_len_percentile": 0.9},
    )
    yield made(
        "images-column",
        "Images of a column, with all that can be said of them.",
        source={"media_root": "data"},
        prompt={
            "template": "What does {Company} show?",
            "images": {
                "columns": ["picture"],
                "resize": [56, 56],
                "per_row": 2,
                "max_pixels": 1_000_000,
                "max_bytes": 100_000,
                "fetch_seconds": 5,
                "allow_private": True,
            },
        },
        engine={"model": "models/vision", "max_model_len": 8192},
        output={"extras": ["image_digests"]},
    )
    yield made(
        "images-function",
        "A function that brings images; answers are kept.",
        prompt={"function": "golden.functions:show", "images": {"per_row": 1}},
        engine={"model": "models/vision", "max_model_len": 4096},
        output={"keep_answers": 7},
    )


def _answers() -> Iterator[GoldenJob]:
    choice = {"choice": ["bank", "farm", "shop"], "max_tokens": 8}
    yield made("answer-choice", "One of three labels.", sampling=choice)
    yield made(
        "answer-choice-first-token",
        "One of three labels, told by its first token.",
        sampling=choice,
        engine={**LLAMA, "early_stop": "first_token"},
    )
    yield made(
        "answer-choice-whole",
        "One of three labels, written out; cut-off answers fail.",
        sampling=choice,
        engine={"early_stop": "off"},
        output={"on_cut_off": "fail"},
    )
    yield made(
        "answer-probabilities",
        "One of three labels, with the probability of each.",
        sampling=choice,
        output={"probabilities": True},
    )
    yield made(
        "answer-typed",
        "Typed columns by a schema in the job.",
        sampling={"max_tokens": 64},
        engine=LLAMA,
        output={"schema_model": SCHEMA},
    )
    yield made(
        "answer-typed-by-class",
        "Typed columns by a pydantic class, with what is known about the answers.",
        output={
            "schema_model": "golden.functions:Company",
            "extras": ["finish_reason", "prompt_tokens", "output_tokens"],
        },
    )
    yield made(
        "answer-typed-by-file",
        "Typed columns by a JSON file, after a reasoning model has thought.",
        sampling={"max_tokens": 256},
        engine=LLAMA,
        output={"schema_model": "answer.json", "reasoning_parser": "qwen3"},
    )
    yield made(
        "answer-structured-regex",
        "A regular expression, by vLLM's own field; cut-off answers stay.",
        sampling={"structured_outputs": {"regex": "[0-9]{4}"}},
        output={"on_cut_off": "keep"},
    )
    yield made(
        "answer-structured-json",
        "A JSON schema by vLLM's own field, several answers a row, all of them drawn.",
        sampling={
            "temperature": 0.7,
            "seed": 3,
            "n": 3,
            "structured_outputs": {"json": SCHEMA},
            "max_tokens": 64,
        },
    )
    yield made(
        "answer-drawn",
        "Fields of vLLM's sampling.",
        sampling={
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": 40,
            "stop": ["\n\n"],
            "min_tokens": 2,
            "skip_special_tokens": False,
            "max_tokens": 32,
        },
    )
    yield made(
        "answer-logprobs",
        "The most probable tokens beside each that was chosen.",
        sampling={"logprobs": 5},
    )
    yield made(
        "answer-thinking",
        "Thinking in a column of its own, within a budget.",
        sampling={"thinking_token_budget": 128, "max_tokens": 256},
        engine=LLAMA,
        output={"reasoning_parser": "qwen3", "reasoning_column": "thinking"},
    )
    yield made(
        "answer-thinking-choice",
        "One of two labels, after a reasoning model has thought.",
        sampling={"choice": ["yes", "no"], "max_tokens": 64},
        engine=LLAMA,
        output={"reasoning_parser": "qwen3"},
    )
    yield made(
        "answer-tool-calls",
        "Tool calls in a column of their own.",
        prompt={
            "template": "Look {Company} up",
            "tools": [TOOL],
            "chat_template": "{{ tools | tojson }}{{ messages[0]['content'] }}{{ messages[1:] }}",
        },
        output={"tool_parser": "hermes", "tool_calls_column": "calls"},
    )
    yield made(
        "answer-postprocess",
        "A function makes columns of the answer.",
        output={
            "postprocess": "golden.functions:split",
            "schema": {"industry": "string", "length": "int32"},
        },
    )


def _engines() -> Iterator[GoldenJob]:
    yield made("engine-8b", "A model of 8 billion weights, all sizes chosen.", engine=LLAMA)
    yield made(
        "engine-sizes-given",
        "All sizes are the user's.",
        engine={
            **LLAMA,
            "revision": "v1",
            "device": "gpu",
            "replicas": [1, 4],
            "max_model_len": 4096,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
            "batch_size": 8,
            "max_concurrent_batches": 3,
            "accelerator_type": "H100",
            "num_cpus": 2,
            "engines_per_gpu": 2,
            "learn": False,
        },
    )
    yield made(
        "engine-cpu",
        "Four engines on CPUs, with environment and vLLM arguments of the user's.",
        engine={
            "device": "cpu",
            "replicas": 4,
            "env": {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_BATCH_INVARIANT": "1"},
            "dtype": "bfloat16",
            "enable_prefix_caching": False,
            "enforce_eager": False,
        },
    )
    yield made(
        "engine-tensor-parallel",
        "A model of 70 billion weights on four GPUs.",
        engine={"model": "models/llama-70b", "tensor_parallel_size": 4},
    )
    yield made(
        "engine-on-four-gpus",
        "Engines of four GPUs, which not every node has.",
        engine={**LLAMA, "tensor_parallel_size": 4},
    )
    yield made(
        "engine-across-nodes",
        "One engine on GPUs of several nodes.",
        engine={
            "model": "models/llama-70b",
            "tensor_parallel_size": 4,
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "ray",
        },
    )
    yield made(
        "engine-too-large",
        "A model that does not fit on one GPU.",
        engine={"model": "models/llama-70b"},
    )
    yield made(
        "engine-experts",
        "A mixture of experts.",
        engine={"model": "models/mixtral", "tensor_parallel_size": 2},
    )
    yield made(
        "engine-fp8",
        "Weights and KV cache in fp8, and most of the GPU's memory.",
        engine={
            **LLAMA,
            "quantization": "fp8",
            "kv_cache_dtype": "fp8",
            "gpu_memory_utilization": 0.95,
        },
    )
    yield made(
        "engine-try-fp8",
        "fp8 where a sample of the rows agrees; for weights and KV cache.",
        engine={**LLAMA, "quantization": "try-fp8", "kv_cache_dtype": "try-fp8"},
        limits={"min_agreement": 0.8},
    )
    yield made(
        "quality",
        "Golden rows, and the accuracy that publishing needs.",
        output={"column": "right"},
        quality={"golden": "golden.csv", "key": ["id"], "answer": "right", "at_least": 0.9},
    )
    yield made(
        "quality-judge",
        "A sample of the answers is judged by another model.",
        quality={
            "judge": {
                "model": "models/llama-8b",
                "engine": {"gpu_memory_utilization": 0.8},
                "prompt": "Is {response} what {Company} does?",
                "sample": 300,
            }
        },
    )
    yield made(
        "quality-hosted-judge",
        "A hosted model judges, and the judge decides about publishing.",
        quality={
            "at_least": 0.8,
            "judge": {
                "endpoint": {"url": "https://models.example/v1", "model": "large"},
                "prompt": "Is {response} what {Company} does?",
            },
        },
    )
    yield made(
        "engine-input-order",
        "Rows are asked as they stand, each of them; another tokenizer.",
        engine={"order": "input", "deduplicate": False, "tokenizer": "models/llama-8b"},
    )
    yield made(
        "engine-adapter",
        "One LoRA adapter for all rows.",
        engine={**LLAMA, "adapter": "adapters/rank-16"},
    )
    yield made(
        "engine-adapters",
        "Two LoRA adapters, by a column; answers are reused.",
        prompt={"template": "{Company}?", "adapter_column": "style"},
        engine={
            **LLAMA,
            "adapters": {"formal": "adapters/rank-16", "short": "adapters/rank-4"},
        },
        reuse="latest",
    )


def _endpoints() -> Iterator[GoldenJob]:
    yield made(
        "endpoint",
        "A hosted model, with every limit of its server.",
        sampling={"max_tokens": 64, "temperature": 0.2},
        engine={
            "endpoint": {
                "url": "https://api.example.com/v1",
                "block": "hosted-model/large",
                "model": "large",
                "key": "example-key",
                "requests_per_minute": 500,
                "tokens_per_minute": 200_000,
                "max_in_flight": 32,
                "timeout": 120,
                "price_in": 0.4,
                "price_out": 1.6,
                "batch": True,
            }
        },
        limits={"max_cost": 5},
    )
    yield made(
        "endpoint-completions",
        "A hosted model that takes a text and no chat.",
        sampling={"max_tokens": 64},
        engine={
            "endpoint": {
                "url": "https://api.example.com/v1",
                "api": "completions",
                "model": "large",
                "key": "example-key",
            }
        },
    )


def _cascades() -> Iterator[GoldenJob]:
    hosted = {"url": "https://api.example.com/v1", "model": "large", "key": "example-key"}
    yield made(
        "cascade",
        "A hosted model answers rows of which the small one is unsure, at most a fifth of them.",
        sampling={"choice": ["bank", "farm", "shop"]},
        output={
            "escalate": {
                "to": {"endpoint": hosted},
                "when": {"probability_below": 0.8},
                "at_most": 0.2,
            }
        },
    )
    yield made(
        "cascade-schema",
        "Answers that do not match the schema, or are improbable, go to a larger engine.",
        output={
            "schema_model": {"type": "object", "properties": {"a": {"type": "string"}}},
            "escalate": {
                "to": {"model": "demo", "max_num_seqs": 64},
                "when": {"fails_schema": True, "logprob_below": -0.5},
            },
        },
    )


def _classifiers() -> Iterator[GoldenJob]:
    engine = {"model": "models/bert", "classifier": "classifier.json"}
    escalate = {"to": {"model": "demo"}, "when": {"probability_below": 0.9}}
    prompt = {"template": "{Note}", "system": "Name the industry."}
    choice = {"choice": ["bank", "farm", "shop"]}
    yield made(
        "cascade-classifier",
        "A distilled classifier answers first; 50 of its rows are checked by the larger model.",
        prompt=prompt,
        sampling=choice,
        engine=engine,
        output={"escalate": {**escalate, "check": 50}},
    )
    yield made(
        "task-embed-classifier",
        "A distilled classifier answers every row.",
        prompt={"template": "{Note}"},
        engine={**engine, "task": "embed"},
    )
    yield made(
        "refused-classifier-of-another-template",
        "A classifier that was trained on other texts.",
        prompt={**prompt, "template": "{Company}"},
        sampling=choice,
        engine=engine,
        output={"escalate": escalate},
    )


def _tasks() -> Iterator[GoldenJob]:
    text = {"template": "{Note}"}
    yield made(
        "task-embed",
        "Vectors of an encoder, as it gives them, in half the room.",
        prompt=text,
        engine={"model": "models/bert", "task": "embed"},
        output={"normalize": False, "vector_type": "float16", "extras": ["prompt_tokens"]},
    )
    yield made(
        "task-embed-decoder",
        "Vectors of a decoder; answers are kept.",
        prompt=text,
        engine={"model": "models/qwen3-embedding", "task": "embed"},
        output={"keep_answers": 30},
    )
    yield made(
        "task-classify",
        "Labels of a classifier.",
        prompt=text,
        engine={"model": "models/bert-labels", "task": "classify"},
        output={"column": "label"},
    )
    yield made(
        "task-score-pairs",
        "Scores of pairs by a cross-encoder.",
        prompt={"template": "{Company}", "second": "{Note}", "on_too_long": "truncate_right"},
        engine={"model": "models/bert-pairs", "task": "score"},
    )
    yield made(
        "task-score-vectors",
        "Scores of pairs by their vectors.",
        prompt={"template": "{Company}", "second": "{Note}"},
        engine={"model": "models/bert", "task": "score"},
    )


def _runs() -> Iterator[GoldenJob]:
    yield made(
        "run-reuse-latest",
        "Answers of the latest run are taken over.",
        source={"uri": "data/rows.csv"},
        engine=LLAMA,
        reuse="latest",
    )
    yield made(
        "run-keep-answers",
        "Answers are kept for later runs; typed, with a function at the end.",
        source={"rows_per_shard": 5},
        output={
            "keep_answers": 2.5,
            "schema_model": SCHEMA,
            "postprocess": "golden.functions:split",
            "extras": ["output_tokens"],
        },
    )
    yield made(
        "run-in-prompt-order",
        "Each distinct request is asked once, over the whole run.",
        engine={"order": "run", "model": "models/llama-8b"},
        sampling={"choice": ["yes", "no"]},
    )
    yield made(
        "run-layout",
        "The result's columns and files; names of columns that nothing fills count for nothing.",
        source={"rows_per_shard": 10},
        output={
            "column": "answer",
            "columns": ["id", "Company"],
            "row_number": "line",
            "reasoning_column": "thought",
            "tool_calls_column": "calls",
            "compact": False,
            "file_mb": 64,
            "read_back": True,
        },
    )
    yield made(
        "run-limits",
        "When to give up, by all limits.",
        limits={
            "max_failed_fraction": 0.1,
            "max_failed_rows": 3,
            "engine_deaths": 3,
            "warn_failed": 0.05,
            "stall_seconds": 120,
            "stall_start_seconds": 600,
            "fail_on_stall": True,
            "deadline": "6h",
            "min_rows": 10,
            "hang_seconds": 0,
            "function_seconds": 5,
        },
        output={"postprocess": "golden.functions:split"},
    )
    yield made(
        "run-prices",
        "Prices, and a limit on costs.",
        engine=LLAMA,
        limits={"max_cost": 25, "deadline": "45m"},
        cluster={
            "price_per_gpu_hour": 2,
            "price_by_card": {"H100": 2.5, "L4": 0.6},
            "currency": "EUR",
        },
    )
    yield made(
        "run-publish-files",
        "Published as files.",
        output={
            "publish": [
                {"format": "parquet", "uri": "lake/{run_key}", "partition_by": ["Country"]},
                {"format": "jsonl", "uri": "feed/{run_date}", "name": "feed"},
            ]
        },
    )
    yield made(
        "run-publish-tables",
        "Published to tables.",
        output={
            "columns": ["id", "Company"],
            "publish": [
                {
                    "format": "delta",
                    "uri": "tables/delta",
                    "mode": "merge",
                    "key": ["id"],
                    "options": {"key": "a-key"},
                },
                {"format": "sql", "uri": "sqlite:///data/results.db", "table": "answers"},
            ],
        },
    )
    yield made(
        "run-publish-catalog",
        "Published to a table of a catalog.",
        output={
            "columns": ["id"],
            "publish": [
                {
                    "format": "iceberg",
                    "table": "sales.answers",
                    "catalog": CATALOG,
                }
            ],
        },
    )
    yield made(
        "cluster-joined",
        "A running cluster, and what the CPU stages take of it.",
        cluster={
            "address": "10.0.0.1:6379",
            "prepare": {"num_cpus": 2, "concurrency": 4, "memory": 1_000_000_000},
            "finish": {"num_cpus": 1, "concurrency": 3, "memory": 2_000_000_000},
        },
    )
    yield made(
        "cluster-job-server",
        "A Ray job of a job server, ended where its flow run crashes.",
        cluster={"job_server": "http://ray.example:8265", "on_crash": "stop"},
    )
    yield made(
        "cluster-block",
        "A cluster by a saved block.",
        cluster={"block": "ray-cluster/nightly"},
    )
    yield made(
        "cluster-kubernetes",
        "A cluster of the run's own on Kubernetes.",
        engine={**LLAMA, "accelerator_type": "A100"},
        cluster={
            "kubernetes": {
                "image": "raybatch:1",
                "workers": 2,
                "gpus_per_worker": 4,
                "worker_cpu": "16",
                "worker_memory": "64Gi",
                "head_cpu": "4",
                "head_memory": "16Gi",
                "shm": "16Gi",
                "service_account": "raybatch",
                "env": {"NCCL_DEBUG": "INFO"},
                "secrets": ["hub"],
                "namespace": "batch",
                "context": "prod",
                "url": "http://localhost:8265",
                "ready_within": "45m",
                "lease": "2h",
                "keep": "30m",
            }
        },
    )
    yield made(
        "cluster-kubernetes-manifest",
        "A cluster of the run's own by a manifest.",
        cluster={"kubernetes": {"manifest": MANIFEST}},
    )
    yield made(
        "cluster-kubernetes-file",
        "A cluster of the run's own by a manifest in a file.",
        cluster={"kubernetes": {"manifest_file": "cluster.yaml"}},
    )


def _refused() -> Iterator[GoldenJob]:
    yield made(
        "refused-judge-column",
        "The judge's prompt names a column that the result lacks.",
        output={"columns": ["Company"]},
        quality={"judge": {"model": "demo", "prompt": "Is {answer} right?"}},
    )
    yield made(
        "refused-alike",
        "All rows ask the same.",
        prompt={"template": "Name a company"},
    )
    yield made(
        "refused-column",
        "The template names a column that is not there.",
        prompt={"template": "{Compny}?"},
    )
    yield made(
        "refused-field",
        "A misspelt field, and a value out of range.",
        sampling={"temprature": 1},
        engine={"batch_size": 0},
    )
    yield made(
        "refused-code",
        "An engine argument that names code.",
        engine={"logits_processors": ["mine:Processor"]},
    )
    yield made(
        "refused-place",
        "The output lies inside the input.",
        source={"uri": "data/parts"},
        output={"uri": "data/parts/out"},
    )
    yield made(
        "refused-model",
        "A model that is not there.",
        engine={"model": "/models/none"},
    )
    yield made(
        "refused-answer-room",
        "The answer leaves no room for a prompt.",
        sampling={"max_tokens": 4096},
    )
    yield made(
        "refused-name-taken",
        "A chosen column is there in the input.",
        output={"column": "Company"},
    )
    yield made(
        "refused-task",
        "A model that classifies nothing.",
        prompt={"template": "{Note}"},
        engine={**LLAMA, "task": "classify"},
    )
    yield made(
        "refused-images",
        "Images for a model of text.",
        prompt={"template": "{Company}", "images": {"columns": ["picture"]}},
        engine=LLAMA,
    )
