"""Health check of a new engine after another died without answering a row.

The driver finds a row that kills its engine and quarantines it. But an engine that fails whatever
it is asked would be restarted for each block. So it is asked a health-check prompt that is always
the same: one that fails on it too, with the same error, is not used further.
"""

from __future__ import annotations

import re

from prefect_raybatch.ledger.failures import ENGINE_DIED, Loss
from prefect_raybatch.spec.request import SamplingFields
from prefect_raybatch.stages.vllm import note
from prefect_raybatch.stages.vllm.note import Left

CANARY_PROMPT = (1, 2, 3)  # token ids that any vocabulary has
CANARY_TOKENS = 2  # tokens asked for: a first step, and one that goes on from it
ENGINE_STARTS = 2  # tries to start an engine
PROMPT_TRIES = 2  # new engines that may fail on the prompt, each in its own way


def fields_for(sampling: SamplingFields) -> SamplingFields:
    """Return the job's sampling fields for the health-check prompt: the same work, but short.

    Those of a pooling request are unchanged.
    """
    if "task" in sampling:
        return sampling
    fields = {name: value for name, value in sampling.items() if name != "min_tokens"}
    return {
        **fields,
        "max_tokens": min(CANARY_TOKENS, int(sampling.get("max_tokens") or CANARY_TOKENS)),
    }


def same(one: str, other: str) -> bool:
    """Return whether two engines died of the same error: the same words, whatever their numbers."""
    return _words(one) == _words(other)


def _words(cause: str) -> str:
    # Exit codes are what the error is; process ids, addresses and sizes are not.
    return re.sub(r"(?<!exit code )(?<!-)\b(0x)?[0-9a-f]*\d[0-9a-f.]*\b", "#", cause)


def judged(left: Left) -> Loss | None:
    """Return why the run must end, from what this actor's predecessor left; None to continue.

    An actor that was killed while its engine started says nothing about the engine.
    """
    told = left.cause != note.SILENT
    again = told and same(left.before, left.cause)
    if left.doing == note.PROMPT and (again or left.times >= PROMPT_TRIES):
        return refusal(left.cause)
    if left.doing == note.START and told and left.times >= ENGINE_STARTS:
        return Loss("", f"{left.cause} ({left.times} times while the engine started)", True)
    return None


def refusal(cause: str) -> Loss:
    """Return why the run must end, given the error that the engine died of."""
    return Loss(
        ENGINE_DIED,
        f"{cause}. Engines crashed this way before they answered any row, and a new one crashed "
        "on the health-check prompt, so no row is the cause",
        fatal=True,
    )
