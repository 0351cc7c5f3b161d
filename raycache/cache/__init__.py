"""Decides which prefix is cached in which tier; moves no tensors."""
