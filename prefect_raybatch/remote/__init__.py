"""Runs as Ray jobs: submitted, found again, followed, stopped."""
