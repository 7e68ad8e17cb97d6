"""The loop over shards, and what watches it."""
