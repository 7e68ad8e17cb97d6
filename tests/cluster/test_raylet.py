"""The death of Ray's daemon, after which the driver ends without an exception."""

from __future__ import annotations

import subprocess

import psutil
import pytest

from prefect_raybatch.cluster import raylet


def test_the_raylet_of_this_driver_is_found(local_ray: None) -> None:
    found = raylet.find_raylet()
    assert found is not None and found.name() == "raylet"
    assert not raylet.raylet_watch()()


def test_a_raylet_that_ends_while_the_driver_is_connected_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined = [True]
    monkeypatch.setattr(raylet.cluster, "is_joined", lambda: joined[0])
    with subprocess.Popen(["sleep", "600"]) as process:
        monkeypatch.setattr(raylet, "find_raylet", lambda: psutil.Process(process.pid))
        died = raylet.raylet_watch()
        assert not died()
        process.kill()
        psutil.Process(process.pid).wait()
        assert died()
        joined[0] = False  # a run that leaves Ray stops it
        assert not died()
    monkeypatch.setattr(raylet, "find_raylet", lambda: None)
    assert not raylet.raylet_watch()()
