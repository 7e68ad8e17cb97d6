"""Flows whose parameters may contain JSON Schemas, and which continue without their lease.

Prefect treats every mapping with the key `$ref` in a flow's parameters as a reference to a block,
and JSON Schemas have that key too (`output.schema_model`, `prompt.tools`, overrides of these).

Prefect ends a flow run that cannot renew its lease of a deployment's concurrency limit, e.g. after
its server was unreachable, even if the result is complete by then. The records of a run allow
several drivers, so these flows continue. The worst case is that the deployment's next flow run
starts beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from prefect import Flow, flow_engine
from prefect.context import FlowRunContext
from pydantic import BaseModel

from prefect_raybatch.job.batch_job import BatchJob

BLOCK_KEYS = ("block_document_id", "block_document_slug")
P = ParamSpec("P")
R = TypeVar("R")
WhenInvalid = Callable[[Mapping[str, Any], Exception], None]


class JobFlow(Flow[P, R]):
    """A flow that hides the `$ref` of JSON Schemas in its parameters from Prefect.

    Prefect would read a `$ref` as a reference to a block. If set, `when_invalid(parameters, error)`
    is called with parameters that fail validation.
    """

    when_invalid: WhenInvalid | None = None

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._validated(parameters)
        except Exception as error:
            if self.when_invalid is not None:
                self.when_invalid(parameters, error)
            raise

    def _validated(self, parameters: dict[str, Any]) -> dict[str, Any]:
        with_schemas = {
            name: value for name, value in parameters.items() if _refers_in_schema(_plain(value))
        }
        if not with_schemas:
            return super().validate_parameters(parameters)
        bare = {name: _without_references(_plain(value)) for name, value in with_schemas.items()}
        validated = super().validate_parameters({**parameters, **bare})
        for name, value in with_schemas.items():
            is_job = isinstance(validated[name], BatchJob)
            as_given = isinstance(value, BaseModel) or not is_job
            validated[name] = value if as_given else BatchJob.from_dict(value)
        return validated

    def with_options(self, **options: Any) -> JobFlow[P, R]:
        made: Any = super().with_options(**options)
        made.__class__ = JobFlow  # Prefect makes a plain flow
        made.when_invalid = self.when_invalid
        return made  # type: ignore[no-any-return]


def job_flow(**options: Any) -> Callable[[Callable[P, R]], JobFlow[P, R]]:
    """Return a decorator that makes a function a `JobFlow`; options are those of `Flow`."""
    return lambda function: JobFlow(function, **options)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_unset=True)
    return value


def _is_schema_reference(value: Any) -> bool:
    """Return whether the value of `$ref` belongs to a JSON Schema, not to a Prefect block."""
    if isinstance(value, Mapping):
        return not any(key in value for key in BLOCK_KEYS)
    try:
        UUID(str(value))
    except ValueError:
        return True
    return False


def _refers_in_schema(value: Any) -> bool:
    if isinstance(value, Mapping):
        if "$ref" in value and _is_schema_reference(value["$ref"]):
            return True
        return any(map(_refers_in_schema, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_refers_in_schema, value))


def _without_references(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _without_references(inner)
            for name, inner in value.items()
            if name != "$ref" or not _is_schema_reference(inner)
        }
    if isinstance(value, (list, tuple)):
        return [_without_references(inner) for inner in value]
    return value


_NAME, _RAISES = "maintain_concurrency_lease", "raise_on_lease_renewal_failure"
_maintain: Any = vars(flow_engine).get(_NAME)  # internal to Prefect, so it may be absent


def maintain_lease(*arguments: Any, **options: Any) -> AbstractContextManager[None]:
    """Maintain a lease as Prefect does, except that a lost lease does not end a `JobFlow`.

    Replaces Prefect's internal `maintain_concurrency_lease`, whose arguments it takes.
    """
    context = FlowRunContext.get()
    if context is not None and isinstance(context.flow, JobFlow):
        options[_RAISES] = False
    maintained: AbstractContextManager[None] = _maintain(*arguments, **options)
    return maintained


if _maintain is not None:  # Prefect has no setting for it
    vars(flow_engine)[_NAME] = maintain_lease
