"""The README and the nightly tutorial: their job and deployment are valid, and the README's links
work on a package index too."""

from __future__ import annotations

import importlib.util
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.pages import DOCS, ROOT, blocks
from helpers.without_ray import outside_ray
from prefect.cli.deploy._config import _load_deploy_configs_and_actions
from rich.console import Console
from test_deployments import automations_script, policy_applied

from prefect_raybatch.api import dry_run
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.policy.policy_file import read_policy

README = (ROOT / "README.md").read_text(encoding="utf-8")
NIGHTLY = (DOCS / "tutorials/nightly.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


# --- README.md ----------------------------------------------------------------------------------


def test_the_job_of_the_readme_runs_over_the_example_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = [block.text for block in blocks(README) if block.language == "yaml"]
    job = BatchJob.from_dict(yaml.safe_load(text))
    shutil.copy(ROOT / "deployments/customers.csv", tmp_path / str(job.source.uri))
    outside_ray(monkeypatch)
    monkeypatch.chdir(tmp_path)
    found = dry_run(job)
    assert (found.problems, found.files) == ((), 1)
    assert found.rows > 0 and "Company" in found.columns  # rows are an estimate for a CSV


def test_links_of_the_readme_are_absolute_on_a_package_index() -> None:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    metadata: dict[str, Any] = {"urls": PROJECT["urls"]}
    hook.ReadmeHook(str(ROOT), {}).update(metadata)
    links = re.findall(r"\]\(([^)\s]+)\)", metadata["readme"]["text"])
    assert links and all(re.match(r"https://|#", link) for link in links)
    assert links.count(f"{PROJECT['urls']['Repository']}/blob/main/CONTRIBUTING.md") == 1
    assert (
        hook.with_absolute_links("![a](x.svg), [b](#c)", "R") == "![a](R/raw/main/x.svg), [b](#c)"
    )


def test_urls_of_the_project_lead_to_files_of_the_repository() -> None:
    repository = PROJECT["urls"]["Repository"]
    for url in PROJECT["urls"].values():
        path = re.sub(f"^{re.escape(repository)}(/(tree|blob)/main/)?", "", url)
        assert (ROOT / path).exists(), url


# --- docs/tutorials/nightly.md ------------------------------------------------------------------


def yaml_block_with(key: str) -> str:
    found = [block.text for block in blocks(NIGHTLY) if block.language == "yaml"]
    (text,) = [text for text in found if key in yaml.safe_load(text)]
    return text


@pytest.fixture
def deployment() -> dict[str, Any]:
    (found,) = yaml.safe_load(yaml_block_with("deployments"))["deployments"]
    return found


def test_prefect_reads_the_deployment_file(tmp_path: Path) -> None:
    file = tmp_path / "prefect.yaml"
    file.write_text(yaml_block_with("deployments"))
    found, _ = _load_deploy_configs_and_actions(prefect_file=file, console=Console())
    assert [deployment["name"] for deployment in found] == ["nightly"]


def test_the_policy_allows_the_deployed_job_and_no_other_folder(
    deployment: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(yaml_block_with("read"))
    job = BatchJob.from_dict(deployment["parameters"]["job"])
    elsewhere = job.model_copy(update={"output": job.output.model_copy(update={"uri": "/srv/x"})})
    with policy_applied(read_policy(str(file))):
        check_trust(job)
        with pytest.raises(ConfigError, match=r"output\.uri"):
            check_trust(elsewhere)


def test_its_heartbeats_are_those_that_the_automation_waits_for(deployment: dict[str, Any]) -> None:
    beat = deployment["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]
    assert 3 * float(beat) == automations_script().GONE_AFTER
    assert automations_script().HEARTBEAT_TAG in deployment["tags"]
