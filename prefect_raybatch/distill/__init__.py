"""Trains a classifier on embeddings of answered rows, and measures which rows it could answer."""
