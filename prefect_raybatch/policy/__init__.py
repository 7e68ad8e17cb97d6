"""Policies: what a job may read, write and connect to, depending on who submitted it.

See docs/security.md.
"""
