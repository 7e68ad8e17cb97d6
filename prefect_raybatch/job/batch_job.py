"""`BatchJob`: a job as one pydantic model, for the YAML file, the flow parameter and the docs.

The title and description of a field appear in the Prefect form and in the tables of
docs/reference/job.md. `COMBINATIONS` are the checks for conflicts between fields of different
groups. Checks that need the input are left to `plan`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError, field_validator, model_validator

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.cascade_conflicts import OF_A_CHAT, cascade_conflict
from prefect_raybatch.job.checks import check_name, check_uri, class_name, run_checks
from prefect_raybatch.job.cluster import Cluster
from prefect_raybatch.job.endpoint import (
    HOSTED_ENGINE,
    HOSTED_SAMPLING,
    TOKENIZER_OUTPUT,
    TOKENIZER_PROMPT,
    models_beside_endpoints,
)
from prefect_raybatch.job.engine import TRY_FP8, Engine, precision_tries
from prefect_raybatch.job.escalate import ANSWERED_BY, first_changes, larger_changes
from prefect_raybatch.job.expansion import anchored, expanded
from prefect_raybatch.job.faults import FieldPlace, explain
from prefect_raybatch.job.group import Group, field, field_check
from prefect_raybatch.job.images import DIGESTS_COLUMN
from prefect_raybatch.job.job_file import read_job_file, with_fields
from prefect_raybatch.job.judge import judge_fields, judge_job
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.job.openai_batch import (
    BATCH_FORMAT,
    check_batch_file,
    with_batch_fields,
    with_batch_limits,
)
from prefect_raybatch.job.output import Output
from prefect_raybatch.job.own_code.loading import is_own_code
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.job.quality import Quality
from prefect_raybatch.job.sampling import Sampling
from prefect_raybatch.job.secrets import CLEAR
from prefect_raybatch.job.source import Source
from prefect_raybatch.job.tasks import pools
from prefect_raybatch.yaml_text import NO_TEXT, YamlText

JSON_SCHEMA = "https://json-schema.org/draft/2020-12/schema"  # the dialect


class BatchJob(Group):
    """A batch inference job: read a table, ask a model about every row, write the answers."""

    name: str = field(
        title="Name",
        text="Used in default run keys. Up to 128 letters, digits, dots, underscores "
        "and hyphens; the first is a letter or digit.",
    )
    source: Source = field(title="Source", text="The table or files to read.")
    prompt: Prompt = field(title="Prompt", text="How a row becomes a request to the model.")
    sampling: Sampling = field(
        Sampling(),
        title="Sampling",
        text="How the model generates an answer: temperature, length, labels.",
    )
    engine: Engine = field(Engine(), title="Engine", text="The model and how vLLM runs it.")
    output: Output = field(
        title="Output", text="Where the result is written and which columns it has."
    )
    limits: Limits = field(
        Limits(),
        title="Limits",
        text="How many failed rows, how much time and what cost are acceptable.",
    )
    quality: Quality = field(
        Quality(),
        title="Quality",
        text="Rows with right answers, and the accuracy that publishing needs.",
    )
    cluster: Cluster = field(
        Cluster(),
        title="Cluster",
        text="The Ray cluster to run on and the resources of the CPU stages.",
    )
    reuse: str | None = field(
        None,
        title="Reuse answers from",
        text="Earlier run whose raw answers are reused for rows with the same "
        "request. Either the URI of a run, or latest: the newest complete run of this job under "
        "output.uri, or all: each of them.",
        min_length=1,
    )

    _name = field_check("name", by=check_name)

    @property
    def drawn(self) -> Sampling:
        """The sampling from which the sizes of a run are computed.

        The tasks embed, classify and score generate no text and count as one token per answer. An
        output.schema_model counts as structured output; its file or class is not read.
        """
        if pools(self.engine.task):
            return Sampling(max_tokens=1)
        if self.output.schema_model is None:
            return self.sampling
        form = {"structured_outputs": {"json": self.output.schema_model}}
        return self.sampling.model_copy(update=form)

    @property
    def keeps_answers(self) -> bool:
        """Whether a run stores its raw answers, for its own equal requests and for later runs."""
        return self.reuse is not None or self.output.keep_answers is not None

    @property
    def effective_limits(self) -> Limits:
        """The job's `limits`; if the input is a batch file, all rows may fail by default."""
        return with_batch_limits(self.source, self.limits)

    @field_validator("reuse")
    @classmethod
    def _reuse(cls, value: str | None) -> str | None:
        if value is not None and value not in ("latest", "all"):
            check_uri(value)
        return value

    @model_validator(mode="before")
    @classmethod
    def _of_a_batch_file(cls, value: Any) -> Any:
        return with_batch_fields(value) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _combined(self) -> BatchJob:
        if conflict := cascade_conflict(self.engine, self.prompt, self.sampling, self.output):
            raise ValueError(conflict)
        run_checks(COMBINATIONS, self)
        return self

    @property
    def fixed_form(self) -> str | None:
        """The name of the job field that fixes the format of all answers.

        None if there is none; each row may then set a format of its own.
        """
        if self.output.schema_model is not None:
            return "output.schema_model"
        return "output.probabilities" if self.output.probabilities else None

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], where: str = "job") -> BatchJob:
        """Return the validated job.

        Raises `ConfigError` with each wrong field and its remedy; `where` names the job in the
        message.
        """
        return cls._validated(value, where)

    @classmethod
    def from_yaml(cls, path: str | Path) -> BatchJob:
        """Return the job of a YAML file, with `~` and environment variables in its paths expanded.

        Raises `ConfigError` if the file is missing, not YAML, or not a valid job.
        """
        content = read_job_file(path)
        value, faults = expanded(content.value)
        faults = {**models_beside_endpoints(value), **faults}
        return cls._validated(anchored(value, Path(path).parent), str(path), content, faults)

    @classmethod
    def _validated(
        cls,
        value: Mapping[str, Any],
        where: str,
        text: YamlText = NO_TEXT,
        faults: Mapping[FieldPlace, str] | None = None,
    ) -> BatchJob:
        wrong = None
        try:
            job = cls.model_validate(dict(value))
        except ValidationError as error:
            wrong = error
        if wrong is None and not faults:
            return job
        raise ConfigError(explain(wrong, cls, where, text, faults))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for YAML or JSON, without defaults but with credentials."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True, context=CLEAR)


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file."""
    return {"$schema": JSON_SCHEMA, **BatchJob.model_json_schema()}


MOST_LABELS = 128  # vLLM's limit for probabilities of labels (MAX_LOGPROB_TOKEN_IDS)
MOST_LOGPROBS = 20  # vLLM's default of engine.max_logprobs
# Fields of `output` that apply only to generated text.
OF_A_TEXT = ("schema_model", "probabilities", "reasoning_parser", "tool_parser")


def check_task(job: BatchJob) -> None:
    """Raise ValueError if a field that is set does not apply to the job's engine.task."""
    task = job.engine.task
    if task != "score" and job.prompt.second is not None:
        raise ValueError(
            f"prompt.second applies only to engine.task score, not to {task}; remove it"
        )
    if task != "embed":
        for name in ("normalize", "vector_type"):
            if getattr(job.output, name) != type(job.output).model_fields[name].default:
                raise ValueError(
                    f"output.{name} applies only to engine.task embed, not to {task}; remove it"
                )
    if pools(task):
        _check_pooling(job, task)


