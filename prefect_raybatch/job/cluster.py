"""The Ray cluster of a job and what its CPU stages take of it: `cluster` of a job file."""

from __future__ import annotations

import math
import re
from typing import Literal

from pydantic import PrivateAttr, field_validator, model_validator

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.checks import SERVER
from prefect_raybatch.job.cluster_access import ClusterAccess
from prefect_raybatch.job.form import field
from prefect_raybatch.job.group import Group
from prefect_raybatch.job.kubernetes import Kubernetes

RAY_CLUSTER = re.compile(r"ray-cluster/[a-z0-9][a-z0-9-]*")


class Stage(Group):
    """Resources of a CPU stage."""

    num_cpus: float = field(1, 0.5, title="CPUs a task", text="Logical CPUs.", gt=0)
    concurrency: int | None = field(
        2, None, title="Most tasks at once", text="By default Ray decides.", gt=0
    )
    memory: int | None = field(3, None, title="Memory a task", text="In bytes.", gt=0)


LOCAL = "local"  # an address, as Ray has it: a cluster that is started here


class Cluster(Group):
    """Which Ray cluster, and what the CPU stages take of it."""

    address: str | None = field(
        1,
        None,
        title="Address",
        text="host:port or auto for a running cluster, local for one that is started here and "
        "stopped at the end. By default the environment's RAY_ADDRESS, else local.",
    )
    prepare: Stage = field(2, Stage(), title="Prepare stage", text="Read, template, tokens.")
    finish: Stage = field(
        3, Stage(num_cpus=0.25), title="Finish stage", text="Detokenize, postprocess, write."
    )
    job_server: str | None = field(
        4,
        None,
        title="Job server",
        text="http(s)://host:8265 of a Ray cluster: the run works there as a Ray job and outlives "
        "the flow's process; a retry finds it again.",
    )
    on_crash: Literal["reattach", "stop"] = field(
        5,
        "reattach",
        title="Job of a crashed flow run",
        text="reattach: it goes on and the next try follows it. stop: the next try stops it and "
        "begins another. Cancelling always stops it.",
    )
    price_per_gpu_hour: float | None = field(
        6,
        None,
        title="Price of a GPU-hour",
        text="In any currency: costs are in the same. Of cards that price_by_card does not name; "
        "without a price there are no costs.",
        gt=0,
        allow_inf_nan=False,
    )
    price_by_card: dict[str, float] = field(
        7,
        {},
        title="Price of a GPU-hour by card",
        text="Such as {H100: 2.5, L4: 0.6}, by Ray's names of cards.",
    )
    block: str | None = field(
        8,
        None,
        title="RayCluster block",
        text="Saved RayCluster block, as ray-cluster/NAME, in place of address and job_server: it "
        "says which of them, with Ray's token and headers.",
    )
    kubernetes: Kubernetes = field(
        9,
        Kubernetes(),
        title="Cluster on Kubernetes",
        text="Made by KubeRay for the run, and deleted at its end.",
    )
    _access: ClusterAccess | None = PrivateAttr(None)  # of the block; in no record

    @property
    def access(self) -> ClusterAccess:
        """Return how to reach the cluster. Raises `ConfigError` for a block that nobody has
        loaded."""
        if self._access is not None:
            return self._access
        if self.block is not None:
            raise ConfigError(
                f"cluster.block: {self.block} is not loaded; give the job to `with_blocks` first"
            )
        return ClusterAccess(self.address, self.job_server, kubernetes=self.kubernetes.asked)

    @property
    def access_if_loaded(self) -> ClusterAccess | None:
        """Return how to reach the cluster if its block is loaded, else None."""
        return self._access

    def with_access(self, access: ClusterAccess) -> Cluster:
        """Return it with the access that its block gives."""
        made = self.model_copy()
        made._access = access
        return made

    @property
    def elsewhere(self) -> bool:
        """Return whether the job names a running cluster to join, or one to create on
        Kubernetes."""
        address = self.address not in (None, LOCAL)
        return bool(address or self.block or self.kubernetes.asked)

    @property
    def priced(self) -> bool:
        """Return whether any price is given."""
        return self.price_per_gpu_hour is not None or bool(self.price_by_card)

    @field_validator("price_by_card")
    @classmethod
    def _prices(cls, value: dict[str, float]) -> dict[str, float]:
        for card, price in value.items():
            if not (price > 0 and math.isfinite(price)):
                raise ValueError(f"{card}: {price} is no price; write one greater than 0")
        return value

    @field_validator("address")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("ray://"):
            raise ValueError(
                "ray:// (the Ray client) ends the work after 30 s without network; run the flow "
                "on the cluster and use auto, or give the GCS address host:6379"
            )
        return value

    @field_validator("job_server")
    @classmethod
    def _job_server(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if value.startswith("ray://"):
            raise ValueError(
                "ray:// (the Ray client) ends the work after 30 s without network, so nothing "
                "would outlive the flow; write the job server's http://host:8265"
            )
        if not SERVER.match(value):
            raise ValueError(f"{value!r} is no job server; write http://host:8265, no more")
        return value.rstrip("/")

    @field_validator("block")
    @classmethod
    def _block(cls, value: str | None) -> str | None:
        if value is not None and not RAY_CLUSTER.fullmatch(value):
            raise ValueError(
                f"{value!r} names no RayCluster block; write ray-cluster/NAME, as it is saved"
            )
        return value

    @model_validator(mode="after")
    def _one_way(self) -> Cluster:
        beside = [name for name in ("address", "job_server", "block") if getattr(self, name)]
        if self.kubernetes.asked and beside:
            raise ValueError(
                f"kubernetes makes a cluster of the run's own, and {beside[0]} names another; keep "
                "one"
            )
        if self.block and (self.address or self.job_server):
            raise ValueError(
                "block says where the cluster is, as address and job_server do; keep one"
            )
        if self.address and self.job_server:
            raise ValueError(
                "address is for a driver in the flow's process, job_server for one on the "
                "cluster; keep one"
            )
        return self
