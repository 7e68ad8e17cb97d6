"""Imports what an engine's processes need: the module that their fork server loads.

See `prefect_raybatch.stages.vllm.forking`. What cannot be imported here is imported by the process
that needs it, which then reports the reason.
"""

from __future__ import annotations

import contextlib
import importlib

from prefect_raybatch.stages.vllm.internals import CORE_MODULES, FRONT_MODULES

# A process can be given a title only where its environment lies as it did when it was started: this
# finds the place before anything changes the environment, vLLM's import here and a process that is
# forked from here alike. Ray hands the environment on in any order, so what they change may well
# come first in it, and then a core would bear the name of this process.
with contextlib.suppress(ImportError):
    import setproctitle

    setproctitle.getproctitle()

NEEDED = ("ray", *FRONT_MODULES, *CORE_MODULES, "prefect_raybatch.stages.vllm.plugin")

for _name in NEEDED:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
