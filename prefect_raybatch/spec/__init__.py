"""What a run does, as plain data: compiled from a validated job once, and never edited
afterwards."""
