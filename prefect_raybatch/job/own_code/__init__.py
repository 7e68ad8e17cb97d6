"""Functions and classes that a job's owner defines in a notebook, a script or a file."""
