"""Compiles a job into the spec of its run (`RunSpec`), and makes the public copy for its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from prefect_raybatch.errors import ConfigError, CorruptRun
from prefect_raybatch.job.answer_schema import BACKEND, schema_sampling_fields
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import is_web
from prefect_raybatch.job.cluster import Cluster, ClusterAccess
from prefect_raybatch.job.early_stop import (
    choice_of,
    label_cap,
    labels_to_cut_short,
    may_continue_answer,
    may_stop_early,
)
from prefect_raybatch.job.edits import first_of, judging_job, larger_of
from prefect_raybatch.job.endpoint import HOSTED_BATCH_SHARDS, HOSTED_IMAGE_SHARDS, ModelEndpoint
from prefect_raybatch.job.engine import Engine, precision_tries, without_tries
from prefect_raybatch.job.images import DIGESTS_COLUMN
from prefect_raybatch.job.output import LOGPROBS, PROBABILITIES, Output
from prefect_raybatch.job.own_code.shipping import shipped
from prefect_raybatch.job.secrets import (
    catalog_place,
    hide_argument,
    is_masked,
    recorded,
    recorded_endpoint,
)
from prefect_raybatch.job.source import Source
from prefect_raybatch.job.tasks import pools
from prefect_raybatch.ledger.plan_tables import decode_schema
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.policy.in_force import policy_in_force
from prefect_raybatch.spec.cascade import CascadeSpec
from prefect_raybatch.spec.cluster import ClusterSpec, Prices
from prefect_raybatch.spec.endpoint import EndpointPath, EndpointSpec
from prefect_raybatch.spec.engine import EngineSpec, ModelRequest, core_in_actor
from prefect_raybatch.spec.options import HiddenOptions
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.spec.request import ImageSpec, PromptSpec, SamplingSpec
from prefect_raybatch.spec.result import FinishSpec, Layout, OutputSpec, ParsingSpec
from prefect_raybatch.spec.run import ReuseSpec, RunSpec
from prefect_raybatch.spec.sizes import Grammar, RowSpec, SizeSpec

# Fields of `output` whose default names get a suffix if the input has a column of that name, for
# example because the input is the result of another job.
AUTO_RENAMED_COLUMNS = ("row_number", "column")


@dataclass(frozen=True)
class Planned:
    """Values that the plan fixes, so that a resumed run does not determine them again.

    The files and classes that the job names may have changed since the plan was made. `context` is
    the context length that `max_model_len: auto` resolved to, None without `auto`. `schema` and
    `chat_template` are the texts that were read from files or classes, None if the job has no
    answer schema or no chat template. `names` maps `row_number` and `column` (AUTO_RENAMED_COLUMNS)
    to the column names in the plan; a missing key stands for the default name. `layout` is the
    layout of the result's files. `check` is the number of rows that both models of a cascade
    answer. It is fixed because all attempts must choose the same random sample.
    """

    context: int | None
    schema: str | None
    chat_template: str | None
    names: Mapping[str, str]
    layout: Layout
    check: int

    @classmethod
    def of(cls, plan: Plan) -> Planned:
        kept, context, output = plan.job.get("output", {}), plan.context, planned_job(plan).output
        return cls(
            context=None if context is None else context["max_model_len"],
            schema=plan.parts.get("output.schema_model"),
            chat_template=plan.parts.get("prompt.chat_template"),
            names={f: kept[f] for f in AUTO_RENAMED_COLUMNS if isinstance(kept.get(f), str)},
            layout=layout_spec(output),
            check=output.escalate.check,
        )


def compile_job(
    job: BatchJob, columns: Sequence[str] | None = None, planned: Planned | None = None
) -> RunSpec:
    """Return the `RunSpec` of a job.

    `columns` are the input's column names, None while they are unknown. In that case the result
    includes image columns, and a result column is renamed only if output.columns has its name.

    `planned` has the values that the run's plan fixed. Without it, the answer schema is read from
    the job's file or class, and the chat template is the job's value, which may still be a file
    name. Raises `CorruptRun` if `planned` lacks a context length or chat template that the job
    needs.
    """
    if job.output.escalate.engine is not None:
        return _compile_cascade(job, columns, planned)
    spec = RunSpec(
        name=job.name,
        read=read_spec(job.source),
        prompt=prompt_spec(job, planned),
        sampling=sampling_spec(job, planned),
        engine=engine_spec(job.engine),
        sizes=size_spec(job),
        finish=finish_spec(job, columns, planned),
        output=output_spec(job.output, planned),
        limits=job.effective_limits,
        cluster=cluster_spec(job),
        reuse=ReuseSpec(
            run=job.reuse,
            keep_days=job.output.keep_answers,
            keeps=job.keeps_answers,
            ordered=job.engine.order == "run",
        ),
    )
    if planned is None or not spec.engine.model.context_auto:
        return spec
    if planned.context is None:
        raise CorruptRun(
            "plan.json: engine.max_model_len is auto, but the context length is missing. Restore "
            "the file, or start a new run key"
        )
    return spec.decide(context=planned.context)


def _compile_cascade(
    job: BatchJob, columns: Sequence[str] | None, planned: Planned | None
) -> RunSpec:
    """Return the spec of a cascade's larger model; its `first` is the spec of the first model."""
    first, larger = first_of(job), larger_of(job)
    when, output = job.output.escalate.when, job.output
    measure, below, column = None, None, ""
    if when.probability_below is not None:
        measure, below, column = "probability", when.probability_below, PROBABILITIES
    elif when.logprob_below is not None:
        measure, below, column = "logprob", when.logprob_below, LOGPROBS
    wanted = {PROBABILITIES: output.probabilities, LOGPROBS: "logprobs" in job.sampling.for_vllm()}
    name = _model_name(larger.engine)
    cascade = CascadeSpec(
        measure=measure,
        below=below,
        fails_schema=when.fails_schema,
        at_most=job.output.escalate.at_most,
        first_name=_model_name(first.engine),
        larger_name=f"{name} (larger)" if name == _model_name(first.engine) else name,
        classifies=first.engine.classifier is not None,
        check=output.escalate.check if planned is None else planned.check,
        column=first.output.column,
        measure_column=column,
        columns=() if not column or wanted[column] else (column,),
    )
    names = None if planned is None else replace(planned, names={})
    spec = compile_job(larger, columns, planned)
    return spec.of_cascade(cascade, compile_job(first, columns, names))


