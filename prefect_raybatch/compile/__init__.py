"""A validated job to what its run does."""
