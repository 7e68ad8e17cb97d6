"""Compiles a validated job into the spec of its run: the values that stages and driver use."""
