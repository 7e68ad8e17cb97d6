"""A Ray cluster on Kubernetes for one run: made, found again, kept alive, deleted."""
