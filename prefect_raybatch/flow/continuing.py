"""The command that continues a run, derived from how the run was started.

A flow run of a deployment continues with its parameters; a command line is repeated; for any other
flow run the call is shown as Python.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.runtime import flow_run

from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.job.edits import ANY_JOB, is_same_job, shown_job
from prefect_raybatch.job.job_file import with_fields
from prefect_raybatch.job.secrets import MASK, hide_options
from prefect_raybatch.runs.typed import typed_words

RUN_PARAMETERS = frozenset(("job", "run_key", "scheduled_for", "run_date", "overrides"))
RETRY_PARAMETERS = frozenset(("run_dir", "errors", "overrides"))
BACKFILL_PARAMETERS = frozenset(("job", "first", "last", "at_most", "stop_on_failure"))
SHOWN_PARAMETERS = RUN_PARAMETERS.union(  # values of others may be secrets of a caller's own flow
    RETRY_PARAMETERS, BACKFILL_PARAMETERS, ("limit", "accept", "minutes", "deadline")
)


@dataclass(frozen=True)
class FlowStart:
    """The start of the outermost flow run, whose id is `run`.

    `deployment` is FLOW/DEPLOYMENT, None without one. `flow_parameters` are the parameters that
    differ from the deployment's; without a deployment, all of them. `takes` holds the names of all
    parameters of the flow. `start` is the scheduled start. `job` is the value of the parameter
    `job`, None for flows that have none.
    """

    run: UUID
    flow: str
    deployment: str | None
    flow_parameters: Mapping[str, Any]
    takes: frozenset[str]
    start: datetime | None
    job: Any = None

    @property
    def is_repeatable(self) -> bool:
        """Return whether a new flow run with the same parameters would do the same work.

        True for flows with the parameters of `batch_inference`, `retry_failed` or `backfill`.
        """
        return any(
            self.takes >= names for names in (RUN_PARAMETERS, RETRY_PARAMETERS, BACKFILL_PARAMETERS)
        )

    @property
    def takes_changes(self) -> bool:
        """Return whether `command` can change fields of the job by the parameter `overrides`."""
        changes = self.flow_parameters.get("overrides") or {}
        is_called_again = self.deployment is None or self.is_repeatable
        return is_called_again and "overrides" in self.takes and isinstance(changes, Mapping)

    @property
    def place_of_job(self) -> str:
        """Return the deployment or flow whose job an operator changes, as text."""
        return f"deployment {self.deployment}" if self.deployment else f"flow {self.flow}"

    def parameters(self, run_key: str | None, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters, secrets masked, with which a new flow run continues the run.

        `run_key` is added for flows that take one. `changes` maps dotted names of job fields to new
        values; they are added to the parameter `overrides` if the flow has one.
        """
        values = {name: value for name, value in self.flow_parameters.items() if value is not None}
        if self.takes >= RUN_PARAMETERS:
            if run_key:
                values["run_key"] = run_key
            # The new flow run has another scheduled start, and so another key and date.
            if not values.get("scheduled_for") and not values.get("run_date") and self.start:
                values["scheduled_for"] = self.start.isoformat()
        if changes and self.takes_changes:
            values["overrides"] = {**(values.get("overrides") or {}), **changes}
        return _without_secrets(dict(sorted(values.items())), self.job)


def started() -> FlowStart | None:
    """Return how the outermost flow run was started; None if unknown or outside a flow run."""
    root = root_run()
    if root is None:
        return None
    with suppress(Exception), get_client(sync_client=True) as client:
        return _started(client, client.read_flow_run(root))
    return None


def _started(client: SyncPrefectClient, run: FlowRun) -> FlowStart:
    flow, all_given = client.read_flow(run.flow_id).name, run.parameters
    start, job = run.expected_start_time, all_given.get("job")
    if run.deployment_id is None:
        return FlowStart(run.id, flow, None, all_given, frozenset(all_given), start, job)
    deployment = client.read_deployment(run.deployment_id)
    defaults = deployment.parameters or {}
    given = {
        name: value
        for name, value in all_given.items()
        if not (name in defaults and _is_same(value, defaults[name]))
    }
    schema = deployment.parameter_openapi_schema
    takes = frozenset((schema or {}).get("properties", all_given))
    return FlowStart(run.id, flow, f"{flow}/{deployment.name}", given, takes, start, job)


