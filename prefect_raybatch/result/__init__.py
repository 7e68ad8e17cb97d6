"""Turns committed pieces into the result, and verifies it."""
