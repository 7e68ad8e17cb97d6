"""Which model a job means, pinned; what it takes of a GPU."""
