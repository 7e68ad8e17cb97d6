"""Where the result of a run goes."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.spec.options import HiddenOptions


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the files of a result are laid out.

    `compact`: in input order, in files of about `file_bytes`; otherwise the pieces stay, with a
    manifest. `read_back`: each file is read completely after it was written.
    """

    compact: bool
    file_bytes: int
    read_back: bool


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """Where the result goes: a folder with a run directory for each run, and `targets`.

    The result is published to the targets. `options` are s3fs options.
    """

    uri: str
    options: HiddenOptions
    targets: tuple[PublishTarget, ...]
    layout: Layout
