"""Answers for DataFrames and lists: `ask`, `embed`, `classify` and `score`."""
