"""Command line and HTTP server."""
