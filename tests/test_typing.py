"""The types that users of the package see."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import prefect_raybatch

ROOT = Path(prefect_raybatch.__file__).parent.parent
USER = """
    from typing import assert_type

    import prefect_raybatch as rb

    job = rb.BatchJob.from_yaml("job.yaml")
    assert_type(job.limits.max_failed_rows, int | None)
    assert_type(rb.batch_inference(job), rb.RunReport)
    run = rb.plan_shards(job, "nightly")
    assert_type(run, rb.Run)
    report = rb.finalize_run(job, run, rb.infer_shards(job, run))
    assert_type(report.failed, int)
    assert_type(rb.retry_failed(run.uri), rb.RunReport | None)
    for action in rb.reconcile_jobs("http://head:8265"):
        assert_type(action.why, str)

    report.nothing
    rb.batch_inference("job.yaml")
    rb.tune_job(job, minutes="5")
"""


def test_users_get_our_types(tmp_path):
    """Checked from elsewhere, so by `py.typed` and not as part of the package."""
    (tmp_path / "user.py").write_text(textwrap.dedent(USER))
    options = ("--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "user.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    found = [line.split(": ", 2) for line in done.stdout.splitlines() if ": error: " in line]
    wrong = {int(place.split(":")[1]): text for place, _, text in found}
    assert sorted(wrong) == [17, 18, 19], done.stdout + done.stderr
    assert 'has no attribute "nothing"' in wrong[17]
    assert "[call-overload]" in wrong[18] and "[call-overload]" in wrong[19]
