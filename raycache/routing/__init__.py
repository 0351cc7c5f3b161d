"""Which replica gets a request, and what replicas report together."""
