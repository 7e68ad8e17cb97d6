"""Explains exit codes: which signal ended the process, and the usual cause."""

from __future__ import annotations

import signal

MEANINGS = {
    signal.SIGILL: "illegal instruction: the CPU lacks instructions that vLLM was built for, or "
    "AMX is not enabled; use another machine, or set engine.dtype: float32",
    signal.SIGKILL: "killed, probably because the node ran out of memory; lower "
    "engine.max_num_seqs (on a CPU: VLLM_CPU_KVCACHE_SPACE in engine.env), or run fewer "
    "engines per node",
    signal.SIGSEGV: "segmentation fault in native code; the engine's log has the trace",
    signal.SIGABRT: "aborted by native code; the engine's log has the reason",
    signal.SIGBUS: "bus error; often /dev/shm is full",
    signal.SIGFPE: "division by zero in native code; the engine's log has the trace",
    signal.SIGTERM: "terminated by another process",
}


def exit_text(code: int) -> str:
    """Return e.g. `exit code 1`, or `exit code -4 (SIGILL: illegal instruction ...)`."""
    meaning = signal_text(code)
    return f"exit code {code} ({meaning})" if meaning else f"exit code {code}"


def signal_text(code: int) -> str:
    """Return name and meaning of the signal that ended a process, or "" if none did.

    `code` is negative for a signal, as in Python, or 128 plus the signal, as in a shell.
    """
    try:
        ended_by = signal.Signals(-code if code < 0 else code - 128)
    except ValueError:
        return ""
    return f"{ended_by.name}: {MEANINGS[ended_by]}" if ended_by in MEANINGS else ended_by.name
