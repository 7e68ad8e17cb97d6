"""Compares the answers of a job with those of a finished run, on a sample of its rows."""
