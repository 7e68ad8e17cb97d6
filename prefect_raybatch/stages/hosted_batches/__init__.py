"""Sends shards to a hosted model's batch API: files, batches, their records, and the stage."""
