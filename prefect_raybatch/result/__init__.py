"""Pieces to the result, and the proof."""
