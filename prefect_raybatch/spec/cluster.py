"""The Ray cluster of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.cluster import ClusterAccess, Stage


@dataclass(frozen=True)
class Prices:
    """Prices of a GPU-hour, in a `currency` ("" if the job names none).

    `by_card` maps GPU models, by Ray's names, to prices; `hour` is the price for all others, None
    if not set.
    """

    hour: float | None
    by_card: Mapping[str, float]
    currency: str = ""

    def __bool__(self) -> bool:
        """Return whether any price is set."""
        return self.hour is not None or bool(self.by_card)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The cluster that a run joins or starts, its prices, and the CPUs that stages and engines use.

    `prepare` and `finish` are the job's settings of these two stages. `name` is the job's name,
    which other users of the cluster see. `loaded` says how to reach the cluster; None while its
    Prefect block, named `block`, is not loaded. `engine_cpus` are the logical CPUs of one engine,
    `accelerator` is Ray's name of the GPU model that the job asks for. `engine_env` are the
    environment variables of engines; None if the model is hosted, because there are no engines.
    `core_in_actor`: on a GPU, vLLM's core runs in the process of an engine's actor.
    """

    name: str
    loaded: ClusterAccess | None
    block: str | None
    prepare: Stage
    finish: Stage
    engine_cpus: float
    accelerator: str | None
    prices: Prices
    engine_env: Mapping[str, str] | None = field(repr=False)
    core_in_actor: bool

    @property
    def access(self) -> ClusterAccess:
        """How to reach the cluster. Raises `ConfigError` if its block is not loaded."""
        if self.loaded is None:
            raise ConfigError(
                f"cluster.block: {self.block} is not loaded; give the job to `with_blocks` first"
            )
        return self.loaded
