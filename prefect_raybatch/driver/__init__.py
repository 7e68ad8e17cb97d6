"""The loop over shards, and its monitoring."""
