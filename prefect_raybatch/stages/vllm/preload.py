"""Imports the modules that both an engine's front process and its core process need.

The processes from which these are forked import this module. See `stages/vllm/forking.py`.
"""

from __future__ import annotations

import contextlib
import gc

from prefect_raybatch.stages.vllm.internals import SHARED_MODULES
from prefect_raybatch.uncollected import import_all

# setproctitle writes the title over the process's initial environment in memory. This call finds
# the address before the environment changes: by vLLM's import here, or in a process forked from
# here. If the first variable had changed (Ray passes them on in any order), setproctitle would not
# find the address, and a core would keep the title of this process.
with contextlib.suppress(ImportError):
    import setproctitle

    setproctitle.getproctitle()

# In the import server the import of Ray fails, as intended; any other fork server imports it.
NEEDED = ("ray", *SHARED_MODULES, "prefect_raybatch.stages.vllm.plugin")

import_all(NEEDED)
gc.freeze()  # so that garbage collection in forks does not copy shared memory
