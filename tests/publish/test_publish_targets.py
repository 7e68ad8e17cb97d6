"""A run directory is not trusted with targets: they are the operator's, or were looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers.command_line import called
from helpers.retries import FAILED, first_run
from helpers.targets import jsonl, jsonl_rows

from prefect_raybatch.api import publish_run
from prefect_raybatch.errors import ConfigError

ANSWERED = [n for n in range(20) if n not in FAILED]


def test_publish_takes_no_targets_from_a_run_directory_unless_told_to(
    tmp_path, capsys, monkeypatch
):
    """A forged plan names a place of somebody else and asks for a secret to be sent there."""
    monkeypatch.setenv("FORGED_SECRET", "hunter2")
    uri = f"sqlite:///{tmp_path}/${{FORGED_SECRET}}.db"
    forged = {"format": "sql", "uri": uri, "table": "t"}
    made = first_run(tmp_path / "out", output={"publish": [forged]})
    run, before = Path(made.store.uri), sorted(tmp_path.iterdir())
    code, _, err = called(capsys, "publish", run)
    told = " ".join(err.split())
    assert code == 2 and "--job JOB" in told and "--targets-from-plan" in told
    assert "sql: sql sqlite:///" in told and "with the variables FORGED_SECRET" in told
    assert "hunter2" not in err and sorted(tmp_path.iterdir()) == before
    with pytest.raises(ConfigError, match="--targets-from-plan"):
        publish_run(None, str(run))
    assert sorted(tmp_path.iterdir()) == before

    job = made.job.to_dict()
    job["output"]["publish"] = [jsonl(tmp_path, name="lines")]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(job))
    code, out, err = called(capsys, "publish", run, "--job", path)
    assert code == 0 and "differ from those that the run was started with" in " ".join(err.split())
    assert "published: lines" in out and not (tmp_path / "hunter2.db").exists()
    assert sorted(row["_row"] for row in jsonl_rows(tmp_path)) == ANSWERED

    code, _, err = called(capsys, "publish", run, "--job", path, "--targets-from-plan")
    assert code == 2 and "exclude each other" in " ".join(err.split())
    assert called(capsys, "publish", run, "--targets-from-plan")[0] == 0
    assert (tmp_path / "hunter2.db").exists()
    job["output"]["publish"] = [forged]
    path.write_text(yaml.safe_dump(job))
    code, _, err = called(capsys, "publish", run, "--job", path)
    assert code == 0 and "differ" not in err
