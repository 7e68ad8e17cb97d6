"""Policies: what a job may read, write and connect to, by who gave it; see docs/security.md."""
