"""A run as a Ray job: submitted, found again, followed, stopped."""
