"""Splits of a model over ranks, placement of ranks on nodes, and communication between ranks."""
