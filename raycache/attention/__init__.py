"""Attention of new tokens to themselves and a cached prefix, with context parallelism."""
