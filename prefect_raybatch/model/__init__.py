"""Resolves and pins the model of a job, and estimates how much GPU memory it takes."""
