"""Calls a user's function, in the stage's own process or in a separate one."""
