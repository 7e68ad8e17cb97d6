"""Measures how many answers of a run are right, with an interval."""
