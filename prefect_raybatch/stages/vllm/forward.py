"""Gets one short answer from an engine in a separate process, for `raybatch doctor`.

`python -m prefect_raybatch.stages.vllm.forward '{"model": ...}'` starts an engine with these
arguments of vLLM, sends it the health-check prompt and exits with 0 once the engine has answered.
Otherwise the last line on standard error gives the reason, or a signal ends the process.
"""

from __future__ import annotations

import json
import sys

from prefect_raybatch.stages.vllm.canary import CANARY_PROMPT, fields_for
from prefect_raybatch.stages.vllm.stepper import Request, SteppedEngine


def main(text: str) -> None:
    """Start an engine with the arguments in the JSON `text`; exit with an error if it fails."""
    with SteppedEngine(json.loads(text)) as engine:
        (answer,) = engine.run([Request(CANARY_PROMPT, fields_for({"temperature": 0.0}))])
    if answer.error:
        sys.exit(": ".join(answer.error))


if __name__ == "__main__":
    main(sys.argv[1])
