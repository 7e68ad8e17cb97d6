"""Connects to Ray, and sends shards through the stages on it."""
