"""Plain data that says what a run does, compiled once from a validated job and never edited."""
