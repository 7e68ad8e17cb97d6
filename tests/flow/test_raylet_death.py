"""Ray's daemon dies under a flow run of a worker: the cause is where the one on call looks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from failures.campaign import mended
from failures.cases import CASES
from failures.world import World
from helpers.prefect_server import Prefect


@pytest.mark.nightly
def test_the_cause_is_in_state_and_history_and_the_shown_command_continues_the_run(
    deployed: Prefect, tmp_path: Path
) -> None:
    night = next(case for case in CASES if case.name == "raylet-killed")
    with ExitStack() as stack:
        world = World(tmp_path, stack, given=deployed)
        seen = night.play(world)  # looks at the state's message
        page = world.history().read_text(encoding="utf-8")
        command = seen.texts[-1]
        assert all(text in page for text in seen.texts), page
        mended(world, seen, command)
