"""The block that names a Ray cluster."""

from __future__ import annotations

from typing import Any

from prefect.blocks.abstract import CredentialsBlock
from prefect.types import SecretDict
from pydantic import ConfigDict, HttpUrl, SecretStr, field_validator, model_validator

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.flow.blocks.form import FormBlock
from prefect_raybatch.flow.blocks.store import load_block, reference
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import SERVER
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.job.group import field
from prefect_raybatch.job.kubernetes import Kubernetes
from prefect_raybatch.remote.client import connect_client

CLIENT_REFUSED = (
    "ray:// (Ray Client) is not supported, because it ends the work after 30 s without network; "
    "write the GCS address host:6379, or set job_server to http://host:8265"
)


class RayCluster(FormBlock, CredentialsBlock):
    """A Ray cluster: a running one, or one that KubeRay creates on Kubernetes for each run.

    If no cluster is named, a local one is started for the run and stopped afterwards.

    Attributes:
        address: Address of a running cluster that the flow's process can join.
        job_server: URL of the job server of a running cluster.
        headers: HTTP headers for the job server.
        token: Ray's authentication token, if the cluster requires one.
        kubernetes: Cluster to create on Kubernetes for each run.

    Example:
        Run a job on a saved cluster:
        ```python
        from prefect_raybatch.flow.blocks import RayCluster

        cluster = RayCluster.load("BLOCK_NAME")
        job = cluster.apply(job)
        ```
    """

    _block_type_name = "Ray Cluster"
    _block_type_slug = "ray-cluster"
    _logo_url = HttpUrl("https://github.com/ray-project.png?size=200")
    _documentation_url = HttpUrl("https://docs.ray.io/en/latest/cluster/getting-started.html")

    model_config = ConfigDict(hide_input_in_errors=True)  # input may hold keys

    address: str | None = field(
        None,
        title="Address",
        text="Address of a running Ray cluster: host:6379 (the GCS), or auto. If no "
        "cluster is named, a local one is started.",
    )
    job_server: str | None = field(
        None,
        title="Job server",
        text="URL of a Ray job server, such as http://host:8265. Runs are submitted "
        "as Ray jobs, so they survive the flow's process.",
    )
    headers: SecretDict | None = field(
        None, title="Headers", text="HTTP headers for the job server, stored as a secret."
    )
    token: SecretStr | None = field(
        None,
        title="Token",
        text="Ray's authentication token, if the cluster requires one. It is sent to "
        "a job server as a bearer token.",
    )
    kubernetes: Kubernetes = field(
        Kubernetes(),
        title="Cluster on Kubernetes",
        text="Create a Ray cluster with KubeRay for each run and delete it "
        "afterwards. The fields are those of cluster.kubernetes in a job.",
    )

    @field_validator("address")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("ray://"):
            raise ValueError(CLIENT_REFUSED)
        if value is not None and "://" in value:
            raise ValueError(
                "is a URL; write host:6379 or auto, or put the URL into the field job_server"
            )
        return value or None

    @field_validator("job_server")
    @classmethod
    def _job_server(cls, value: str | None) -> str | None:
        if not value:
            return None
        if value.startswith("ray://"):
            raise ValueError(CLIENT_REFUSED)
        if not SERVER.match(value):  # not quoted: it may hold a user and a password
            raise ValueError(
                "is not the URL of a job server; write only http://host:8265, and put keys into "
                "headers or token"
            )
        return value.rstrip("/")

    @model_validator(mode="after")
    def _one_way(self) -> RayCluster:
        if self.kubernetes.asked and (self.address or self.job_server):
            raise ValueError(
                "kubernetes creates a cluster, but address or job_server names an existing one; "
                "remove one of them"
            )
        if self.address and self.job_server:
            raise ValueError(
                "address and job_server exclude each other: the driver runs in the flow's process, "
                "or on the cluster; remove one of them"
            )
        if self.headers and not (self.job_server or self.kubernetes.asked):
            raise ValueError(
                "headers are for the job server, but job_server is not set; set it, or remove "
                "headers"
            )
        if self.token and not (self.address or self.job_server or self.kubernetes.asked):
            raise ValueError(
                "token is for a running cluster, but none is named; set address or job_server, or "
                "remove token"
            )
        return self

    def apply(self, job: BatchJob) -> BatchJob:
        """Return the job with this cluster in place of the one that the job names.

        If this block has a token or headers, which a job cannot hold, the job names the block.
        Raises `ConfigError` if such a block is not saved, or if the job cannot run on the cluster.
        """
        value = job.to_dict()
        places = {
            "address": self.address,
            "job_server": self.job_server,
            "block": None,
            "kubernetes": self.kubernetes.model_dump(exclude_defaults=True),
        }
        if self.token or self.headers:
            try:
                places = {**dict.fromkeys(places), "block": reference(self)}
            except ValueError as error:
                raise ConfigError(f"cluster: {error}") from None
        kept = {k: v for k, v in value.get("cluster", {}).items() if k not in places}
        value["cluster"] = {**kept, **{k: v for k, v in places.items() if v}}
        return BatchJob.from_dict(value, "job on the RayCluster block")

    def access(self, name: str | None = None) -> ClusterAccess:
        """Return how to reach the cluster, with secrets in clear text.

        `name` is the name of the saved block.
        """
        token = None if self.token is None else self.token.get_secret_value()
        headers = self.request_headers()
        made = self.kubernetes.asked
        return ClusterAccess(self.address, self.job_server, headers, token, name, made)

    def request_headers(self) -> dict[str, str]:
        """Return the headers for the job server, including the token; they are secret."""
        headers = {} if self.headers is None else dict(self.headers.get_secret_value())
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token.get_secret_value()}"
        return {str(name): str(value) for name, value in headers.items()}

    def get_client(self) -> Any:
        """Return a `ray.job_submission.JobSubmissionClient` for the job server.

        Contacts the server. Raises `ConfigError` if `job_server` is not set, and `ConnectionError`
        if the server does not answer.
        """
        if self.job_server is None:
            raise ConfigError("this RayCluster block has no job_server; set it to http://host:8265")
        return connect_client(self.job_server, self.request_headers())


def access_of(name: str) -> ClusterAccess:
    """Return how to reach the cluster of the saved block ray-cluster/NAME.

    Raises `ConfigError` if the block cannot be loaded.
    """
    block = load_block("cluster.block", name)
    if not isinstance(block, RayCluster):
        raise ConfigError(
            f"cluster.block: {name!r} is not a RayCluster block; name one as ray-cluster/NAME"
        )
    return block.access(name)
