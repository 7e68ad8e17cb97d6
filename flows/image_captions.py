"""Write a caption for each image of a table.

    python flows/image_captions.py DATA OUT [MODEL [RUN_KEY]]

DATA is a folder of Parquet files with a column `image`. Rows with an unreadable image go to
quarantine with the reason. The job is image_captions.yaml in this folder. Start it again with the
same RUN_KEY to resume.
"""

from __future__ import annotations

import sys
from pathlib import Path

from prefect import flow

from prefect_raybatch import BatchJob, RunReport, batch_inference

JOB = Path(__file__).with_suffix(".yaml")


def captions_job(data: str, out: str, model: str | None = None) -> BatchJob:
    """Return the job of the file for these images."""
    job = BatchJob.from_yaml(JOB).to_dict()
    job["source"]["uri"] = data
    job["output"]["uri"] = out
    if model is not None:
        job["engine"]["model"] = model
    return BatchJob.from_dict(job)


@flow
def image_captions(
    data: str, out: str, model: str | None = None, run_key: str | None = None
) -> RunReport:
    """Caption the images in `data`."""
    return batch_inference(captions_job(data, out, model), run_key)


if __name__ == "__main__":
    image_captions(*sys.argv[1:])