def _check_pooling(job: BatchJob, task: str) -> None:
    drawn = _set(job.sampling)
    if drawn:
        raise ValueError(
            f"sampling.{drawn[0]}: engine.task {task} generates no tokens; remove sampling"
        )
    if job.prompt.system is not None:
        raise ValueError(
            f"prompt.system: engine.task {task} uses no chat template; put the instruction into "
            "prompt.template"
        )
    if job.output.on_cut_off != "auto":
        raise ValueError(
            f"output.on_cut_off: engine.task {task} has no answers that can be truncated; remove it"
        )
    for name in OF_A_CHAT:
        if getattr(job.prompt, name) not in (None, False, {}):
            raise ValueError(
                f"prompt.{name}: engine.task {task} uses the plain text of prompt.template, "
                "without a chat; remove it"
            )
    for name in OF_A_TEXT:
        if name == "probabilities" and job.engine.classifier is not None:
            continue
        if getattr(job.output, name):
            raise ValueError(f"output.{name}: engine.task {task} generates no text; remove it")
    for name in job.output.extras:
        if name != "prompt_tokens":
            raise ValueError(
                f"output.extras: {name}: engine.task {task} generates no text; remove it, only "
                "prompt_tokens is available"
            )
    if "runner" in job.engine.vllm_arguments:
        raise ValueError("engine.runner is set from engine.task; remove it")


