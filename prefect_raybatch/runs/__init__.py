"""The operations on a run as plain functions, which Prefect tasks and the command line call.

A run takes three calls: `plan_run`, `infer_run`, `finalize_run`. Each can be repeated after a
crash, and skips what the run directory records as done.
"""
