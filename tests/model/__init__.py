"""A model of the ledger, small enough that all its states can be visited.

Ledger.tla says it in TLA+ (TLC checks it where Java and tla2tools.jar are: `make chaos`), ledger.py
says the same in Python for the explorer, which needs neither.
"""
