"""Layers that models are built from, each with one rank's share of the weights."""
