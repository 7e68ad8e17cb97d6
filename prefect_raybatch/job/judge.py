"""A second model that judges a sample of the answers: `quality.judge` of a job file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from prefect_raybatch.job.cluster import LOCAL
from prefect_raybatch.job.endpoint import ModelEndpoint
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.escalate import check_second_engine
from prefect_raybatch.job.group import Group, field

SAYS_RIGHT, SAYS_WRONG = "right", "wrong"  # the labels among which a judge chooses
VERDICT, ROW = "verdict", "row"  # the columns with the label, and with the row's number
WHO = "the judge"


class Judge(Group):
    """A model that says whether an answer is right, and how many answers it is asked about."""

    model: str | None = field(
        None,
        title="Judge's model",
        text="Local folder, s3:// folder or Hugging Face name of the judge's model. The cluster of "
        "the job runs it once the rows are answered.",
        min_length=1,
    )
    endpoint: dict[str, Any] = field(
        {},
        title="Hosted judge",
        text="Server that judges in place of a model, with the fields of engine.endpoint. "
        "Example: {url: https://api.openai.com/v1, model: gpt-4.1-mini, key: '${OPENAI_API_KEY}'}.",
    )
    engine: dict[str, Any] = field(
        {},
        title="Judge's engine",
        text="Other fields of engine for the judge. Example: {tensor_parallel_size: 2}. The fields "
        "of engine do not apply to it.",
    )
    prompt: str | None = field(
        None,
        title="Judge's prompt",
        text="Text that asks whether an answer is right, with columns of the result in braces. "
        "The judge can answer only right or wrong.",
        min_length=1,
    )
    sample: int = field(
        200,
        title="Judged answers",
        text="Number of answered rows that are judged. They are drawn by a hash of the run key, so "
        "each run has other rows, and a resumed one the same.",
        gt=0,
    )

    @model_validator(mode="after")
    def _complete(self) -> Judge:
        if self == Judge.model_construct():
            return self
        if self.prompt is None:
            raise ValueError("prompt is required: ask whether the answer is right")
        if bool(self.model) == bool(self.endpoint):
            raise ValueError("set either model or endpoint, which names a hosted model")
        for name in ("model", "endpoint"):
            if name in self.engine:
                raise ValueError(f"engine.{name}: set {name} of the judge itself; remove it here")
        try:
            check_second_engine(self.engine_fields, WHO, may_name_block=True)
        except ValueError as error:
            lines = [
                line if line.startswith(("model", "endpoint")) else f"engine: {line}"
                for line in str(error).splitlines()
            ]
            raise ValueError("\n".join(lines)) from None
        return self

    @property
    def asked(self) -> bool:
        """Return whether the job has a judge."""
        return self.prompt is not None

    @property
    def engine_fields(self) -> dict[str, Any]:
        """Return the judge's engine as a dict with the names of the job's `engine` fields.

        Nothing is validated or filled in; see `whole_engine`.
        """
        own = {"model": self.model} if self.model else {"endpoint": dict(self.endpoint)}
        return {**self.engine, **own}

    @property
    def whole_engine(self) -> Engine:
        """Return the judge's engine, validated."""
        return Engine.model_validate(self.engine_fields)

    @property
    def name(self) -> str:
        """Return the name of the judge's model, or of its Prefect block until that is loaded."""
        return str(self.model or self.endpoint.get("model") or self.endpoint.get("block"))

    @property
    def block(self) -> str | None:
        """Return the name of the hosted judge's Prefect block; None if the job names no block."""
        return ModelEndpoint.model_validate(self.endpoint).block if self.endpoint else None

    def _shown(self, name: str, value: Any) -> Any:
        groups: dict[str, type[Group]] = {"engine": Engine, "endpoint": ModelEndpoint}
        if name not in groups or not value:
            return value
        shown = groups[name].model_validate(value).model_dump(mode="json", exclude_unset=True)
        return {key: shown[key] for key in value if key in shown}


def judge_job(
    job: Mapping[str, Any],
    judge: Judge,
    rows: str = "rows.parquet",
    runs: str = "runs",
    max_cost: float | None = None,
) -> dict[str, Any]:
    """Return the plain fields of the job that judges the rows of the file `rows`.

    `job` are the plain fields of the judged job. The result is written below `runs`, and the judge
    may cost at most `max_cost` (None: no limit).
    """
    output, limits = job["output"], job.get("limits", {})
    reached = {k: output[k] for k in ("options", "credentials_block") if output.get(k)}
    kept = ("engine_deaths", "stall_seconds", "stall_start_seconds", "hang_seconds")
    return {
        "name": job["name"],
        "source": {"uri": rows, **reached},
        "prompt": {"template": judge.prompt, "on_null": "empty"},
        "sampling": {"choice": [SAYS_RIGHT, SAYS_WRONG]},
        "engine": judge.engine_fields,
        "output": {"uri": runs, "column": VERDICT, "row_number": ROW, "columns": [], **reached},
        "limits": {
            **{name: limits[name] for name in kept if name in limits},
            "max_failed_fraction": 1.0,  # rows that fail count as not judged
            "max_cost": max_cost,
        },
        "cluster": _cluster(job.get("cluster", {}), judge),
    }


def _cluster(cluster: Mapping[str, Any], judge: Judge) -> dict[str, Any]:
    """Return the fields of the judge's cluster.

    The judge uses the cluster of the job, with one exception: if the job's runs are submitted as
    Ray jobs, a hosted judge is called from this machine instead.
    """
    remote = ("job_server", "kubernetes")
    is_here = not judge.model and any(cluster.get(name) for name in remote)
    return local_cluster(cluster) if is_here else dict(cluster)


def local_cluster(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a cluster on this machine, with the prices and currency of `cluster`."""
    priced = ("price_per_gpu_hour", "price_by_card", "currency")
    return {"address": LOCAL, **{name: cluster[name] for name in priced if name in cluster}}


def judge_fields(error: str) -> str:
    """Return an error about the judge's job with its fields renamed to those of quality.judge."""
    error = error.replace("prompt.template", "quality.judge.prompt")
    error = re.sub(r"\bengine\.(model|endpoint)\b", r"quality.judge.\1", error)
    return re.sub(r"(?<![\w.])engine\.", "quality.judge.engine.", error)
