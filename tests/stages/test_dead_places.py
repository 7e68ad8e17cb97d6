"""Which dead actors leave Ray Data's pool, and when a pass is given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.data import DataContext

from prefect_raybatch.stages import ray_internals
from prefect_raybatch.stages.ray_internals import DeadEngines, EnginesDied, limit_deaths


class Engines:
    """A pool of actors, which are names; those in `dead` are dead, `inside` have blocks."""

    def __init__(self, size: int, own_groups: bool = False) -> None:
        self._ray_remote_args_fn = dict if own_groups else None
        self.metrics = SimpleNamespace(num_tasks_finished=0, num_tasks_failed=0)
        self._actor_pool = SimpleNamespace(
            _running_actors={},
            _release_running_actor=lambda actor: self._actor_pool._running_actors.pop(actor),
            max_size=lambda: size,
            current_size=lambda: len(self.there),
        )
        self.dead: set[str] = set()
        for number in range(size):
            self.start(f"first-{number}")

    @property
    def there(self) -> dict[str, Any]:
        return self._actor_pool._running_actors

    def start(self, name: str, inside: int = 0) -> None:
        self.there[name] = SimpleNamespace(num_tasks_in_flight=inside)

    def answer(self) -> None:
        self.metrics.num_tasks_finished += 1

    def lose(self) -> None:
        self.metrics.num_tasks_finished += 1
        self.metrics.num_tasks_failed += 1


def policy_of(engines: Engines, monkeypatch: pytest.MonkeyPatch, most: int | None = None) -> Any:
    monkeypatch.setattr(ray_internals, "is_dead", lambda actor: actor in engines.dead)
    context = DataContext.get_current().copy()
    if most is not None:
        limit_deaths(context, most)
    return DeadEngines(context, {}, None)


def test_a_dead_engine_gives_its_place_up_once_its_blocks_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines(2)
    policy = policy_of(engines, monkeypatch)
    engines.there["first-0"].num_tasks_in_flight = 2
    engines.dead = {"first-0"}
    policy.replace_dead(engines)
    assert len(engines.there) == 2, "Ray looks it up when it tells of the blocks"
    engines.there["first-0"].num_tasks_in_flight = 0
    policy.replace_dead(engines)
    assert list(engines.there) == ["first-1"]


def test_engines_that_die_in_a_row_and_answer_nothing_end_the_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines(1)
    policy = policy_of(engines, monkeypatch, most=3)
    for number in range(5):
        engines.dead = set(engines.there)
        engines.answer()
        policy.replace_dead(engines)
        engines.start(f"next-{number}")
    for number in range(2):
        engines.dead = set(engines.there)
        engines.lose()
        if number == 1:
            break
        policy.replace_dead(engines)
        engines.start(f"last-{number}")
    with pytest.raises(EnginesDied) as caught:
        policy.replace_dead(engines)
    assert caught.value.engines == 3, "the one after the last answer, too"


def test_engines_with_placement_groups_of_their_own_are_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines(2, own_groups=True)
    policy = policy_of(engines, monkeypatch)
    engines.dead = {"first-0"}
    policy.replace_dead(engines)
    assert len(engines.there) == 2, "the other one goes on"
    engines.dead = set(engines.there)
    with pytest.raises(EnginesDied):
        policy.replace_dead(engines)
