"""Attention over new tokens and a cached prefix, under context parallelism."""
