"""Inventory and job to a plan."""
