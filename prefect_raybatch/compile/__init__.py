"""Compiles a validated job into what its run does."""