def check_classifier(job: BatchJob) -> None:
    """Raise ValueError for fields that conflict with a classifier used without a cascade."""
    if job.engine.classifier is None or job.output.escalate.engine is not None:
        return
    refused = {
        "output.postprocess": job.output.postprocess is not None,
        "reuse": job.reuse is not None,
        "output.keep_answers": job.output.keep_answers is not None,
    }
    for name, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"engine.classifier cannot be combined with {name}; remove one of them"
            )


def check_adapters(job: BatchJob) -> None:
    """Raise ValueError if it is unclear which LoRA adapter each row uses."""
    column, several = job.prompt.adapter_column, job.engine.adapters
    if job.engine.adapter is not None and (several or column is not None):
        raise ValueError(
            "engine.adapter applies to all rows; remove it to use engine.adapters and "
            "prompt.adapter_column"
        )
    if bool(several) != (column is not None):
        raise ValueError(
            "engine.adapters and prompt.adapter_column, which names the adapter of each row, need "
            "each other; set both or neither"
        )
    if "" in several:
        raise ValueError("engine.adapters: the name of an adapter is empty; set one")


def _set(group: Group) -> list[str]:
    """Return the names of the group's fields that differ from their defaults and are not None."""
    given = group.model_dump(exclude_defaults=True)
    return [name for name, value in given.items() if value is not None]


def check_without_images(job: BatchJob) -> None:
    """Raise ValueError if a job without images sets a field that needs them."""
    if job.prompt.images.used:
        return
    if job.source.media_root is not None:
        raise ValueError(
            "source.media_root needs prompt.images; set prompt.images, or remove media_root"
        )
    if DIGESTS_COLUMN in job.output.extras:
        raise ValueError(
            f"output.extras: {DIGESTS_COLUMN} needs prompt.images; set prompt.images, or "
            f"remove {DIGESTS_COLUMN}"
        )


def check_with_images(job: BatchJob) -> None:
    """Raise ValueError if a job with images sets a field that cannot be combined with them."""
    engine = job.engine
    if not job.prompt.images.used:
        return
    if pools(engine.task):
        raise ValueError(
            f"prompt.images: engine.task {engine.task} accepts only text; remove one of them"
        )
    if engine.adapter is not None or engine.adapters:
        raise ValueError("prompt.images cannot be combined with adapters; remove one of them")
    if engine.max_model_len == "auto":
        raise ValueError(
            "engine.max_model_len: auto counts only text, not images; set a number that "
            "includes the images, such as 8192"
        )
    for name in ("limit_mm_per_prompt", "mm_processor_cache_gb"):
        if name in engine.vllm_arguments:
            raise ValueError(f"engine.{name} is set from prompt.images.per_row; remove it")


def check_precision(job: BatchJob) -> None:
    """Raise ValueError if the job sets `try-fp8` where it cannot be tried or has no effect."""
    tries = precision_tries(job.engine)
    if not tries:
        return
    field = f"engine.{next(iter(tries[0]))}: {TRY_FP8}"
    if pools(job.engine.task) and "kv_cache_dtype" in tries[0]:
        raise ValueError(
            f"engine.kv_cache_dtype: {TRY_FP8} applies only to engine.task generate, not to "
            f"{job.engine.task}; remove it"
        )
    if job.engine.spans_nodes:
        raise ValueError(
            f"{field} needs an engine on one node; remove distributed_executor_backend: ray, or "
            "write fp8"
        )


def check_quality(job: BatchJob) -> None:
    """Raise ValueError if golden rows or a judge cannot be used with this job.

    Also raises ValueError for a field of `quality` that has no effect, because it needs golden rows
    or a judge and the job has none.
    """
    quality, output = job.quality, job.output
    if quality.golden is None:
        needed = "quality.golden or quality.judge" if quality.at_least else "quality.golden"
        for name in _set(quality):
            if name == "judge" or (name == "at_least" and quality.judge.asked):
                continue
            raise ValueError(f"quality.{name} needs {needed}; set it, or remove {name}")
    if quality.judge.asked:
        _check_judge(job)
    if quality.golden is None:
        return
    if job.engine.task in ("embed", "score"):
        raise ValueError(
            f"quality.golden: answers of engine.task {job.engine.task} are never exactly equal; "
            "remove it"
        )
    if not output.compact:
        raise ValueError("quality.golden needs output.compact: true; set it, or remove golden")
    columns = output.columns
    for name in quality.key:
        if name == (quality.answer or output.column):
            raise ValueError(
                f"quality.key: {name!r} is the column of the answer; name columns of the input"
            )
        if columns is not None and name not in columns:
            raise ValueError(
                f"quality.key: the result has no column {name!r}; add it to output.columns"
            )


