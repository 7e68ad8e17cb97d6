"""What a job says of files that it reads by http(s)."""

from __future__ import annotations

from prefect_raybatch.job.form import field
from prefect_raybatch.job.group import Group


class Web(Group):
    """Files by http(s)."""

    max_mb: int = field(
        1,
        10_000,
        title="Most megabytes",
        text="Of a file, which comes into a temporary one on the machine that plans the run.",
        gt=0,
        le=10_000_000,
    )
    allow_private: bool = field(
        2,
        False,
        title="Private addresses",
        text="source.uri may name hosts of this network, and ports other than 80 and 443. "
        "Link-local addresses stay refused.",
    )