def compile_judge(job: BatchJob) -> RunSpec | None:
    """Return the spec of the run in which the judge's engines answer.

    It reads and writes placeholders, since the rows to judge do not exist yet. Returns None for a
    hosted judge, which has no engines, and for a job without a judge.
    """
    if job.quality.judge.model is None:
        return None
    return compile_job(judging_job(job, "rows.parquet", "runs"))


def _model_name(engine: Engine) -> str:
    if engine.classifier is not None:
        return f"classifier on {engine.model}"
    return str(engine.endpoint.model if engine.endpoint.asked else engine.model)


def compile_planned(job: BatchJob, plan: Plan) -> RunSpec:
    """Return the spec of a run that has this plan, with credentials from the job.

    Texts of files and classes, and names of columns, are taken from the plan.
    """
    return compile_job(job, decode_schema(plan.input_schema).names, Planned.of(plan))


def compile_plan(plan: Plan) -> RunSpec:
    """Return the spec of a run from its plan alone, without credentials and on a local cluster.

    Others may write to a run directory, so its plan does not decide which cluster is joined.
    """
    spec = compile_planned(planned_job(plan), plan)
    return replace(spec, cluster=replace(spec.cluster, loaded=ClusterAccess(), block=None))


def planned_job(plan: Plan) -> BatchJob:
    """Return the job that is recorded in the plan, without credentials."""
    return BatchJob.from_dict(plan.job, "plan.json")


def read_spec(source: Source) -> ReadSpec:
    return ReadSpec(
        uris=tuple(source.uris),
        format=source.format,
        table_format=source.table_format,
        stored=source.stored,
        served_as=None if source.served_as is None else tuple(source.served_as),
        limit=source.limit,
        sample=source.sample,
        sample_seed=source.sample_seed,
        columns=None if source.columns is None else tuple(source.columns),
        filter=source.filter,
        version=source.version,
        query=source.query,
        types=source.types,
        config=source.config,
        split=source.split,
        csv=source.csv,
        web=source.web,
        catalog=HiddenOptions(source.catalog),
        options=HiddenOptions(source.options),
    )


