"""docs/security.md lists what is allowed, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prefect_raybatch.policy import allowed

PAGE = (Path(__file__).parents[2] / "docs/security.md").read_text(encoding="utf-8")
LISTS = {
    "### Variables of the engine": [allowed.ENGINE_VARIABLES],
    "### Arguments of the engine": [
        allowed.ENGINE_TEXTS,
        {*allowed.OWNER_ARGUMENTS, *allowed.OWNER_TEXTS},
        allowed.ENGINE_CODE,
    ],
    "### Options of a store": [allowed.STORE_OPTIONS],
    "### Properties of a catalog": [allowed.CATALOG_PROPERTIES],
    "### Parameters of a database's URL": [allowed.DATABASE_PARAMETERS],
    "### Pods": [
        *(allowed.CLUSTER_FIELDS, allowed.GROUP_FIELDS, allowed.POD_FIELDS),
        *(allowed.VOLUME_KINDS, allowed.CONTAINER_FIELDS, allowed.METADATA_FIELDS),
        *(allowed.ANNOTATIONS, allowed.LABELS, allowed.VARIABLE_SOURCES),
        allowed.SECURITY_FIELDS,
    ],
}


@pytest.mark.parametrize("heading", LISTS)
def test_the_page_has_the_lists(heading: str) -> None:
    section = re.split(r"\n##+ ", PAGE.split(f"\n{heading}\n")[1])[0]
    blocks = [block for block in section.split("\n\n") if re.fullmatch(r"(`[^`]+`,?\s*)+", block)]
    shown = [set(re.findall(r"`([^`]+)`", block)) for block in blocks]
    assert shown == [set(names) for names in LISTS[heading]]


def test_no_variable_of_the_list_names_code_a_file_or_a_host() -> None:
    names = re.compile(r"PATH|PLUGIN|_DIR$|_ROOT|HOME|PRELOAD|URL|ENDPOINT|PROXY|CONFIG|HOOK|CLS")
    assert [name for name in allowed.ENGINE_VARIABLES if names.search(name)] == []
