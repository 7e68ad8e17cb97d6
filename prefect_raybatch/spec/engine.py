"""The engines of a run, but for their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from prefect_raybatch.spec.model import ModelRequest

EarlyStop = Literal["decided", "first_token", "off"]


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Which model answers, and how its engines are driven.

    `sort`: rows of a shard go to the engine in the order that suits it; `merge`: equal requests of
    a shard are asked once. `early_stop` says when an answer that is one of a choice is complete:
    `decided`, once its tokens tell the labels apart; `first_token`, after one, and rows that it
    leaves open are asked again; `off`, when the label is written out. `tries` are the precisions
    that a sample is to decide between before the first commit, the preferred one first; () where
    there is nothing to decide.
    """

    model: ModelRequest
    sort: bool
    merge: bool
    early_stop: EarlyStop
    tries: tuple[Mapping[str, str], ...]
