"""OpenAI batch files: runs the requests in a JSON Lines file, and writes the answers to another."""
