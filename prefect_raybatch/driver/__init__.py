"""The driver: it hands out shards, writes their commits, and monitors the attempt."""
