"""Imports the modules that only the core process of an engine needs.

The core's fork server imports this module after `preload`. See `stages/vllm/forking.py`.
"""

from __future__ import annotations

import gc

from prefect_raybatch.stages.vllm.internals import CORE_MODULES
from prefect_raybatch.uncollected import import_all

# Ray too: the import server has not imported it for its forks.
CORE_NEEDED = ("ray", *CORE_MODULES)

import_all(CORE_NEEDED)
gc.freeze()
