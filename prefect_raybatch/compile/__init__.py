"""Compiles a validated job into a `RunSpec`: the values that the stages and the driver use."""
