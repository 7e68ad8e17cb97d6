"""The records of a run, which alone decide what is done, and how they are read and written."""
