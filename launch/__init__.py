"""What an operator runs: command line, HTTP server, placement."""
