"""Metrics, access log and traces of the HTTP server."""