def _check_judge(job: BatchJob) -> None:
    """Raise ValueError if the answers cannot be judged, or if the judge's own job is invalid."""
    if pools(job.engine.task):
        raise ValueError(
            f"quality.judge: engine.task {job.engine.task} gives no answers in words; remove judge"
        )
    if not job.output.compact:
        raise ValueError("quality.judge needs output.compact: true; set it, or remove judge")
    made = judge_job(job.to_dict(), job.quality.judge, max_cost=job.limits.max_cost)
    try:
        BatchJob.from_dict(made, "job")
    except ConfigError as error:
        raise ValueError(judge_fields(str(error).replace("job: ", ""))) from None


def check_price(job: BatchJob) -> None:
    """Raise ValueError for a limit on cost without the price of a GPU or of tokens."""
    endpoint = job.engine.endpoint
    if job.limits.max_cost is None:
        return
    if endpoint.asked is not None:
        answers = () if pools(job.engine.task) else ("price_out",)
        missing = [name for name in ("price_in", *answers) if getattr(endpoint, name) is None]
        if missing and endpoint.url is not None:  # else the block may have them
            names = " and ".join(f"engine.endpoint.{name}" for name in missing)
            raise ValueError(
                f"limits.max_cost needs the prices of the hosted model; set {names}, to 0 if it "
                "costs nothing"
            )
        return
    if not job.cluster.priced:
        raise ValueError(
            "limits.max_cost needs the price of a GPU; set cluster.price_per_gpu_hour or "
            "cluster.price_by_card"
        )


def check_reasoning_parser(job: BatchJob) -> None:
    """Raise ValueError if engine and output name different reasoning parsers."""
    name = job.engine.vllm_arguments.get("reasoning_parser")
    if name and job.output.reasoning_parser not in (None, name):
        raise ValueError(
            f"engine.reasoning_parser {name!r} is not output.reasoning_parser "
            f"{job.output.reasoning_parser!r}; remove engine.reasoning_parser"
        )


def check_logprobs(job: BatchJob) -> None:
    """Raise ValueError if sampling.logprobs is not a whole number from 0 to the maximum.

    The maximum is engine.max_logprobs, by default 20. For a hosted model it is always 20. Also
    raises ValueError if both sampling.logprobs and output.probabilities are set.
    """
    logprobs = job.sampling.extra.get("logprobs")
    if logprobs is None:
        return
    if type(logprobs) is not int or logprobs < 0:
        raise ValueError(
            f"sampling.logprobs must be a whole number, at least 0, and is {str(logprobs)[:80]!r}; "
            "set the number of most probable tokens to write for each output token"
        )
    if job.output.probabilities:
        raise ValueError(
            "sampling.logprobs and output.probabilities cannot be combined; remove one of them"
        )
    if job.engine.endpoint.asked is not None:
        if logprobs > MOST_LOGPROBS:
            raise ValueError(
                f"sampling.logprobs ({logprobs}) exceeds {MOST_LOGPROBS}, the most that a hosted "
                "model tells; lower it"
            )
        return
    most = job.engine.vllm_arguments.get("max_logprobs", MOST_LOGPROBS)
    if isinstance(most, int) and 0 <= most < logprobs:
        raise ValueError(
            f"sampling.logprobs ({logprobs}) exceeds engine.max_logprobs ({most}); lower it, or "
            "raise engine.max_logprobs"
        )


def check_probabilities(job: BatchJob) -> None:
    """Raise ValueError if output.probabilities is set without labels, or with too many of them.

    Also raises ValueError if output.probabilities is combined with several answers per row
    (sampling.n).
    """
    if not job.output.probabilities or pools(job.engine.task):
        return
    if not job.sampling.choice:
        raise ValueError("output.probabilities needs labels; set sampling.choice")
    if len(job.sampling.choice) > MOST_LABELS:
        raise ValueError(
            f"output.probabilities supports at most {MOST_LABELS} labels, and sampling.choice "
            f"has {len(job.sampling.choice)}; remove some labels"
        )
    if (job.sampling.extra.get("n") or 1) > 1:
        raise ValueError(
            "output.probabilities are the same for all answers of a row; remove sampling.n"
        )


