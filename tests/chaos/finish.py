"""A finish stage for Ray's workers that kills the driver of its run."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_raybatch.stages.finish import Finish

from .engine import once


@dataclass(frozen=True)
class FinishThatKills(Finish):
    """Kills the run's driver once a piece is durable and before its receipt is sent."""

    folder: str = ""

    def write_piece(self, *args: Any) -> Any:
        piece = super().write_piece(*args)
        folder = Path(self.folder)
        (folder / f"piece-{time.time_ns()}").touch()
        enough = len(list(folder.glob("piece-*"))) >= int((folder / "piece.at").read_text())
        if enough and once(folder, "piece"):
            os.kill(int((folder / "driver.pid").read_text()), signal.SIGKILL)
            time.sleep(1)  # the receipt must not win the race
        return piece
