"""Health check of a new engine after another died without answering a row.

The driver finds a row that kills its engine and quarantines it. But an engine that fails on every
row would be restarted for each block. So a new engine is first sent a fixed health-check prompt.
The run ends if the prompt kills the engine with the same error as the engine before, or if it kills
PROMPT_TRIES new engines in a row.
"""

from __future__ import annotations

import re

from prefect_raybatch.ledger.failures import ENGINE_DIED, Loss
from prefect_raybatch.spec.request import SamplingFields
from prefect_raybatch.stages.vllm import process_note
from prefect_raybatch.stages.vllm.process_note import PredecessorNote

CANARY_PROMPT = (1, 2, 3)  # token ids that any vocabulary has
CANARY_TOKENS = 2  # answer tokens: one from the prefill step, one from a decode step
ENGINE_STARTS = 2  # tries to start an engine
PROMPT_TRIES = 2  # the run ends when this many new engines in a row died of the prompt


def fields_for(sampling: SamplingFields) -> SamplingFields:
    """Return the job's sampling fields for the health-check prompt, limited to a short answer.

    Fields of a pooling request (with `task`) are returned unchanged.
    """
    if "task" in sampling:
        return sampling
    fields = {name: value for name, value in sampling.items() if name != "min_tokens"}
    return {
        **fields,
        "max_tokens": min(CANARY_TOKENS, int(sampling.get("max_tokens") or CANARY_TOKENS)),
    }


def is_same_error(one: str, other: str) -> bool:
    """Return whether two error messages are equal apart from numbers such as process ids."""
    return _words(one) == _words(other)


def _words(cause: str) -> str:
    # Replaces process ids, addresses and sizes; keeps exit codes, which tell errors apart.
    return re.sub(r"(?<!exit code )(?<!-)\b(0x)?[0-9a-f]*\d[0-9a-f.]*\b", "#", cause)


def loss_by_note(predecessor: PredecessorNote) -> Loss | None:
    """Return why the run must end, given the note of the dead actor that this one replaces.

    The run ends in these cases:
    - the actor died of the health-check prompt, with the same error as the engine before;
    - it died of that prompt, and so did the actors before it: PROMPT_TRIES or more in a row;
    - it died during engine start, as did the actors before it, ENGINE_STARTS or more in a row, and
      its note has an error.

    Return None if the run goes on.
    """
    told = predecessor.cause != process_note.SILENT
    again = told and is_same_error(predecessor.before, predecessor.cause)
    if predecessor.doing == process_note.PROMPT and (again or predecessor.times >= PROMPT_TRIES):
        return fatal_loss(predecessor.cause)
    if predecessor.doing == process_note.START and told and predecessor.times >= ENGINE_STARTS:
        return Loss(
            "", f"{predecessor.cause} ({predecessor.times} times while the engine started)", True
        )
    return None


def fatal_loss(cause: str) -> Loss:
    """Return the fatal loss that ends the run, given the error that the engine died of."""
    return Loss(
        ENGINE_DIED,
        f"{cause}. Engines crashed this way before they answered any row, and a new one crashed "
        "on the health-check prompt, so no row is the cause",
        fatal=True,
    )