def changed_job(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job in a flow run's parameters with its `overrides`; {} if there is none."""
    job, changes = parameters.get("job"), parameters.get("overrides")
    values = dict(job) if isinstance(job, Mapping) else {}
    with suppress(RayBatchError):  # a field that is used as a group
        return with_fields(values, changes if isinstance(changes, Mapping) else {})
    return values


def root_run() -> UUID | None:
    """Return the id of the outermost flow run; None outside a flow run.

    The id stays the same when that flow run is retried. So the run key derived from it stays the
    same, too.
    """
    with suppress(Exception):
        return UUID(str(flow_run.get_root_flow_run_id()))
    return None


def command(run_key: str | None, changes: Mapping[str, Any], new_run: bool) -> str:
    """Return the command that continues the run; `run_key` is None if not known yet.

    `changes` maps dotted names of job fields to new values. For a flow run of a deployment, the
    command retries that flow run, with its original job. With `changes` or `new_run`, the command
    starts a new flow run of the deployment instead, if `FlowStart.is_repeatable`. A new flow run
    uses the job that the deployment has when it starts. So one is started also for `changes` of a
    job that is a parameter of another flow, although its run may get another key.
    """
    if words := typed_words(run_key, changes):
        return shlex.join(words)
    start = started()
    if start is None:
        return python_call(
            "batch_inference", {"job": {}, **({"run_key": run_key} if run_key else {})}
        )
    if start.deployment is None:
        return python_call(start.flow, start.parameters(run_key, changes))
    if (start.is_repeatable and (changes or new_run)) or (changes and "job" in start.takes):
        return _new_run(start.deployment, start.parameters(run_key, changes))
    return f"prefect flow-run retry {start.run}"


def command_of_new_run(client: SyncPrefectClient, run: FlowRun) -> str:
    """Return the command that starts a new flow run with the deployment and parameters of `run`."""
    start = _started(client, run)
    return _new_run(str(start.deployment), start.parameters(None, {}))


def _new_run(deployment: str, parameters: Mapping[str, Any]) -> str:
    words = ["prefect", "deployment", "run", deployment]
    for name, value in parameters.items():
        words += ["-p", f"{name}={_as_parameter(value)}"]
    return shlex.join(words)


def python_call(flow: str, parameters: Mapping[str, Any]) -> str:
    """Return the call of a flow as Python.

    `job`, other mappings and parameters that are not of our flows may contain secrets, so they are
    shown as the name of a variable. `overrides`, whose secrets are masked, is shown in full.
    """
    texts = []
    for name, value in parameters.items():
        is_ours = name in SHOWN_PARAMETERS and name != "job"
        is_shown = is_ours and (name == "overrides" or not isinstance(value, Mapping))
        texts.append(f"{name}={value!r}" if is_shown else f"{name}={name}")
    return f"{flow.replace('-', '_')}({', '.join(texts)})"


def _as_parameter(value: Any) -> str:
    """Return a value as an argument of `prefect deployment run`: as JSON, or a text as it is.

    A text that is itself valid JSON is encoded as JSON, so that it remains a text.
    """
    if not isinstance(value, str):
        return json.dumps(value)
    with suppress(ValueError):
        json.loads(value)
        return json.dumps(value)
    return value


def _is_same(value: Any, other: Any) -> bool:
    if value == other:
        return True
    if not (isinstance(value, Mapping) and isinstance(other, Mapping)):
        return False
    return is_same_job(value, other)  # the form of the Prefect page sends all defaults


def _without_secrets(parameters: Mapping[str, Any], job: Any) -> dict[str, Any]:
    """Return a flow run's parameters with secrets masked, and all that our flows do not have.

    `job` is the job to which the parameter `overrides` applies. If a job is invalid, all its texts
    are masked unless they are known to be public.
    """
    shown = {
        name: value if name in SHOWN_PARAMETERS else MASK for name, value in parameters.items()
    }
    if "job" in shown:
        shown["job"] = shown_job(shown["job"]) or _numbers_alone(shown["job"])
    if shown.get("overrides"):
        shown["overrides"] = _shown_changes(job, shown["overrides"])
    return shown


def _shown_changes(job: Any, changes: object) -> Any:
    values = job if isinstance(job, Mapping) else ANY_JOB
    if not isinstance(changes, Mapping):  # a parameter of a caller's own flow
        return MASK
    with suppress(RayBatchError, KeyError, TypeError):  # TypeError: not a valid job
        shown = shown_job(with_fields(values, changes))
        return {field: _at(shown, field) for field in changes}
    return _numbers_alone(changes)


def _numbers_alone(value: Any, name: str = "") -> Any:
    """Mask all texts in a value, except those whose names say that they are public.

    Numbers and booleans stay as they are. `name` is the field or option that holds the value, "" if
    there is none.
    """
    if isinstance(value, Mapping):
        return {key: _numbers_alone(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_numbers_alone(inner, name) for inner in value]
    if isinstance(value, (bool, int, float)):
        return value
    return hide_options(value, name) if name else MASK  # without a name, it hides nothing


def _at(values: Any, field: str) -> Any:
    for name in field.split("."):
        values = values[name]
    return values
