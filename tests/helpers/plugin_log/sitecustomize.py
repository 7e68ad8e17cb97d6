"""On PYTHONPATH each Python process imports this when it starts: with PLUGIN_LOG set, each call of
our vLLM plugin's functions is written there, as "PROCESS FUNCTION"."""

import os
from collections.abc import Callable

from prefect_raybatch.stages.vllm import plugin as vllm_plugin


def logged(function: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        with open(os.environ["PLUGIN_LOG"], "a") as file:
            file.write(f"{os.getpid()} {function.__name__}\n")
        function()

    return call


if "PLUGIN_LOG" in os.environ:
    for name in ("register", "ask_for_amx"):
        setattr(vllm_plugin, name, logged(getattr(vllm_plugin, name)))
