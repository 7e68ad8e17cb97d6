"""Sends requests to a hosted model over HTTP: client, limits, journal of answers, engine stage."""
