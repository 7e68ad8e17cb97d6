"""Job files: their fields, the checks of their values, and what a job may not do."""
