"""Ray: connects to it, and sends shards through the stages on it."""
