"""Hugging Face datasets through the `datasets` library: from the Hub at a commit, streamed.

Images and other media are not decoded: they are structs of {bytes, path}, as a job's image columns
take them. A dataset may name files outside of itself, on this machine or on other hosts. They are
not opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import pyarrow as pa

from prefect_raybatch.bounded import within
from prefect_raybatch.errors import ConfigError, SourceError, StoreUnavailable
from prefect_raybatch.job.table_formats import hub_name, scheme_of
from prefect_raybatch.source.filters import Filter
from prefect_raybatch.source.tables.base import TablePin, TableSource, translate_errors
from prefect_raybatch.source.tables.huggingface_folder import open_saved
from prefect_raybatch.source.tables.huggingface_rows import (
    ROWS_AT_ONCE,
    as_typed,
    choose_split,
    has_media,
    media_in,
    stored_type,
)
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.storage import read_ahead

HUB_SECONDS = 20.0  # for the Hub to resolve a revision to a commit
MEDIA_AT_ONCE = 64  # rows whose media are fetched and held together
MEDIA_THREADS = 8
FOOTERS = 50  # Parquet files whose footers are read for the number of rows


def open_huggingface(source: ReadSpec) -> TableSource:
    """Open a dataset of the Hub (`hf://datasets/OWNER/NAME`), or a folder of `save_to_disk`."""
    if scheme_of(source.uris[0]) == "hf":
        return _of_hub(source)
    return open_saved(source)


def _of_hub(source: ReadSpec) -> TableSource:
    name = hub_name(source.uris[0])
    token = _token(source)
    what = f"source.uri: the Hugging Face dataset {name.repository}"
    revision = name.revision or source.version
    with _explained(what, token):
        commit, made = _commit(name.repository, revision, token)
        builder = _builder(name.repository, commit, source.config, token)
        _refuse_elsewhere(what, builder, name.repository, commit)
        split = choose_split(source.split, list(builder.as_streaming_dataset()), "source.split")
        uri = f"hf://datasets/{name.repository}"
        pin = TablePin(
            format="huggingface",
            uri=uri,
            id=f"{uri}/{builder.config.name}/{split}",
            version=commit,
            made=made,
        )
        return HubSource(builder, split, pin, token, source.config)


def _token(source: ReadSpec) -> str | None:
    """Return the token for the Hub in source.options; None if the Hub's library is to look for it.

    Raises ConfigError if the environment variable of `token_env` is not set.
    """
    variable = source.options.get("token_env")
    if variable is None:
        return source.options.get("token")
    value = os.environ.get(str(variable))
    if not value:
        raise ConfigError(
            f"source.options.token_env: environment variable {variable} is not set. Set it where "
            "the run is planned"
        )
    return value


def _commit(repository: str, revision: str | None, token: str | None) -> tuple[str, str | None]:
    """Return (the commit that `revision` refers to now, its time in ISO 8601 or None).

    `revision` None: the newest. Raises SourceError if it does not exist.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    def ask() -> Any:
        api = HfApi(token=token)
        return api.dataset_info(repository, revision=revision, timeout=HUB_SECONDS)

    try:
        found = within(HUB_SECONDS, ask)
    except RevisionNotFoundError:
        raise SourceError(
            f"source.version: the Hugging Face dataset {repository} has no revision {revision!r} "
            "(a commit, branch or tag), or no longer. Choose another, or remove it to read the "
            "newest"
        ) from None
    made = found.last_modified
    return str(found.sha), None if made is None else made.isoformat(timespec="seconds")


def _builder(
    repository: str, commit: str, config: str | None, token: str | None, **more: Any
) -> Any:
    """Return the library's reader of a dataset at a commit; `more` are its options.

    Raises ConfigError if `config` is not one of its configurations, or is None and it has several.
    """
    from datasets import get_dataset_config_names, load_dataset_builder

    # With the scheme: without it a local folder of that name would be taken.
    uri = f"hf://datasets/{repository}"
    try:
        return load_dataset_builder(uri, config, revision=commit, token=token, **more)
    except ValueError as error:
        names = get_dataset_config_names(uri, revision=commit, token=token)
        if config in names or (config is None and len(names) == 1):
            raise
        said = (
            "has several configurations" if config is None else f"has no configuration {config!r}"
        )
        raise ConfigError(
            f"source.config: the Hugging Face dataset {repository} {said} (configurations: "
            f"{', '.join(names)}). Choose one"
        ) from error