def prompt_spec(job: BatchJob, planned: Planned | None = None) -> PromptSpec:
    prompt, template = job.prompt, job.prompt.chat_template
    if planned is not None and template is not None:
        template = planned.chat_template
        if not isinstance(template, str):
            raise CorruptRun(
                "plan.json: the text of prompt.chat_template is missing. Restore the file, or "
                "start a new run key"
            )
    return PromptSpec(
        template=prompt.template,
        second=prompt.second,
        system=prompt.system,
        function=shipped(prompt.function, "prompt.function"),
        messages=prompt.messages,
        documents=prompt.documents,
        adapter_column=prompt.adapter_column,
        prefill=prompt.prefill,
        continue_final_message=prompt.continue_final_message,
        chat_template=template,
        chat_template_kwargs=prompt.chat_template_kwargs,
        tools=None if prompt.tools is None else tuple(prompt.tools),
        on_null=prompt.on_null,
        on_too_long=prompt.on_too_long,
        special_tokens_in_rows=prompt.special_tokens_in_rows,
        columns=prompt.columns,
        images=image_spec(job),
    )


def image_spec(job: BatchJob) -> ImageSpec | None:
    """Return the spec of the images in prompts; None if the job has no images."""
    images = job.prompt.images
    if not images.used:
        return None
    resize = images.resize
    return ImageSpec(
        columns=tuple(images.columns),
        resize=(resize[0], resize[1]) if isinstance(resize, list) else resize,
        most=images.most,
        max_pixels=images.max_pixels,
        max_bytes=images.max_bytes,
        fetch_seconds=images.fetch_seconds,
        allow_private=images.allow_private,
        media_root=job.source.media_root,
        digests=DIGESTS_COLUMN in job.output.extras,
        store_folders=policy_in_force().readable_store_folders(),
    )


def sampling_spec(job: BatchJob, planned: Planned | None = None) -> SamplingSpec:
    sampling, given = job.sampling, job.sampling.for_vllm()
    logprobs = given.get("logprobs")
    return SamplingSpec(
        fields=schema_sampling_fields(given, _schema(job.output, planned)),
        pooling=_pooling_fields(job),
        temperature=sampling.temperature,
        max_tokens=job.drawn.expected_tokens,
        answers=answers_of(job),
        logprobs=None if logprobs is None else int(logprobs),
        choices=tuple(choice_of(given) or ()),
        labels=tuple(sampling.choice or ()) if job.output.probabilities else (),
        form=given.get("structured_outputs"),
        fixed_form=job.fixed_form,
        skip_special_tokens=bool(given.get("skip_special_tokens", True)),
    )


def engine_spec(engine: Engine) -> EngineSpec:
    return EngineSpec(
        model=model_request(engine),
        sort=engine.order != "input",
        merge=engine.deduplicate,
        early_stop=engine.early_stop,
        tries=tuple(precision_tries(engine)),
        learn=engine.learn,
    )


def model_request(engine: Engine) -> ModelRequest:
    return ModelRequest(
        name=engine.model,
        revision=engine.revision,
        task=engine.task,
        context=engine.context,
        context_auto=engine.max_model_len == "auto",
        context_share=engine.max_model_len_percentile,
        adapter=engine.adapter,
        adapters=engine.adapters,
        vllm_arguments=without_tries(engine),
        env=HiddenOptions(engine.env),
        endpoint=endpoint_spec(engine.endpoint, engine.task),
    )


def endpoint_spec(endpoint: ModelEndpoint, task: str) -> EndpointSpec | None:
    """Return the spec of a job's hosted model for this `task`; None if the model is not hosted.

    Raises `ConfigError` if the endpoint's block has not been loaded.
    """
    if endpoint.block is not None and (endpoint.url is None or endpoint.model is None):
        raise ConfigError(
            f"engine.endpoint.block: {endpoint.block} is loaded by a flow or by raybatch run; set "
            "url and model to run without Prefect"
        )
    if endpoint.url is None or endpoint.model is None:
        return None
    path: EndpointPath = "chat/completions" if endpoint.api == "chat" else "completions"
    return EndpointSpec(
        url=endpoint.url,
        path="embeddings" if task == "embed" else path,
        model=endpoint.model,
        secret=HiddenOptions({"key": endpoint.key} if endpoint.key else None),
        requests_per_minute=endpoint.requests_per_minute,
        tokens_per_minute=endpoint.tokens_per_minute,
        max_in_flight=endpoint.max_in_flight,
        timeout=endpoint.timeout,
        price_in=endpoint.price_in,
        price_out=endpoint.price_out,
        batch=endpoint.batch,
    )


