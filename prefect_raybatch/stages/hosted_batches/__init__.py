"""Sends shards to a hosted model's batch API: its calls, its files, our records, engine stage."""
