"""What a run does, as plain data: made of a validated job once, and never edited afterwards."""
