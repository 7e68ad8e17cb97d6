"""The Ray cluster of a job and the resources of its CPU stages: `cluster` of a job file."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Literal

from pydantic import PrivateAttr, field_validator, model_validator

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.checks import SERVER
from prefect_raybatch.job.group import Group, field
from prefect_raybatch.job.kubernetes import Kubernetes

CURRENCY = re.compile(r"[A-Z]{3}")
RAY_CLUSTER = re.compile(r"ray-cluster/[a-z0-9][a-z0-9-]*")


@dataclasses.dataclass(frozen=True)
class ClusterAccess:
    """How to reach a cluster: by `address`, by `job_server`, or by creating it from `kubernetes`.

    If all three are None, the environment variable RAY_ADDRESS names the cluster; without it, the
    cluster is a local one. `token` is Ray's authentication token; None stands for the environment's
    token. `headers`, which include the token, are sent with each request to the job server. `block`
    names the Prefect block from which these settings were loaded. It is None if the job itself sets
    them. The repr hides token and headers.
    """

    address: str | None = None
    job_server: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    token: str | None = dataclasses.field(default=None, repr=False)
    block: str | None = None
    kubernetes: Kubernetes | None = None

    @property
    def remote(self) -> bool:
        """Return whether runs are submitted as Ray jobs instead of being driven by this process."""
        return self.job_server is not None or self.kubernetes is not None


class Stage(Group):
    """Resources of the tasks of a CPU stage."""

    num_cpus: float = field(
        0.5, title="CPUs per task", text="Logical CPUs that Ray reserves for each task.", gt=0
    )
    concurrency: int | None = field(
        None,
        title="Concurrent tasks",
        text="Maximum number of tasks that run at the same time. Default: chosen by Ray.",
        gt=0,
    )
    memory: int | None = field(
        None,
        title="Memory per task",
        text="Memory that Ray reserves for each task, in bytes. Default: none.",
        gt=0,
    )


LOCAL = "local"  # an address, as in Ray: start a cluster on this machine


class Cluster(Group):
    """The Ray cluster to run on and the resources of the CPU stages."""

    address: str | None = field(
        None,
        title="Address",
        text="Address of a running Ray cluster (host:port, or auto), or local to "
        "start one for this run. Default: the environment variable RAY_ADDRESS, otherwise local.",
    )
    prepare: Stage = field(
        Stage(),
        title="Prepare stage",
        text="Resources of the tasks that read rows, build prompts and tokenize them.",
    )
    finish: Stage = field(
        Stage(num_cpus=0.25),
        title="Finish stage",
        text="Resources of the tasks that detokenize, postprocess and write the answers.",
    )
    job_server: str | None = field(
        None,
        title="Job server",
        text="URL of a Ray job server, such as http://host:8265. The run is submitted "
        "as a Ray job, so it survives the flow's process; a retry reattaches to it.",
    )
    on_crash: Literal["reattach", "stop"] = field(
        "reattach",
        title="After a flow crash",
        text="What to do with the Ray job of a crashed flow run. reattach: it "
        "continues and the retry follows it. stop: the retry stops it and starts another. "
        "Cancelling the flow run always stops the job.",
    )
    price_per_gpu_hour: float | None = field(
        None,
        title="Price per GPU-hour",
        text="Price of a GPU-hour, for GPUs that price_by_card does "
        "not name. Default: costs are not calculated.",
        gt=0,
        allow_inf_nan=False,
    )
    price_by_card: dict[str, float] = field(
        {},
        title="Price per GPU model",
        text="Price of a GPU-hour by GPU model, with Ray's names. Example: {H100: 2.5, L4: 0.6}.",
    )
    block: str | None = field(
        None,
        title="RayCluster block",
        text="Saved RayCluster block, as ray-cluster/NAME. It says where the cluster "
        "is, and holds its token and headers.",
    )
    kubernetes: Kubernetes = field(
        Kubernetes(),
        title="Cluster on Kubernetes",
        text="Create a Ray cluster with KubeRay for this run and delete it afterwards.",
    )
    currency: str | None = field(
        None,
        title="Currency",
        text="Currency of the prices and of limits.max_cost, shown after each cost. Example: EUR. "
        "Default: none is shown.",
    )
    _access: ClusterAccess | None = PrivateAttr(None)  # loaded from the block; never recorded

    @property
    def access(self) -> ClusterAccess:
        """How to reach the cluster.

        Raises `ConfigError` if the job names a Prefect block that is not loaded yet. The function
        `with_blocks` loads it.
        """
        if self._access is not None:
            return self._access
        if self.block is not None:
            raise ConfigError(
                f"cluster.block: {self.block} is not loaded; give the job to `with_blocks` first"
            )
        return ClusterAccess(self.address, self.job_server, kubernetes=self.kubernetes.asked)

    @property
    def access_if_loaded(self) -> ClusterAccess | None:
        """Return the access that `with_access` set from a block; None if there is none."""
        return self._access

    def with_access(self, access: ClusterAccess) -> Cluster:
        """Return a copy that reaches its cluster through `access`, as loaded from its block."""
        made = self.model_copy()
        made._access = access
        return made

    @property
    def elsewhere(self) -> bool:
        """Return whether the engines may run on other machines than the one that starts the job.

        True if the job sets an address other than local, a job server, a block or Kubernetes. The
        environment variable RAY_ADDRESS is not considered.
        """
        address = self.address not in (None, LOCAL)
        return bool(address or self.job_server or self.block or self.kubernetes.asked)

    @property
    def priced(self) -> bool:
        """Return whether any price of a GPU-hour is set."""
        return self.price_per_gpu_hour is not None or bool(self.price_by_card)

    @field_validator("currency")
    @classmethod
    def _currency(cls, value: str | None) -> str | None:
        if value is not None and not CURRENCY.fullmatch(value):
            raise ValueError(
                f"{value!r} is not a currency; write its code of three letters, such as EUR"
            )
        return value

    @field_validator("price_by_card")
    @classmethod
    def _prices(cls, value: dict[str, float]) -> dict[str, float]:
        for card, price in value.items():
            if not (price > 0 and math.isfinite(price)):
                raise ValueError(
                    f"{card}: {price} is not a valid price; write a number greater than 0"
                )
        return value

    @field_validator("address")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("ray://"):
            raise ValueError(
                "ray:// (the Ray client) ends the work after 30 s without network; run the flow "
                "on the cluster and write auto, or write the GCS address host:6379"
            )
        return value

    @field_validator("job_server")
    @classmethod
    def _job_server(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if value.startswith("ray://"):
            raise ValueError(
                "ray:// (the Ray client) ends the work after 30 s without network; write the URL "
                "of the job server, such as http://host:8265"
            )
        if not SERVER.match(value):
            raise ValueError(
                f"{value!r} is not the URL of a job server; write only http://host:8265"
            )
        return value.rstrip("/")

    @field_validator("block")
    @classmethod
    def _block(cls, value: str | None) -> str | None:
        if value is not None and not RAY_CLUSTER.fullmatch(value):
            raise ValueError(
                f"{value!r} is not the name of a RayCluster block; write ray-cluster/NAME"
            )
        return value

    @model_validator(mode="after")
    def _one_way(self) -> Cluster:
        beside = [name for name in ("address", "job_server", "block") if getattr(self, name)]
        if self.kubernetes.asked and beside:
            raise ValueError(
                f"kubernetes creates a cluster, but {beside[0]} names an existing one; remove one "
                "of them"
            )
        if self.block and (self.address or self.job_server):
            raise ValueError("block replaces address and job_server; remove one of them")
        if self.address and self.job_server:
            raise ValueError(
                "address and job_server exclude each other: the driver runs in the flow's process, "
                "or on the cluster; remove one of them"
            )
        return self
