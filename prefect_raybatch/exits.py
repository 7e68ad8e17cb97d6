"""Explains exit codes: which signal ended the process, and the usual cause."""

from __future__ import annotations

import signal

MEANINGS = {
    signal.SIGILL: "an illegal instruction; this CPU lacks what vLLM was built for, or AMX is not "
    "granted: take another machine, or engine.dtype: float32",
    signal.SIGKILL: "killed, probably as the node was out of memory; lower engine.max_num_seqs, "
    "on a CPU VLLM_CPU_KVCACHE_SPACE in engine.env, or run fewer engines a node",
    signal.SIGSEGV: "a fault in native code; its trace is in the engine's log",
    signal.SIGABRT: "native code gave up; its reason is in the engine's log",
    signal.SIGBUS: "memory that is not there; often /dev/shm is full",
    signal.SIGFPE: "a division by zero in native code; its trace is in the engine's log",
    signal.SIGTERM: "somebody ended it",
}


def exit_text(code: int) -> str:
    """Return `exit code 1`, or with a signal `exit code -4 (SIGILL: an illegal instruction
    ...)`."""
    meaning = signal_text(code)
    return f"exit code {code} ({meaning})" if meaning else f"exit code {code}"


def signal_text(code: int) -> str:
    """Return name and meaning of the signal that ended a process; "" if none did.

    code: as Python gives it, negative for a signal, or 128 plus the signal, as a shell does.
    """
    try:
        ended_by = signal.Signals(-code if code < 0 else code - 128)
    except ValueError:
        return ""
    return f"{ended_by.name}: {MEANINGS[ended_by]}" if ended_by in MEANINGS else ended_by.name
