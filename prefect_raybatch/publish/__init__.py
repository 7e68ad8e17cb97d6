"""A finished result to tables and files of other systems, each once, whatever is killed."""
