"""`python -m tour`: docs/tour.md run for real, its outputs and pictures written anew."""

import re

# What of the page is done in other ways: the tests' environment stands, and so does a server.
ELSEWHERE = re.compile(r"make |source |mkdir |prefect server start|export PREFECT_API_URL")
