"""A real `vllm serve`, with the bundled model or another, on the CPU."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from prefect_raybatch.demo import demo_model_path

from .environ import clean, dying_with_us
from .ports import free_ports

START_SECONDS = 240.0
MODEL = "demo"
WHITESPACE = '{"backend": "xgrammar", "disable_any_whitespace": true}'


@contextmanager
def vllm_server(
    folder: Path, model: str | None = None, served: str = MODEL, **options: str
) -> Iterator[str]:
    """Yield the base URL of the server of a model, the bundled one by default.

    It serves the model as `served`. Its log is in `folder`; `options` are further ones of `vllm
    serve`.
    """
    (port,) = free_ports(1)
    log = folder / "vllm.log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *(
            "--model",
            model or demo_model_path(),
            "--served-model-name",
            served,
            "--host",
            "127.0.0.1",
        ),
        *("--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32"),
        # The bundled model is too small to end JSON that may have any number of line breaks.
        *("--structured-outputs-config", WHITESPACE),
        *(
            word
            for name, value in options.items()
            for word in (f"--{name.replace('_', '-')}", value)
        ),
    ]
    environment = {
        **clean(),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # On a CPU, the core then has no worker apart, which would import vLLM a third time.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = dying_with_us(*command)
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=folder)
    try:
        _wait(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(60)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        if server.poll() is not None or time.monotonic() > until:
            raise AssertionError(f"vllm serve did not start: {log.read_text('utf-8')[-3000:]}")
        try:
            if httpx.get(url, timeout=5).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
