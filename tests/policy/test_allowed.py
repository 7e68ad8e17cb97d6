"""docs/security.md lists what is allowed, and nothing else."""

from __future__ import annotations

import re
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from prefect_raybatch.policy import allowed
from prefect_raybatch.policy.policy import KubernetesLimits
from prefect_raybatch.policy.policy_file import FIELDS, read_policy

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
        *(allowed.POD_ANNOTATIONS, allowed.POD_LABELS, allowed.VARIABLE_SOURCES),
        allowed.SECURITY_FIELDS,
    ],
}


@pytest.mark.parametrize("heading", LISTS)
def test_the_page_has_the_lists(heading: str) -> None:
    section = re.split(r"\n##+ ", PAGE.split(f"\n{heading}\n")[1])[0]
    blocks = [block for block in section.split("\n\n") if re.fullmatch(r"(`[^`]+`,?\s*)+", block)]
    shown = [set(re.findall(r"`([^`]+)`", block)) for block in blocks]
    assert shown == [set(names) for names in LISTS[heading]]


def test_the_page_shows_policies_that_can_be_read_and_each_field(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for block in blocks:
        (tmp_path / "policy.yaml").write_text(textwrap.dedent(block))
        assert read_policy(str(tmp_path / "policy.yaml")).may_write("/data/results")
    assert len(blocks) == 2
    whole = yaml.safe_load(blocks[1])
    assert set(whole) == set(FIELDS)
    assert set(whole["kubernetes"]) == {one.name for one in fields(KubernetesLimits)}
    rows = re.findall(r"^\| (`[a-z_.`, ]+) \|", PAGE.split("### Write a policy")[1], re.MULTILINE)
    shown = [name.rpartition(".")[2] for row in rows for name in re.findall(r"`([a-z_.]+)`", row)]
    assert sorted(shown) == sorted([*{*FIELDS} - {"kubernetes"}, *whole["kubernetes"]])


def test_no_variable_of_the_list_names_code_a_file_or_a_host() -> None:
    names = re.compile(r"PATH|PLUGIN|_DIR$|_ROOT|HOME|PRELOAD|URL|ENDPOINT|PROXY|CONFIG|HOOK|CLS")
    assert [name for name in allowed.ENGINE_VARIABLES if names.search(name)] == []
