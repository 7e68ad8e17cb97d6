"""Imports what both processes of an engine need, its front and its core.

The process from which they are forked loads it. See `prefect_raybatch.stages.vllm.forking`.
"""

from __future__ import annotations

import contextlib
import gc

from prefect_raybatch.stages.vllm.internals import SHARED_MODULES
from prefect_raybatch.uncollected import import_all

# A process can be given a title only where its environment lies as it did when it was started: this
# finds the place before anything changes the environment, vLLM's import here and a process that is
# forked from here alike. Ray hands the environment on in any order, so what they change may well
# come first in it, and then a core would bear the name of this process.
with contextlib.suppress(ImportError):
    import setproctitle

    setproctitle.getproctitle()

# The import server cannot import Ray, and is not to. The fork server of any other actor does.
NEEDED = ("ray", *SHARED_MODULES, "prefect_raybatch.stages.vllm.plugin")

import_all(NEEDED)
gc.freeze()  # collections in forks then leave the memory that they share alone