def finish_spec(
    job: BatchJob, columns: Sequence[str] | None = None, planned: Planned | None = None
) -> FinishSpec:
    """Return the spec of the finish stage: the result's columns, and how an answer is processed.

    `columns` are the input's column names (None: not known yet). Column names that the plan fixed
    are taken from `planned`.
    """
    output, kept = job.output, _kept(job, columns)
    names = planned.names if planned is not None else free_names(job, columns or ())
    schema = _schema(output, planned)
    return FinishSpec(
        column=_named(output, "column", names),
        columns=None if kept is None else tuple(kept),
        row_number=_named(output, "row_number", names),
        postprocess=shipped(output.postprocess, "output.postprocess"),
        types=output.output_schema,
        extras=tuple(output.extras),
        probabilities=output.probabilities,
        schema=schema,
        keeps_cut_off=output.on_cut_off == "keep",
        fails_cut_off=output.fails_cut_off,
        vector_type=output.vector_type,
        parsing=parsing_spec(job),
        inputs=None if job.prompt.function else tuple(job.prompt.columns),
        classifier=job.engine.classifier,
    )


def free_names(job: BatchJob, columns: Sequence[str]) -> dict[str, str]:
    """Return new names for result columns whose default name an input column already has.

    The keys are `row_number` and `column` (AUTO_RENAMED_COLUMNS), e.g. {"row_number": "_row_2"} if
    the result keeps an input column `_row`. With output.postprocess, `column` is not renamed. A
    name that the user set in the job is not replaced (see `_named`).
    """
    free: dict[str, str] = {}
    kept = _kept(job, columns)
    kept = columns if kept is None else kept
    # A postprocess function gets the answer as output.column, even if the input has such a column.
    for field in (
        AUTO_RENAMED_COLUMNS if job.output.postprocess is None else AUTO_RENAMED_COLUMNS[:1]
    ):
        usual = Output.model_fields[field].default
        if usual in kept:
            numbered = (f"{usual}_{number}" for number in count(2))
            free[field] = next(name for name in numbered if name not in columns)
    return free


def _kept(job: BatchJob, columns: Sequence[str] | None) -> Sequence[str] | None:
    """Return the input columns that the result keeps; None means all.

    `columns` are the input's columns; if they are known, image columns are left out unless
    output.columns names them.
    """
    images = job.prompt.images.columns
    if job.output.columns is not None or columns is None or not images:
        return job.output.columns
    return [name for name in columns if name not in images]


def _named(output: Output, field: str, names: Mapping[str, str]) -> str:
    """Return the name of the result column that `field` of `output` sets.

    A default name is replaced by `names[field]`, if that exists (see `free_names`).
    """
    name: str = getattr(output, field)
    return names.get(field, name) if name == Output.model_fields[field].default else name


def _schema(output: Output, planned: Planned | None) -> str | None:
    """Return the JSON Schema that answers must match, as text; None for free text."""
    if planned is not None and planned.schema is not None:
        return planned.schema
    return output.answer_form


def parsing_spec(job: BatchJob) -> ParsingSpec | None:
    """Return the spec of the reasoning and tool parsers; None if the job sets neither."""
    output, prompt = job.output, job.prompt
    if not output.reasoning_parser and not output.tool_parser:
        return None
    return ParsingSpec(
        reasoning=output.reasoning_parser,
        tool=output.tool_parser,
        reasoning_column=output.reasoning_column,
        tool_calls_column=output.tool_calls_column,
        arguments=prompt.chat_template_kwargs,
        tools=None if prompt.tools is None else tuple(prompt.tools),
    )


def output_spec(output: Output, planned: Planned | None = None) -> OutputSpec:
    return OutputSpec(
        uri=output.uri,
        options=HiddenOptions(output.options),
        targets=tuple(output.publish),
        layout=layout_spec(output) if planned is None else planned.layout,
    )


def layout_spec(output: Output) -> Layout:
    return Layout(
        compact=output.compact, file_bytes=output.file_mb << 20, read_back=output.read_back
    )


