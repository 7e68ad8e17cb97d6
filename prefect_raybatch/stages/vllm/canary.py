"""Health check of a new engine after another died without answering a row.

The driver finds a row that kills its engine and quarantines it. But an engine that fails on every
row would be restarted for each block. So a new engine is first sent a fixed health-check prompt.
The run ends if the engine dies of that with the same error as the engine before, or if PROMPT_TRIES
new engines die of it one after the other.
"""

from __future__ import annotations

import re

from prefect_raybatch.ledger.failures import ENGINE_DIED, Loss
from prefect_raybatch.spec.request import SamplingFields
from prefect_raybatch.stages.vllm import process_note
from prefect_raybatch.stages.vllm.process_note import PredecessorNote

CANARY_PROMPT = (1, 2, 3)  # token ids that any vocabulary has
CANARY_TOKENS = 2  # tokens asked for: a first step, and one that goes on from it
ENGINE_STARTS = 2  # tries to start an engine
PROMPT_TRIES = 2  # new engines that may fail on the prompt, each in its own way


def fields_for(sampling: SamplingFields) -> SamplingFields:
    """Return the job's sampling fields, changed to a short answer, for the health-check prompt.

    The fields of a pooling request are unchanged.
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
    # Exit codes are what the error is; process ids, addresses and sizes are not.
    return re.sub(r"(?<!exit code )(?<!-)\b(0x)?[0-9a-f]*\d[0-9a-f.]*\b", "#", cause)


def loss_by_note(predecessor: PredecessorNote) -> Loss | None:
    """Return why the run must end, by the note of this actor's predecessor; None to continue.

    The run ends if the predecessor died of the health-check prompt, with the same error as the one
    before or as the PROMPT_TRIES-th in a row; or if it was the ENGINE_STARTS-th in a row that died
    as its engine started, and left an error. Without an error, it may have been killed from
    outside.
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
