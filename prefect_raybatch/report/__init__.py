"""Turns commits into figures, text and plots."""
