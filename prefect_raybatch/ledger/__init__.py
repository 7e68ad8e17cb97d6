"""The truth about a run: its records, and how they are read and written."""
