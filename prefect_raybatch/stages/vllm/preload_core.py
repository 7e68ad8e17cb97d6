"""Imports what the core of an engine needs and its other processes do not.

The core's fork server imports it after `preload`. See `prefect_raybatch.stages.vllm.forking`.
"""

from __future__ import annotations

import gc

from prefect_raybatch.stages.vllm.internals import CORE_MODULES
from prefect_raybatch.uncollected import import_all

# Ray too: the import server has not imported it for its forks.
CORE_NEEDED = ("ray", *CORE_MODULES)

import_all(CORE_NEEDED)
gc.freeze()
