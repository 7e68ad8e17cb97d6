"""Deterministic simulation of the ledger: real drivers over a store that one seed schedules.

python -m simulation --seed 1 --schedules 100        (with tests/ on PYTHONPATH; or `make chaos`)

The package's own code runs unchanged down to the single requests of a store. Below it, in place of
S3's wire and of the calls of the operating system, stands a world in one thread, in which each
request is a point where another process may go on, or this one crash, stop, or lose the answer.
"""
