"""The tasks of a job: the model returns text, a vector, a label or a score."""

from __future__ import annotations

from typing import Literal

TaskName = Literal["generate", "embed", "classify", "score"]
VectorType = Literal["float32", "float16"]


def pools(task: str) -> bool:
    """Return whether a task runs on vLLM's pooling runner: one step, no output tokens.

    True for every task but generate.
    """
    return task != "generate"


def probabilities(column: str) -> str:
    """Return the name of the column with the probability of each label, for answers in `column`."""
    return f"{column}_probabilities"
