"""The CPUs of this process: those that its CPU affinity and its container's quota leave."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prefect_raybatch import cpu_limit

V1 = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "350000 100000\n"}, 3),  # as Ray counts them
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu.max": "none\n"}, 8),
        ({V1[0]: "-1\n", V1[1]: "100000\n"}, 8),
        ({V1[0]: "400000\n", V1[1]: "100000\n"}, 4),
    ],
)
def test_a_containers_quota_counts(
    files: dict[str, str], cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cpu_limit, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cpu_limit.usable_cpus() == cpus
