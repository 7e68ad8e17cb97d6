"""As much of vLLM as the stepper uses, without a model: what a row does follows from its tokens.

`install()` puts it in the place of the package. `STOPS` in a prompt stops the engine's core, `SLOW`
makes its step take `SLOW_S`, `DIES` ends the core by an illegal instruction, `WORKER_DIES` the
worker, `FAILS` raises in the core, `UNFORMED` makes it log an error that it survives; every other
row is answered by the next step. With the argument `apart` the core is a process of its own, as it
is by vLLM's default, else in this one.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from contextlib import suppress
from importlib.machinery import ModuleSpec
from multiprocessing import connection
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

STOPS, SLOW = 666, 5000
DIES, WORKER_DIES, FAILS, UNFORMED = 667, 668, 669, 670
SLOW_S = 0.4
ANSWER = [5]
MODULES = (
    "vllm",
    "vllm.engine",
    "vllm.engine.arg_utils",
    "vllm.platforms",
    "vllm.sampling_params",
)


def install_for(test: pytest.MonkeyPatch) -> None:
    """As `install()`, and what was there comes back after the test."""
    for name in MODULES:
        test.setitem(sys.modules, name, None)
    install()


def install() -> None:
    modules = {name: ModuleType(name) for name in MODULES}
    for name, module in modules.items():  # whoever looks whether vLLM is installed finds one
        module.__spec__ = ModuleSpec(name, None)
    modules["vllm"].LLMEngine = LLMEngine  # type: ignore[attr-defined]
    modules["vllm.engine.arg_utils"].EngineArgs = SimpleNamespace  # type: ignore[attr-defined]
    no_gpu = SimpleNamespace(is_cuda=lambda: False)
    modules["vllm.platforms"].current_platform = no_gpu  # type: ignore[attr-defined]
    params = modules["vllm.sampling_params"]
    params.SamplingParams = SamplingParams  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(FINAL_ONLY=2)  # type: ignore[attr-defined]
    params.StructuredOutputsParams = dict  # type: ignore[attr-defined]
    sys.modules.update(modules)


class SamplingParams(SimpleNamespace):
    n = 1
    detokenize = False


class LLMEngine:
    def __init__(self, args: SimpleNamespace) -> None:
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))
        self.engine_core = Apart() if getattr(args, "apart", False) else Here()

    @classmethod
    def from_engine_args(cls, args: SimpleNamespace) -> LLMEngine:
        return cls(args)

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        self.engine_core.send((request_id, prompt["prompt_token_ids"]))

    def step(self) -> list[Any]:
        answer = SimpleNamespace(finish_reason="stop", token_ids=ANSWER, text="")
        done = self.engine_core.get()
        return [
            SimpleNamespace(request_id=id, finished=True, outputs=[answer], num_cached_tokens=0)
            for id in ([done] if done else [])
        ]


def compute(tokens: list[int]) -> None:
    """What the core does for a row; stops with it where it is told to."""
    if SLOW in tokens:
        time.sleep(SLOW_S)
    while STOPS in tokens:
        time.sleep(3600)


class Here:
    def __init__(self) -> None:
        self.waiting: list[Any] = []

    def send(self, request: Any) -> None:
        self.waiting.append(request)

    def get(self) -> str | None:
        request_id, tokens = self.waiting.pop(0)
        compute(tokens)
        return request_id

    def shutdown(self) -> None:
        self.waiting.clear()


class Apart:
    """A core in a process of its own and, below it, a worker; its answers come by a thread."""

    def __init__(self) -> None:
        self.outputs_queue: queue.Queue[Any] = queue.Queue()
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_core, args=(theirs,), name="EngineCore")
        self.process.start()
        theirs.close()
        self.worker = self.pipe.recv()
        threading.Thread(target=self._receive, name="FakeOutputs", daemon=True).start()

    def _receive(self) -> None:
        try:
            while True:
                self.outputs_queue.put(self.pipe.recv())
        except (EOFError, OSError):
            return  # as in vLLM: who waits for an answer waits on

    def send(self, request: Any) -> None:
        self.pipe.send(request)

    def get(self) -> str:
        found = self.outputs_queue.get()
        if isinstance(found, Exception):
            raise found
        return found

    def shutdown(self) -> None:
        for pid in (self.process.pid, self.worker):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _core(pipe: Any) -> None:
    worker = os.fork()
    if worker == 0:
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)
    pipe.send(worker)
    while True:
        request_id, tokens = pipe.recv()
        if STOPS in tokens:
            os.kill(worker, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif DIES in tokens:
            os.kill(os.getpid(), signal.SIGILL)
        elif {WORKER_DIES, FAILS} & set(tokens):
            log_and_end(WORKER_DIES in tokens)
        elif UNFORMED in tokens:
            try:
                raise ValueError("grammar is not of valid supported types.")
            except ValueError:
                logging.getLogger("vllm.v1.structured_output").exception(
                    "Failed to compile grammar"
                )
        else:
            compute(tokens)
        pipe.send(request_id)


def log_and_end(worker_died: bool = False) -> None:
    """What vLLM's core logs then, in its words, and that its end says nothing of it."""
    dump = logging.getLogger("vllm.logging_utils.dump_input")
    dump.error("Dumping scheduler output for model execution: prompt_token_ids=[1, 2, 3]")
    try:
        if worker_died:
            executor = logging.getLogger("vllm.v1.executor.multiproc_executor")
            text = "Worker proc %s died unexpectedly (exit code: %s), shutting down executor."
            child = multiprocessing.get_context("fork").Process(target=_ends, name="VllmWorker-0")
            child.start()
            connection.wait([child.sentinel])
            time.sleep(0.2)
            executor.error(text, child.name, None)  # as vLLM, which looked a moment too early
            raise RuntimeError("Executor failed.")
        raise ValueError("no kernel image\nfor this device")
    except Exception:
        logging.getLogger("vllm.v1.engine.core").exception("EngineCore encountered a fatal error.")
    os._exit(1)


def _ends() -> None:
    os.kill(os.getpid(), signal.SIGILL)
