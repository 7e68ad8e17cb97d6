"""Knowledge of vLLM without importing it: its arguments, their values, and how they combine."""
