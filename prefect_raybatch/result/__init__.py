"""Turns committed pieces into the result, and verifies the result."""
