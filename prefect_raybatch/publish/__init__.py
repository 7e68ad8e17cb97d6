"""Publishes a finished result to tables and files of other systems, exactly once despite
crashes."""
