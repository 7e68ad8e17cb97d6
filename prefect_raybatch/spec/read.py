"""The input rows that a run reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prefect_raybatch.job.csv_options import Csv
from prefect_raybatch.job.source import Web
from prefect_raybatch.spec.options import HiddenOptions


@dataclass(frozen=True, kw_only=True)
class ReadSpec:
    """The input of a run: where it is, and which part of it is read.

    `format` is as the job names it, `auto` to infer it from the files; `table_format` is the table
    format that `format`, `catalog` or the URI's scheme implies, None if none does. `stored`: the
    URIs name files and folders, not a table in a catalog. `served_as` are the model names that
    requests of a batch file may use, None for any. `limit` is the number of first rows to read,
    None for all. `sample` is the number of rows to choose by a hash of their numbers and
    `sample_seed`. `columns` are the columns to read, None for all; `version` is the version of a
    table. `config` and `split` choose a part of a Hugging Face data set. `catalog` has pyiceberg
    properties.
    """

    uris: tuple[str, ...] = field(repr=False)  # may be signed
    format: str
    table_format: str | None
    stored: bool
    served_as: tuple[str, ...] | None
    limit: int | None
    sample: int | None
    sample_seed: int
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

    @property
    def most_rows(self) -> int | None:
        """Maximum number of rows to read, by `limit` or `sample`; None if neither is set."""
        return self.sample if self.limit is None else self.limit
