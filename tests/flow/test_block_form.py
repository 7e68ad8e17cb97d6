"""The form of a Prefect block, filled in in a browser, and a flow that uses the block."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.browser import browser_page, expect, picture
from helpers.openai_server import openai_server
from helpers.prefect_server import Prefect

from prefect_raybatch import BatchJob, batch_inference

pytestmark = [pytest.mark.e2e, pytest.mark.whole]
KEY = "sk-of-a-block-0123456789"
BLOCK_FORM = [
    "Block Name",
    "URL",
    "Model",
    "API key (Optional)",
    "Requests per minute (Optional)",
    "Tokens per minute (Optional)",
    "Requests in flight (Optional)",
    "Request timeout (Optional)",
    "Price of prompt tokens (Optional)",
    "Price of answer tokens (Optional)",
]


def test_a_block_that_was_filled_in_in_the_browser_gives_a_flow_its_server(
    prefect_process: Prefect, prefect_api: None, without_ray: None, tmp_path: Path
) -> None:
    prefect_process.call("block", "register", "-m", "prefect_raybatch.blocks")
    site = prefect_process.url.removesuffix("/api")
    with openai_server() as server, browser_page() as page:
        page.goto(f"{site}/blocks/catalog/hosted-model/create")
        labels = page.locator("form label")
        expect(labels).to_have_text(BLOCK_FORM)
        given = ["from-the-page", server.url, "large", KEY, "6000"]
        for title, value in zip(BLOCK_FORM, given, strict=False):
            label = page.get_by_text(title, exact=True)
            page.locator(".p-label", has=label).locator("input, textarea").fill(value)
        picture(page, "block", tmp_path)
        page.get_by_role("button", name="Create").click()
        page.wait_for_url("**/blocks/block/*")
        expect(page.get_by_text(server.url).first).to_be_visible()
        assert KEY not in page.content()
        pq.write_table(pa.table({"Company": ["Apollo", "Zeus"]}), tmp_path / "in.parquet")
        job = BatchJob(
            name="from-the-page",
            source={"uri": str(tmp_path / "in.parquet")},
            prompt={"template": "{Company}"},
            output={"uri": str(tmp_path / "out")},
            engine={"endpoint": {"block": "hosted-model/from-the-page"}},
        )
        report = batch_inference(job, "page")
    assert server.authorizations == {f"Bearer {KEY}"} and report.good == 2
