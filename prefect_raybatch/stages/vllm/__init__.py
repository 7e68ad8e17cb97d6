"""One vLLM engine: driven, watched, proved, and ended with whoever started it."""
