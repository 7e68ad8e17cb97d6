"""The outcome of a row in the finish stage.

A row either has output columns, or failed, or is left out of the result because the user's function
`output.postprocess` returned None for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from prefect_raybatch.stages.block import Failure, Row, copied
from prefect_raybatch.stages.calls.isolated import NoChild

ColumnValues = Row  # values of result columns by name, as Arrow takes them


@dataclass(frozen=True)
class OutputRow:
    """A valid row: the values of its output columns."""

    columns: ColumnValues


@dataclass(frozen=True)
class LeftOutRow:
    """A row for which `output.postprocess` returned None.

    It is in neither the result nor the quarantine.
    """


FinishedRow = OutputRow | Failure | LeftOutRow


def postprocessed(
    function: Callable[[ColumnValues], object],
    row: ColumnValues | Failure,
    answer: ColumnValues,
    taken: Collection[str],
) -> FinishedRow:
    """Call a user's function with a row and its answer, and return the row's outcome.

    `row` has the input columns and `answer` the answer columns. If `row` is a `Failure`, it is
    returned. The row fails if the function raises, returns neither a dict nor None, or returns a
    column name that is not a str or is in `taken` (already in the result). Raises `NoChild` if the
    function's process did not start.
    """
    if isinstance(row, Failure):
        return row
    try:
        made = copied(function({**row, **answer}))
        if made is not None and not isinstance(made, dict):
            raise TypeError(
                f"output.postprocess must return a dict or None, not {type(made).__name__}"
            )
        for name in made or ():
            if not isinstance(name, str):
                raise TypeError(
                    f"output.postprocess must return a dict with column names as keys, not {name!r}"
                )
            if name in taken:  # a file with two columns of the same name is unreadable
                return Failure(
                    "postprocess",
                    "SchemaError",
                    f"column {name} is already in the result. Return it under another name, or "
                    "exclude the input's column with output.columns",
                )
        return LeftOutRow() if made is None else OutputRow(made)
    except NoChild:  # the function's process did not start, which is no fault of the row
        raise
    except Exception as error:
        return Failure.of("postprocess", error)