def cluster_spec(job: BatchJob) -> ClusterSpec:
    cluster: Cluster = job.cluster
    loaded = cluster.access_if_loaded if cluster.block is not None else cluster.access
    return ClusterSpec(
        name=job.name,
        loaded=loaded,
        block=cluster.block,
        prepare=cluster.prepare,
        finish=cluster.finish,
        engine_cpus=job.engine.num_cpus,
        accelerator=job.engine.accelerator_type,
        prices=prices_of(cluster),
        engine_env=None if job.engine.endpoint.asked else job.engine.env,
        core_in_actor=core_in_actor(model_request(job.engine), job.engine.gpus_per_replica),
    )


def prices_of(cluster: Cluster) -> Prices:
    return Prices(cluster.price_per_gpu_hour, cluster.price_by_card, cluster.currency or "")


def public_job(job: BatchJob, finish: FinishSpec | None = None) -> dict[str, Any]:
    """Return the job's plain values for the run directory, without anything that may be secret.

    Store options, environment variables, keys and URL signatures are left out. If `finish` is
    given, columns that were renamed automatically get their final names.
    """
    value = job.to_dict()
    if finish is not None:
        for field in AUTO_RENAMED_COLUMNS:
            if getattr(finish, field) != getattr(job.output, field):
                value["output"][field] = getattr(finish, field)
    for group in ("source", "output"):
        value.get(group, {}).pop("options", None)
    if any(is_web(uri) for uri in job.source.uris):
        plain = [recorded(uri) if is_web(uri) else uri for uri in job.source.uris]
        value["source"]["uri"] = plain[0] if isinstance(job.source.uri, str) else plain
    if job.output.publish:
        value["output"]["publish"] = [target.public() for target in job.output.publish]
    if job.source.catalog:
        value["source"]["catalog"] = catalog_place(job.source.catalog)
    _without_secrets(value.get("engine", {}), job.engine)
    if (larger := job.output.escalate.engine) is not None:
        _without_secrets(value["output"]["escalate"]["to"], larger)
    if (judge := value.get("quality", {}).get("judge")) is not None:
        _without_key(judge)
        _without_secrets(judge.get("engine", {}), Engine.model_validate(judge.get("engine", {})))
    return value


def _without_secrets(value: dict[str, Any], engine: Engine) -> None:
    """Remove what may be secret from `value`, the plain values of `engine`."""
    value.pop("env", None)
    _without_key(value)
    for name in engine.vllm_arguments:
        if is_masked(hide_argument(value.get(name), name)):
            del value[name]


def _without_key(value: dict[str, Any]) -> None:
    """Remove the key, and tokens in the URL, of a hosted model.

    `value` holds the plain values of the group whose `endpoint` is the hosted model. It is changed
    in place.
    """
    endpoint = value.get("endpoint", {})
    endpoint.pop("key", None)
    if endpoint.get("url"):
        endpoint["url"] = recorded_endpoint(endpoint["url"])


def _pooling_fields(job: BatchJob) -> dict[str, Any]:
    """Return the fields of vLLM's `PoolingParams` that the job sets, except `task`.

    The task depends on the model (see `model.tasks`): for pairs of texts it is `classify` if the
    model reads both in one prompt, and `embed` if their vectors are compared.
    """
    if job.engine.task == "embed" and not job.output.normalize:
        return {"use_activation": False}
    return {}


# Expected length of an answer under a grammar, which ends by itself, as a fraction of max_tokens:
# 43 to 72 of 96 tokens were measured (record-15b.jsonl, record-8b.jsonl).
MEAN_CUTOFF_SHARE = 0.6
TWO_REQUEST_TOKENS = 2  # tokens of an answer for early_stop: first_token; few need more


