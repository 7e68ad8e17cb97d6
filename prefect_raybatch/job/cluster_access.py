"""How to reach a job's cluster and authenticate, from a block or from the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prefect_raybatch.job.kubernetes import Kubernetes


@dataclass(frozen=True)
class ClusterAccess:
    """The address or the job server of a cluster, both None for a local one.

    `token` is Ray's, by default that of the environment; `headers` are sent with each request to
    the job server, including the token. `block` is the block that these come from, None for the
    job. No secret is in the repr.
    """

    address: str | None = None
    job_server: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    token: str | None = field(default=None, repr=False)
    block: str | None = None
    kubernetes: Kubernetes | None = None

    @property
    def remote(self) -> bool:
        """Return whether runs are jobs of a Ray job server and so work in no process of ours."""
        return self.job_server is not None or self.kubernetes is not None
