"""Runs inference as Ray jobs: submits, finds, follows and stops them."""
