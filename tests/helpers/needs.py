"""What a test needs that is not on every machine."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

# vLLM is not imported to find out: that takes 10 s of every process that collects tests.
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
