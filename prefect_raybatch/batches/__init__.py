"""OpenAI batch files: requests of a JSON Lines file as a run, and its answers as such a file."""
