"""The options for files that a job reads by http(s)."""

from __future__ import annotations

from prefect_raybatch.job.form import field
from prefect_raybatch.job.group import Group


class Web(Group):
    """Limits for files that are read by http(s)."""

    max_mb: int = field(
        1,
        10_000,
        title="Maximum file size",
        text="Largest file to download, in MB. A file is stored temporarily on the "
        "machine that plans the run.",
        gt=0,
        le=10_000_000,
    )
    allow_private: bool = field(
        2,
        False,
        title="Private addresses",
        text="Allow source.uri to name hosts in a private network and ports other "
        "than 80 and 443. Link-local addresses are always refused.",
    )
