"""What a cache without limits, or of another size, would have reused of the same requests."""
