"""Importable help for the tests: user functions, a fake engine, small runs on the local store."""
