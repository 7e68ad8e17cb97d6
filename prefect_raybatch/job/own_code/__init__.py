"""Functions and classes from a notebook, a script, or a file beside the job file."""