def size_spec(job: BatchJob) -> SizeSpec:
    """Return the values of a job from which the sizes of its run are computed.

    For a context length of `auto`, `context` is None until the length is measured.
    """
    engine, replicas = job.engine, job.engine.replicas
    if isinstance(replicas, int):
        replicas = [replicas, replicas]
    return SizeSpec(
        model=engine.model,
        device="cpu" if engine.endpoint.asked else engine.device,
        replicas=None if replicas == "auto" else (replicas[0], replicas[1]),
        tensor=engine.tensor_parallel_size,
        pipeline=engine.pipeline_parallel_size,
        engines_per_gpu=None if engine.engines_per_gpu == "auto" else engine.engines_per_gpu,
        max_num_seqs=_sequences(engine),
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_concurrent_batches=_shards_in_flight(engine, job.prompt.images.used),
        rows_per_shard=job.source.rows_per_shard,
        batch_size=engine.batch_size,
        context=engine.context,
        accelerator=engine.accelerator_type,
        spans_nodes=engine.spans_nodes,
        pools=pools(engine.task),
        cpus=engine.num_cpus,
        stage_cpus=job.cluster.prepare.num_cpus + job.cluster.finish.num_cpus,
        vllm_arguments=without_tries(engine),
        row=row_spec(job),
    )


def _shards_in_flight(engine: Engine, images: bool) -> int | None:
    """Return the maximum number of shards in flight per engine; None if `sizing` decides.

    `images`: prompts may have images.
    """
    if engine.endpoint.batch and engine.max_concurrent_batches is None:
        return HOSTED_IMAGE_SHARDS if images else HOSTED_BATCH_SHARDS
    return engine.max_concurrent_batches


def _sequences(engine: Engine) -> int | None:
    """Return the maximum number of requests in flight per engine; None if `sizing` decides."""
    if engine.endpoint.asked:
        return engine.endpoint.max_in_flight
    return None if engine.max_num_seqs == "auto" else engine.max_num_seqs


def row_spec(job: BatchJob) -> RowSpec:
    prompt, fields = job.prompt, job.drawn.for_vllm()
    begin, _, rest = (prompt.template or "").partition("{")
    out, why = _most_out(job)
    return RowSpec(
        shared_characters=len(prompt.system or "") + len(begin),
        own_characters=len(rest),
        images=prompt.images.used,
        caches=job.engine.vllm_arguments.get("enable_prefix_caching") is not False,
        form=grammar_of(job),
        text=bool(fields.get("stop") or fields.get("detokenize")),
        out=out,
        out_why=why,
        expected=MEAN_CUTOFF_SHARE * out if grammar_of(job) and not choice_of(fields) else 0.0,
    )


def grammar_of(job: BatchJob) -> Grammar:
    """Return the backend of the grammar that constrains answers: "guidance", "xgrammar" or "".

    "" means that answers are not constrained.
    """
    fields = job.drawn.for_vllm()
    typed = job.output.schema_model is not None
    if not (typed or fields.get("choice") or fields.get("structured_outputs")):
        return ""
    given = job.engine.vllm_arguments.get("structured_outputs_config")
    backend = given.get("backend") if isinstance(given, Mapping) else None
    return "guidance" if (backend or (BACKEND if typed else "")) == "guidance" else "xgrammar"


def answers_of(job: BatchJob) -> int:
    """Return how many answers the model gives to each row (`n` of the sampling)."""
    return int(job.drawn.for_vllm().get("n") or 1)


def _most_out(job: BatchJob) -> tuple[int, str]:
    """Return (maximum number of output tokens of a row, what sets that maximum).

    A prompt.function may set other sampling for a row; that is not known before it runs.
    """
    if pools(job.engine.task):
        return 1, "the task draws no tokens"
    sampling, fields, answers = job.drawn, job.drawn.for_vllm(), answers_of(job)
    labels = choice_of(fields)
    if labels:
        # Tokens of one character are rare, so that half as many as characters is a safe bound.
        longest = max(len(str(label)) for label in labels) // 2 + 1
        return _most_of_label(job, min(sampling.expected_tokens, longest), answers)
    return sampling.expected_tokens * answers, "sampling.max_tokens"


def _most_of_label(job: BatchJob, longest: int, answers: int) -> tuple[int, str]:
    fields, early = job.drawn.for_vllm(), job.engine.early_stop
    if job.output.parsed_columns or not may_stop_early(job.engine.vllm_arguments):
        early = "off"
    labels = labels_to_cut_short(fields) if early != "off" else None
    cap = label_cap(labels) if labels else longest
    if (
        early == "first_token"
        and may_continue_answer(fields)
        and min(cap, longest) > TWO_REQUEST_TOKENS
    ):
        return TWO_REQUEST_TOKENS, "the first token of a choice, and what it leaves open"
    if cap < longest:
        return cap * answers, "what decides between the choices"
    return longest * answers, "the longest choice"
