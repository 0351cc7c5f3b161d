"""Cached state: its description, the pools that hold it, and moves between device and host."""
