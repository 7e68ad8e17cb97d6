"""Which rows a run reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prefect_raybatch.job.csv_options import Csv
from prefect_raybatch.job.source import Web
from prefect_raybatch.spec.options import HiddenOptions


@dataclass(frozen=True, kw_only=True)
class ReadSpec:
    """What to read.

    `format` is as the job names it, `auto` to infer it from the files; `table_format` is the kind
    of table that format or scheme tell, None if only a look at the files can. `stored`: the URIs
    name files and folders, not a table in a catalog. `limit` is the number of first rows to read,
    None for all. `options` are s3fs options, `catalog` pyiceberg properties.
    """

    uris: tuple[str, ...] = field(repr=False)  # may be signed
    format: str
    table_format: str | None
    stored: bool
    limit: int | None
    columns: tuple[str, ...] | None
    filter: str | None
    version: str | None
    query: str | None
    types: Mapping[str, str]
    config: str | None
    split: str | None
    csv: Csv
    web: Web
    catalog: HiddenOptions
    options: HiddenOptions
