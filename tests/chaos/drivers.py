"""Driver processes of a trial: started, watched, killed, stopped and woken from here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil


class Driver:
    """One attempt at a run in a process group of its own."""

    def __init__(self, folder: Path, name: str, spec: dict[str, Any], env: dict[str, str]) -> None:
        self.name, self.began = name, time.time()
        self.log, self.status_path = folder / f"{name}.log", folder / f"{name}.status"
        path = folder / f"{name}.spec"
        path.write_text(json.dumps(spec))
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "chaos.worker", str(path), str(self.status_path)],
                env=env,
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def stopped(self) -> bool:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    def kill(self, group: bool = False) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL) if group else self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def wait(self, seconds: float = 300) -> dict[str, Any]:
        """Its status once it has ended; a killed one has none but its signal."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill(group=True)
            return {"error": "Hung", "text": f"did not end in {seconds} s", "code": None}
        try:
            return {"code": code, **json.loads(self.status_path.read_text())}
        except (OSError, ValueError):
            return {"code": code, "error": f"Signal{-code}", "text": self.tail()}

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-1500:]
