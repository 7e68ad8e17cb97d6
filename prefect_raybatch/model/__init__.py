"""Resolves and pins the model of a job, and estimates what it takes of a GPU."""
