"""Asks a hosted model over HTTP: requests, limits, journal of answers, and the engine stage."""
