"""The verbs of a run as plain functions."""
