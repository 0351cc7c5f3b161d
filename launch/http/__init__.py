"""The HTTP server: routes, authentication, TLS, limits."""
