"""What an HTTP server does, as metrics, log lines and traces."""
