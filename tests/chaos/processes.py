"""Processes of a trial, found by a mark in their environment, and engines left without parent."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil


def marked(name: str, value: str) -> list[int]:
    """Ids of live processes that were started with this environment variable."""
    wanted = f"{name}={value}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0") and not _dead(folder):
                found.append(int(folder.name))
        except OSError:  # ended meanwhile
            continue
    return found


def _dead(folder: Path) -> bool:
    text = (folder / "stat").read_text()
    return text[text.rindex(")") + 2] in "ZX"


def gone(pid: int) -> bool:
    try:
        return _dead(Path(f"/proc/{pid}"))
    except OSError:
        return True


def kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def orphaned_engines() -> list[int]:
    """Engine processes of vLLM whose parent is gone."""
    found = []
    for process in psutil.process_iter(["pid", "ppid", "name", "cmdline", "status"]):
        info = process.info
        text = " ".join(info["cmdline"] or []) + (info["name"] or "")
        if "VLLM::" in text and info["ppid"] == 1 and info["status"] != psutil.STATUS_ZOMBIE:
            found.append(info["pid"])
    return found


def wait_until_gone(mark: tuple[str, str], seconds: float = 30) -> tuple[float, list[str]]:
    """Seconds until neither a process with the mark nor an orphaned engine is left, and what is."""
    began = time.monotonic()
    while True:
        left = marked(*mark) + orphaned_engines()
        waited = time.monotonic() - began
        if not left or waited > seconds:
            return waited, [describe(pid) for pid in left]
        time.sleep(0.3)


def describe(pid: int) -> str:
    try:
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())[:100]}"
    except psutil.Error:
        return str(pid)