def _refuse_elsewhere(what: str, builder: Any, repository: str, commit: str) -> None:
    """Raise SourceError unless all data files belong to the dataset at its commit.

    The card of a dataset may name any file, and if the Hub fails, the library takes files of an
    earlier commit from its cache. Raises StoreUnavailable if there are no files. `what` names the
    dataset in errors.
    """
    own = _own(repository, commit)
    files = [str(f) for found in (builder.config.data_files or {}).values() for f in found]
    if not files:
        raise StoreUnavailable(f"{what}: its files cannot be listed. Try again later")
    for file in files:
        if not file.rpartition("::")[2].startswith(own):
            raise SourceError(
                f"{what} lists {file!r} as one of its files, which is outside the dataset and is "
                "not read. Download it, and set source.uri to your copy"
            )


def _own(repository: str, commit: str) -> str:
    """Return the prefix of the paths of a dataset's files at a commit."""
    return f"hf://datasets/{repository}@{commit}/"


class HubSource(TableSource):
    """A split of a dataset at a commit, streamed from the Hub in the order of its files."""

    def __init__(
        self, builder: Any, split: str, pin: TablePin, token: str | None, config: str | None
    ) -> None:
        self._builder, self._split, self._token, self._config = builder, split, token, config
        self.pin = pin
        self._repository = hub_name(pin.uri).repository
        data = builder.as_streaming_dataset(split)
        if data.features is not None:
            schema = data.features.arrow_schema
        else:  # text files, which have no types before they are read
            first = next(data.with_format("arrow").iter(ROWS_AT_ONCE), None)
            schema = pa.schema([]) if first is None else first.schema
        self.schema = pa.schema([pa.field(f.name, stored_type(f.type)) for f in schema])

    @property
    def what(self) -> str:
        return f"source.uri: the Hugging Face dataset {self._repository} at {self.pin.version}"

    @cached_property
    def rows(self) -> int | None:  # type: ignore[override]
        """Return the number of rows from the dataset's card, else from its Parquet footers.

        If the card does not have it, returns None for files other than Parquet, and for more than
        FOOTERS files.
        """
        told = self._builder.info.splits or {}
        parts = self._split.split("+")
        if all(part in told and told[part].num_examples for part in parts):
            return sum(int(told[part].num_examples) for part in parts)
        files = [str(f) for part in parts for f in self._builder.config.data_files.get(part, ())]
        if not self._is_parquet or not 0 < len(files) <= FOOTERS:
            return None
        from pyarrow.parquet import read_metadata

        with _explained(self.what, self._token):
            return sum(int(read_metadata(self._hub.open(file)).num_rows) for file in files)

    def batches(
        self, columns: Sequence[str] | None, filter: Filter | None
    ) -> Iterator[pa.RecordBatch]:
        names = list(columns or self.schema.names)
        with _explained(self.what, self._token):
            before = 0
            for table in self._reader(names, filter).with_format("arrow").iter(ROWS_AT_ONCE):
                rows = as_typed(self.what, table, [self.schema.field(n) for n in names], before)
                before += rows.num_rows
                yield from self._with_media(rows)

    def _reader(self, names: Sequence[str], filter: Filter | None) -> Any:
        """Return a reader of all columns or, for Parquet, of the columns `names`.

        For Parquet it also skips row groups that cannot contain matching rows.
        """
        builder = self._builder
        if self._is_parquet:
            more: dict[str, Any] = {"columns": list(names), "batch_size": ROWS_AT_ONCE}
            if filter is not None and filter.skips(self.schema):
                more["filters"] = filter.expression(self.schema)
            builder = _builder(
                self._repository, self.pin.version, self._config, self._token, **more
            )
            _refuse_elsewhere(self.what, builder, self._repository, self.pin.version)
        return builder.as_streaming_dataset(self._split)

    @property
    def _is_parquet(self) -> bool:
        from datasets.packaged_modules.parquet.parquet import ParquetConfig

        return isinstance(self._builder.config, ParquetConfig)

    @property
    def _hub(self) -> Any:
        from huggingface_hub import HfFileSystem

        return HfFileSystem(token=self._token)

    def _with_media(self, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        """Yield the rows, with bytes filled in for the media files that they name by path.

        Only files of this dataset are read; for others the bytes stay null.
        """
        at = [i for i, field in enumerate(rows.schema) if has_media(field.type)]
        if not at:
            yield from rows.to_batches()
            return
        for start in range(0, rows.num_rows, MEDIA_AT_ONCE):
            part = rows.slice(start, MEDIA_AT_ONCE)
            values = {i: part.column(i).to_pylist() for i in at}
            named = [m for column in values.values() for v in column for m in media_in(v)]
            own = _own(self._repository, self.pin.version)
            open_ones = [
                one
                for one in named
                if one["bytes"] is None and str(one["path"]).rpartition("::")[2].startswith(own)
            ]
            paths = [str(one["path"]) for one in open_ones]
            found = read_ahead(self._fetched, paths, MEDIA_THREADS, MEDIA_AT_ONCE)
            for one, data in zip(open_ones, found, strict=True):
                one["bytes"] = data
            for i, column in values.items():
                field = part.schema.field(i)
                part = part.set_column(i, field, pa.array(column, field.type))
            yield from part.combine_chunks().to_batches()

    def _fetched(self, path: str) -> bytes:
        import fsspec

        # A file within an archive is named as zip://NAME::hf://datasets/...
        options = {"hf": {"token": self._token}} if "::" in path else {"token": self._token}
        with fsspec.open(path, "rb", **options) as file:
            return bytes(file.read())


def _status(error: BaseException | None) -> int | None:
    """Return the HTTP status in an error of the Hub's library, None if there is none.

    If the error itself has no status, the errors that caused it are searched.
    """
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return int(status)
        error = error.__cause__ or error.__context__
    return None


def _unanswered(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, means that the Hub could not be reached.

    The Hub's library raises errors of its HTTP client, which differs between versions, so they are
    recognized by the names of their classes.
    """
    while error is not None:
        own = (kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("http"))
        if isinstance(error, ConnectionError | TimeoutError) or "TransportError" in own:
            return True
        error = error.__cause__ or error.__context__
    return False


def _denied(what: str, error: Exception, scrub: Callable[[str], str]) -> SourceError:
    said = scrub(" ".join(str(error).split()))[:300]
    return SourceError(
        f"{what}: Hugging Face answered {_status(error)}: access denied ({said}). Check HF_TOKEN "
        "or source.options.token_env; for a gated dataset, request access on its page"
    )


@contextmanager
def _explained(what: str, token: str | None) -> Iterator[None]:
    """Within the block, which reads `what`, convert library errors to ours, hiding the token."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    def scrub(text: str) -> str:
        return text.replace(token, "***") if token else text

    with translate_errors(what, scrub):
        try:
            yield
        except (ConfigError, SourceError, StoreUnavailable):
            raise
        except OfflineModeIsEnabled:
            raise SourceError(
                f"{what} is streamed from the Hub, but HF_HUB_OFFLINE is set. Unset it where the "
                "run is planned, or set source.uri to a folder written by save_to_disk"
            ) from None
        except RepositoryNotFoundError as error:
            if isinstance(error, GatedRepoError):
                raise _denied(what, error, scrub) from None
            raise SourceError(
                f"{what} does not exist, or is private and the token may not read it. Check "
                "OWNER/NAME, and HF_TOKEN or source.options.token_env"
            ) from None
        except Exception as error:
            status, said = _status(error), scrub(" ".join(str(error).split()))[:300]
            if status in (401, 403):
                raise _denied(what, error, scrub) from None
            if status == 429 or (status is not None and status >= 500) or _unanswered(error):
                raise StoreUnavailable(f"{what}: {said or type(error).__name__}") from None
            if "scripts are no longer supported" in said:
                raise SourceError(
                    f"{what} is a Python script, which is never run. Convert it to Parquet (its "
                    "page may have a branch refs/convert/parquet: append @refs/convert/parquet to "
                    "source.uri)"
                ) from None
            raise
