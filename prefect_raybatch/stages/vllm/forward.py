"""Gets one short answer from an engine in a separate process, for `raybatch doctor`.

`python -m prefect_raybatch.stages.vllm.forward '{"model": ...}'` starts an engine with these
arguments of vLLM, asks it the health-check prompt and exits with 0 once that was answered.
Otherwise the last line on standard error says why not, or a signal ends the process.
"""

from __future__ import annotations

import json
import sys

from prefect_raybatch.stages.vllm.canary import CANARY_PROMPT, fields_for
from prefect_raybatch.stages.vllm.stepper import Request, SteppedEngine


def main(text: str) -> None:
    with SteppedEngine(json.loads(text)) as engine:
        (answer,) = engine.run([Request(CANARY_PROMPT, fields_for({"temperature": 0.0}))])
    if answer.error:
        sys.exit(": ".join(answer.error))


if __name__ == "__main__":
    main(sys.argv[1])
