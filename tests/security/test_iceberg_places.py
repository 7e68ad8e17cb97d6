"""Iceberg catalogs and tables that a job may have written itself lead it nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers.policies import set_policy
from helpers.small import make_job
from helpers.targets import published_rows
from pyiceberg.catalog.sql import SqlCatalog

from prefect_raybatch.compile.job import read_spec
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.policy.in_force import operator_policy, policy_applied
from prefect_raybatch.publish.publish import open_sink
from prefect_raybatch.source.tables.iceberg import open_iceberg

TABLE = pa.table({"id": pa.array([1], pa.int64())})


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SqlCatalog:
    """A catalog with a namespace; the policy allows only the folder `mine`, which holds it."""
    (tmp_path / "mine").mkdir()
    set_policy(monkeypatch, tmp_path, read=["mine"], write=["mine"])
    made = SqlCatalog("default", **given(tmp_path))
    made.create_namespace("n")
    return made


def given(root: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{root}/mine/c.db", "warehouse": f"file://{root}/mine"}


def job(root: Path, **groups: Any) -> BatchJob:
    groups.setdefault("source", {"uri": f"{root}/mine/in.parquet"})
    return make_job(output={"uri": f"{root}/mine/out", **groups.pop("output", {})}, **groups)


def publish(root: Path) -> None:
    target = {"format": "iceberg", "table": "n.t", "catalog": given(root)}
    made = job(root, output={"publish": [target]})
    with policy_applied(operator_policy()):
        check_trust(made)
        sink = open_sink(made.output.publish[0], "key", {})
        sink.publish(published_rows(TABLE), lambda step: None)


def test_a_namespace_leads_to_no_other_folder(catalog: SqlCatalog, tmp_path: Path) -> None:
    catalog.update_namespace_properties("n", updates={"location": f"file://{tmp_path}/other"})
    with pytest.raises(ConfigError, match=r"the tables of n.* may not write .*/other"):
        publish(tmp_path)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["", "write.data.path", "write.metadata.path"])
def test_a_table_leads_to_no_other_folder(name: str, catalog: SqlCatalog, tmp_path: Path) -> None:
    elsewhere = f"file://{tmp_path}/other/t"
    more: dict[str, Any] = {"properties": {name: elsewhere}} if name else {"location": elsewhere}
    catalog.create_table("n.t", schema=TABLE.schema, **more)
    before = sorted(tmp_path.rglob("*.parquet"))
    with pytest.raises(ConfigError, match=r"the table's files.* may not write .*/other"):
        publish(tmp_path)
    assert sorted(tmp_path.rglob("*.parquet")) == before


def test_the_owners_own_table_gets_rows(catalog: SqlCatalog, tmp_path: Path) -> None:
    publish(tmp_path)
    assert catalog.load_table("n.t").scan().to_arrow().num_rows == 1


@pytest.mark.parametrize("way", ["publish", "read"])
def test_code_that_a_table_names_is_not_loaded(
    way: str, catalog: SqlCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_io.py").write_text("from pyiceberg.io.pyarrow import PyArrowFileIO\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    publish(tmp_path)
    with catalog.load_table("n.t").transaction() as change:
        change.set_properties({"py-io-impl": "planted_io.PyArrowFileIO"})
    sys.modules.pop("planted_io", None)
    if way == "publish":
        publish(tmp_path)
    else:
        source = {"uri": "n.t", "format": "iceberg", "catalog": given(tmp_path)}
        made = job(tmp_path, source=source, prompt={"template": "{id}"})
        with policy_applied(operator_policy()):
            check_trust(made)
            assert open_iceberg(read_spec(made.source)) is not None
    assert "planted_io" not in sys.modules


def test_a_table_whose_places_code_would_choose_is_refused(
    catalog: SqlCatalog, tmp_path: Path
) -> None:
    provider = "pyiceberg.table.locations.SimpleLocationProvider"  # any class would do
    properties = {"write.py-location-provider.impl": provider}
    catalog.create_table("n.t", schema=TABLE.schema, properties=properties)
    with pytest.raises(ConfigError, match=r"names Python code to load"):
        publish(tmp_path)
