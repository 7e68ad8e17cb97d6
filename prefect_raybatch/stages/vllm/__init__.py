"""One vLLM engine: driven, monitored, health-checked, and ended with its parent process."""
