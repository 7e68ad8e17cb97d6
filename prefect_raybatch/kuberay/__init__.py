"""A Ray cluster on Kubernetes for one run: created, found again, kept alive, deleted."""