def check_answer_schema(job: BatchJob) -> None:
    """Raise ValueError for sampling fields that cannot be combined with output.schema_model."""
    sampling = job.sampling
    if job.output.schema_model is None:
        return
    forms = {
        "choice": sampling.choice,
        "structured_outputs": sampling.extra.get("structured_outputs"),
    }
    for name, form in forms.items():
        if form:
            raise ValueError(
                f"sampling.{name} cannot be combined with output.schema_model; remove one of them"
            )
    if sampling.extra.get("skip_special_tokens") is False:
        raise ValueError(
            "sampling.skip_special_tokens: false would append the end token to the JSON of "
            "output.schema_model; remove it"
        )


def check_own_code(job: BatchJob) -> None:
    """Raise ValueError if a run sent as a Ray job uses a function in a file or notebook."""
    cluster = job.cluster
    server = (
        "job_server" if cluster.job_server else "kubernetes" if cluster.kubernetes.asked else ""
    )
    names = {
        "prompt.function": job.prompt.function,
        "output.postprocess": job.output.postprocess,
        "output.schema_model": class_name(job.output.schema_model),
    }
    own = [field for field, name in names.items() if name is not None and is_own_code(name)]
    if server and own:
        raise ValueError(
            f"{own[0]}: {names[own[0]]} is not on the machines of cluster.{server}; move it to a "
            "module that is installed there"
        )


def check_endpoint(job: BatchJob) -> None:
    """Raise ValueError for a field that has no effect or is unsupported with engine.endpoint."""
    if job.engine.endpoint.asked is None:
        return
    for group, allowed in (("engine", HOSTED_ENGINE), ("sampling", HOSTED_SAMPLING)):
        for name in _set(getattr(job, group)):
            if name not in allowed:
                raise ValueError(
                    f"{group}.{name} does not apply to engine.endpoint; remove it, or remove "
                    "engine.endpoint"
                )
    for group, refused in (("prompt", TOKENIZER_PROMPT), ("output", TOKENIZER_OUTPUT)):
        for name in _set(getattr(job, group)):
            if name in refused:
                instead = ", or use sampling.logprobs instead" if name == "probabilities" else ""
                raise ValueError(
                    f"{group}.{name} needs the model's tokenizer, and engine.endpoint has none; "
                    f"remove it{instead}"
                )
    if job.engine.task not in ("generate", "embed"):
        raise ValueError(
            f"engine.task {job.engine.task} is not supported with engine.endpoint; use generate or "
            "embed"
        )
    raw = job.engine.endpoint.api == "completions"
    if raw and (job.engine.task == "embed" or job.prompt.system or job.prompt.messages):
        raise ValueError(
            "engine.endpoint.api: completions sends one text and no chat; remove prompt.system, "
            "prompt.messages and engine.task, or remove api"
        )
    if job.prompt.images.used and raw:
        raise ValueError(
            "engine.endpoint.api: completions sends text alone; remove prompt.images, or remove api"
        )
    if job.engine.order == "run":
        raise ValueError(
            "engine.order: run is not supported with engine.endpoint, which does not know what "
            "the server caches; remove it"
        )
    if job.prompt.on_too_long != "quarantine":
        raise ValueError(
            f"prompt.on_too_long: {job.prompt.on_too_long} needs the model's tokenizer, and "
            "engine.endpoint has none; remove it"
        )
    if "output_tokens" in job.output.extras and (job.sampling.extra.get("n") or 1) > 1:
        raise ValueError(
            "output.extras: output_tokens is unknown with sampling.n and engine.endpoint, whose "
            "server reports one sum for all answers of a row; remove one of them"
        )
    form = job.sampling.extra.get("structured_outputs")
    if form and set(form) - {"json", "choice"}:
        raise ValueError(
            "sampling.structured_outputs: a hosted model takes only json and choice; write one of "
            "them, or use output.schema_model"
        )


