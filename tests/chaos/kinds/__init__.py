"""The kinds of faults. A kind is a function of a trial; the campaign completes and checks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from ..trial import Trial

MODULES = (
    *("kills", "engines", "zombies", "stores", "rows", "inputs", "nodes", "nights"),
    "publishing",
)


@dataclass(frozen=True)
class Kind:
    """A kind: `title` for the table, the stores it can use, whether it has a form with vLLM."""

    name: str
    title: str
    run: Callable[[Trial], None]
    stores: tuple[str, ...] = ("local", "s3")
    real: bool = False
    every: int = 1  # takes part in every n-th round only: the slow ones
    needs_root: bool = False


KINDS: dict[str, Kind] = {}


def kind(title: str, **fields: object) -> Callable[[Callable[[Trial], None]], Callable]:
    """Registers a function as a kind under its own name."""

    def register(function: Callable[[Trial], None]) -> Callable[[Trial], None]:
        name = function.__name__
        KINDS[name] = Kind(name, title, function, **fields)  # type: ignore[arg-type]
        return function

    return register


def load() -> dict[str, Kind]:
    for module in MODULES:
        import_module(f"{__package__}.{module}")
    return KINDS
