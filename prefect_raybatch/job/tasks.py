"""What a job asks of the model (text, vector, label, score), and the fields that do not apply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from prefect_raybatch.job.batch_job import BatchJob
    from prefect_raybatch.job.group import Group

TaskName = Literal["generate", "embed", "classify", "score"]
VectorType = Literal["float32", "float16"]
# Fields of a job that have no meaning where no chat is held, and where no text comes back.
OF_A_CHAT = (
    *("messages", "chat_template", "chat_template_kwargs", "prefill"),
    *("continue_final_message", "tools", "documents"),
)
OF_A_TEXT = ("schema_model", "probabilities", "reasoning_parser", "tool_parser")


def pools(task: str) -> bool:
    """Return whether a task runs on vLLM's pooling runner: one step, no output tokens."""
    return task != "generate"


def check_task(job: BatchJob) -> None:
    """Raise ValueError that names a field which does not apply to the job's task."""
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
        if getattr(job.output, name):
            raise ValueError(f"output.{name}: engine.task {task} generates no text; remove it")
    for name in job.output.extras:
        if name != "prompt_tokens":
            raise ValueError(
                f"output.extras: {name}: engine.task {task} generates no text; remove it, only "
                "prompt_tokens is available"
            )
    if "runner" in job.engine.given:
        raise ValueError("engine.runner is set from engine.task; remove it")


def check_adapters(job: BatchJob) -> None:
    """Raise ValueError if it is unclear which rows an adapter is for."""
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
    """Return the fields of a group that differ from their defaults."""
    usual = type(group)().model_dump()
    return [name for name, value in group.model_dump().items() if value != usual.get(name)]


def probabilities(column: str) -> str:
    """Return the name of the column with the probability of each label."""
    return f"{column}_probabilities"


def pooling_fields(job: BatchJob) -> dict[str, Any]:
    """Return vLLM's pooling fields of each row except `task`, which the model decides.

    See `model.tasks`: `score` of two texts in one prompt is `classify`, of two vectors `embed`.
    """
    if job.engine.task == "embed" and not job.output.normalize:
        return {"use_activation": False}
    return {}
