"""Starts the stage of a hosted model, with a rate limiter that all workers of a run share."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any

from prefect_raybatch.spec.endpoint import EndpointSpec
from prefect_raybatch.stages.endpoint.client import SharedLimiter
from prefect_raybatch.stages.endpoint.limiter import BatchCounts, Limiter, Signal, Usage
from prefect_raybatch.stages.endpoint.stage import EndpointLaunch
from prefect_raybatch.stages.engine import EngineLaunch
from prefect_raybatch.storage import Store


class ActorLimiter:
    """A handle to the run's rate limiter, which is a Ray actor, for use in any worker."""

    def __init__(self, actor: Any):
        self._actor = actor

    def ask(self, tokens: int) -> tuple[float, int]:
        import ray

        wait, number = ray.get(self._actor.ask.remote(tokens))
        return wait, number

    def settle(
        self,
        number: int,
        signal: Signal,
        used: tuple[int, int] | None = None,
        pause: float = 0.0,
        why: str = "",
    ) -> None:
        import ray

        ray.get(self._actor.settle.remote(number, signal, used, pause, why))

    def lower(self, requests: float | None, tokens: float | None) -> None:
        self._actor.lower.remote(requests, tokens)

    def bill(self, prompt_tokens: int, output_tokens: int) -> None:
        import ray

        ray.get(self._actor.bill.remote(prompt_tokens, output_tokens))

    def note_batches(self, shard: int, batches: BatchCounts) -> None:
        self._actor.note_batches.remote(shard, batches)

    def usage(self) -> Usage:
        import ray

        (usage,) = ray.get([self._actor.usage.remote()])
        return usage  # type: ignore[no-any-return]


def limiter_of(spec: EndpointSpec, store: Store, others: float) -> SharedLimiter:
    """Return the rate limiter that all requests of a run to a hosted model share.

    It is a Ray actor, or an object in this process if this process is not connected to Ray. For
    `others` seconds from now, requests of earlier attempts may still count against the limits per
    minute.
    """
    import ray

    per_minute = (spec.requests_per_minute, spec.tokens_per_minute)
    limits = (*per_minute, spec.max_in_flight, spec.timeout)
    if not ray.is_initialized():
        return Limiter(*limits, others=others)
    name = "raybatch-limiter-" + hashlib.sha256(store.uri.encode()).hexdigest()[:16]
    options = {"num_cpus": 0, "max_concurrency": 1, "name": name, "get_if_exists": True}
    return ActorLimiter(ray.remote(Limiter).options(**options).remote(*limits, others=others))


def endpoint_launch(
    launch: EngineLaunch, spec: EndpointSpec, store: Store, run: str, limiter: SharedLimiter
) -> EndpointLaunch:
    """Return the launch settings of a hosted model's stage: `launch`, API key and rate limiter.

    `run` identifies the run in names on the server. Raises `ConfigError` if the environment
    variable of the key is not set.
    """
    given = {one.name: getattr(launch, one.name) for one in fields(EngineLaunch)}
    return EndpointLaunch(
        **{**given, "arguments": {}, "env": {}, "early_stop": "off"},
        endpoint=spec,
        key=spec.api_key(),
        limiter=limiter,
        store=store,
        run=run,
    )
