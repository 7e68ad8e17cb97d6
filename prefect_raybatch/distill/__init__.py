"""Trains a classifier on embeddings of a run's rows, and measures which rows it could answer."""
