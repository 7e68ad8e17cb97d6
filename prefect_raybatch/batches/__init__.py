"""OpenAI batch files: runs the requests of a JSON Lines file, and writes its output file."""
