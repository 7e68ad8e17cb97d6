"""`python -m tour`: run docs/tutorials/first-run.md; write its outputs and pictures anew."""

import re

from helpers.pages import DOCS

TOUR_PAGE = DOCS / "tutorials/first-run.md"
# Commands that are not run: an environment, a folder and a Prefect server exist already.
ELSEWHERE = re.compile(
    r"mkdir |python3 -m venv |source |pip install |prefect server start|export PREFECT_API_URL"
)
