"""The workers of the tests' Ray are forks, of which no two may be one for Ray."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil


def test_workers_are_forks_of_one_process_and_draw_numbers_of_their_own(local_ray: Any) -> None:
    import ray

    @ray.remote(num_cpus=0.5)
    def drawn() -> tuple[int, int, str]:
        time.sleep(1)  # so that several workers take one each
        return os.getpid(), os.getppid(), ray.ObjectRef.from_random().hex()

    found = set(ray.get([drawn.remote() for _ in range(8)]))
    workers, parents = ({each[n] for each in found} for n in (0, 1))
    assert len(workers) > 1 and len({number for *_, number in found}) == 8
    (words,) = {tuple(psutil.Process(parent).cmdline()[1:4]) for parent in parents}
    assert words == ("-P", "-m", "helpers.ray_workers")
