"""Imports what the core of an engine needs and its other processes do not.

The core's fork server loads it after `preload`. See `prefect_raybatch.stages.vllm.forking`.
"""

from __future__ import annotations

import contextlib
import importlib

from prefect_raybatch.stages.vllm.internals import LATE_CORE_MODULES

CORE_NEEDED = ("ray", *LATE_CORE_MODULES)

for _name in CORE_NEEDED:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
