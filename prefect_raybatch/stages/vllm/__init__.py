"""One vLLM engine: driven, monitored, health-checked, and ended with the process that started
it."""
