"""Chooses the sizes of a run (engines, batches, shards, ...) from job, cluster and model.

Each size has a text with the reason for it.
"""
