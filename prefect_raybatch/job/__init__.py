"""What a user writes, and what it is not allowed to do."""
