"""A finished run published by processes that are killed, two at once, to each kind of target."""

from __future__ import annotations

import json
import subprocess
import sys

from ..cluster import base_env
from ..trial import RUN_KEY, Bad, Trial
from . import kind

ROUNDS = 3  # of each kind of target


@kind("publishers killed, two at once", stores=("local",))
def publishers_killed(t: Trial) -> None:
    t.setup(rows=300)
    t.complete()
    arguments = [f"{t.out}/{RUN_KEY}", str(t.folder / "targets"), t.record.seed, str(ROUNDS)]
    done = subprocess.run(
        [sys.executable, "-m", "chaos.publisher", *arguments],
        env={**base_env(), "CHAOS_TRIAL": t.record.seed},
        cwd=t.folder,
        capture_output=True,
        text=True,
        timeout=t.limit,
    )
    if not done.stdout.strip():
        raise Bad(f"publishing failed: {done.stderr[-500:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    kills = sum(one["kills"] for one in found["targets"].values())
    t.fault(f"{kills} publishers killed", faults=0)
    t.record.extra["published"] = found["targets"]
    if found["faults"]:
        raise Bad("; ".join(found["faults"]))
