"""A model of the ledger, small enough that all its states can be visited.

Ledger.tla says it in TLA+ for TLC, ledger.py says the same in Python for the explorer, which needs
no Java and knows all the faults of a variant at once. `make chaos` runs both and compares them.
"""
