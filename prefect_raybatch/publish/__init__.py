"""Publish a finished result to other systems, exactly once despite crashes."""
