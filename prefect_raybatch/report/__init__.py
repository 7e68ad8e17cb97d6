"""Turns the commits of a run into figures, text and plots."""
