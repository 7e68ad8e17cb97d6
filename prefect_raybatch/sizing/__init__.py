"""Derives every size of a run, with its reason, from job, cluster and model."""
