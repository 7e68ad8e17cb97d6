"""How a stage calls a user's function: in its own process or in one apart."""
