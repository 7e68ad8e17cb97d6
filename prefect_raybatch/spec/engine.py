"""The engines of a run, except for their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from prefect_raybatch.spec.model import ModelRequest

EarlyStop = Literal["decided", "first_token", "off"]


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Which model answers, and how its engines are driven.

    `sort`: rows of a shard enter the engine in the order that suits it. `merge`: equal requests of
    a shard are asked once. `early_stop` says when an answer out of several choices is complete:
    `decided`, once its tokens determine the label; `first_token`, after one token, and rows that it
    leaves open are asked again; `off`, when the label is written out. `tries` are the precisions
    among which a sample decides before the first commit, the preferred one first; () if there is
    nothing to decide.
    """

    model: ModelRequest
    sort: bool
    merge: bool
    early_stop: EarlyStop
    tries: tuple[Mapping[str, str], ...]
