"""The columns of a result, and the places it is written to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.job.tasks import VectorType
from prefect_raybatch.spec.options import HiddenOptions


@dataclass(frozen=True, kw_only=True)
class ParsingSpec:
    """vLLM's parsers that separate reasoning and tool calls from answers, and their columns.

    `reasoning` and `tool` name one parser each, None for none. The parsers get `tools` and, as
    `arguments`, the job's chat_template_kwargs.
    """

    reasoning: str | None
    tool: str | None
    reasoning_column: str
    tool_calls_column: str
    arguments: Mapping[str, Any]
    tools: tuple[Mapping[str, Any], ...] | None

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns that the parsers add, as {job field: column name}."""
        named = {}
        if self.reasoning:
            named["output.reasoning_column"] = self.reasoning_column
        if self.tool:
            named["output.tool_calls_column"] = self.tool_calls_column
        return named


@dataclass(frozen=True, kw_only=True)
class FinishSpec:
    """The columns of a result, and which answers are valid.

    `column` is the name of the answer column, `row_number` the name of the column with the row's
    number in the input. `columns` are the input columns that the result keeps, None for all.
    `types` are the Arrow types of the columns that the function `postprocess` returns, by column;
    None takes them from the first shard. `extras` are the further columns that the job asks for,
    e.g. finish_reason. `probabilities`: the result has a column with the probability of each label.
    `schema` is the text of the JSON Schema that each answer must fit, None for free text.
    `keeps_cut_off`: a truncated answer is valid even if it does not fit the form that sampling
    requires, such as a label or JSON; `fails_cut_off`: a truncated answer fails its row. `inputs`
    are the input columns whose nulls and common values are counted, None for all.
    `answered_by`: a column names the model of a cascade that answered. `classifier` is the file
    that turns vectors into labels, None if there is none.
    """

    column: str
    columns: tuple[str, ...] | None
    row_number: str
    postprocess: str | None
    types: Mapping[str, str] | None
    extras: tuple[str, ...]
    probabilities: bool
    schema: str | None
    keeps_cut_off: bool
    fails_cut_off: bool
    vector_type: VectorType
    parsing: ParsingSpec | None
    inputs: tuple[str, ...] | None
    answered_by: bool = False
    classifier: str | None = None

    def kept(self, names: list[str]) -> list[str]:
        """Return which of the input's columns `names` the result keeps."""
        return names if self.columns is None else list(self.columns)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of a result's files.

    `compact`: rows are written in input order to files of about `file_bytes`; otherwise the pieces
    stay as they are, and a manifest lists them. `read_back`: each file is read completely after it
    was written.
    """

    compact: bool
    file_bytes: int
    read_back: bool


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """The folder that holds a directory for each run, and the targets of the result.

    `options` are the options of the folder's store, as in output.options.
    """

    uri: str
    options: HiddenOptions
    targets: tuple[PublishTarget, ...]
    layout: Layout
