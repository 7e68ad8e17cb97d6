"""Nights that fail, each made to fail for real and seen only through Prefect's page.

make failures                          # all of them: pictures and docs/how-to/failures.md
make failures ARGS="--only no-gpus"
"""
