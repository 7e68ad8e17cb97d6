"""The operations on a run as plain functions, which tasks and the command line call.

The main path is `plan_run` -> `infer_run` -> `finalize_run`. Each can be called again after a crash
and continues where the records end.
"""
