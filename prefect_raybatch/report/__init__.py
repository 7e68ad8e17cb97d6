"""Commits to figures, words and plots."""
