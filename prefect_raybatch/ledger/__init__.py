"""Reads and writes the records of a run, which alone decide which of its shards are done."""
