"""The verbs of a run as plain functions, which tasks and the command line call.

The way through a run: `plan_run` -> `infer_run` -> `finalize_run`; each can be called again after a
crash and goes on where the records say.
"""