def check_batch(job: BatchJob) -> None:
    """Raise ValueError for a field that conflicts with an OpenAI batch file as input.

    If the input is not such a file, raises it for a field that applies only to batch files.
    """
    check_batch_file(job.source, job.prompt.function, job.sampling, job.engine.task, job.output)


def check_max_tokens(job: BatchJob) -> None:
    """Raise ValueError if engine.endpoint is set and sampling.max_tokens is null."""
    if job.sampling.max_tokens is None and job.engine.endpoint.asked is not None:
        raise ValueError(
            "sampling.max_tokens: null needs vLLM, which knows the context; with engine.endpoint "
            "set a number"
        )


def check_cascade(job: BatchJob) -> None:
    """Raise ValueError if a field conflicts with output.escalate, or if one that it needs is unset.

    Also raises it if the job of the first model or of the larger model is invalid.
    """
    escalate = job.output.escalate
    if escalate.engine is None:
        return
    refused = {
        "engine.adapter": job.engine.adapter is not None,
        "engine.adapters": bool(job.engine.adapters),
        "engine.order: run": job.engine.order == "run",
        "engine.max_model_len: auto": job.engine.max_model_len == "auto",
        TRY_FP8: bool(precision_tries(job.engine)),
        "reuse": job.reuse is not None,
        "output.keep_answers": job.output.keep_answers is not None,
        "output.postprocess": job.output.postprocess is not None,
        "output.compact: false": not job.output.compact,
        "prompt.images": job.prompt.images.used,
        "sampling.n": (job.sampling.extra.get("n") or 1) > 1,
        f"source.format: {BATCH_FORMAT}": job.source.format == BATCH_FORMAT,
    }
    for name, is_set in refused.items():
        if is_set:
            raise ValueError(f"output.escalate cannot be combined with {name}; remove one of them")
    for name, needs, given in (
        ("probability_below", "sampling.choice", job.sampling.choice),
        ("logprob_below", "", True),
        ("fails_schema", "output.schema_model", job.output.schema_model),
    ):
        if getattr(escalate.when, name) not in (None, False) and not given:
            raise ValueError(f"output.escalate.when.{name} needs {needs}; set it")
    if ANSWERED_BY in (job.output.column, job.output.row_number):
        raise ValueError(
            f"output.escalate writes a column {ANSWERED_BY}; rename the column of that name"
        )
    value, to = job.to_dict(), "output.escalate.to"
    if error := _errors_of(value, first_changes(value)):
        if error != _errors_of(value, {"output.escalate": {}}):  # those are reported anyway
            raise ValueError(f"{error}, for the first model of output.escalate")
    elif error := _errors_of(value, larger_changes(value["output"])):
        raise ValueError(re.sub(r"\bengine\.", f"{to}.", error))


def _errors_of(job: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    """Return the errors of a job (plain values) with `changes` ({field: value}); "" if valid."""
    try:
        BatchJob.from_dict(with_fields(job, changes), "job")
    except ConfigError as error:
        return str(error).replace("job: ", "")
    return ""


def check_token_limit(job: BatchJob) -> None:
    """Raise ValueError if sampling.max_tokens is not below the hosted model's tokens_per_minute.

    With several answers per row (sampling.n), compares the sum of their tokens. A job with a
    prompt.function is accepted, because the function may set max_tokens for each row.
    """
    endpoint, answer = job.engine.endpoint, job.sampling.max_tokens
    limit = endpoint.tokens_per_minute
    if limit is None or endpoint.batch or pools(job.engine.task) or job.prompt.function is not None:
        return  # nothing is reserved for an answer, or each row may set max_tokens itself
    number = job.sampling.extra.get("n") or 1
    if answer is not None and answer * number >= limit:
        times = f", {number} times," if number > 1 else ","
        raise ValueError(
            f"engine.endpoint.tokens_per_minute {limit:,} is no more than sampling.max_tokens "
            f"{answer:,}{times} which each row reserves beside its prompt; raise the limit, or "
            f"lower max_tokens{' or n' if number > 1 else ''}"
        )


COMBINATIONS = (
    check_own_code,
    check_endpoint,
    check_batch,
    check_max_tokens,
    check_token_limit,
    check_task,
    check_adapters,
    check_without_images,
    check_with_images,
    check_precision,
    check_price,
    check_quality,
    check_reasoning_parser,
    check_logprobs,
    check_probabilities,
    check_answer_schema,
    check_classifier,
    check_cascade,
)
