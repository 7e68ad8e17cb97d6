"""What a job may reach, by where it comes from: docs/security.md has the rules for people."""
