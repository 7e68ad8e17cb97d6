"""Makes a plan from an inventory and a compiled job."""
