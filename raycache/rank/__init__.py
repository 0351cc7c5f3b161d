"""A rank: it executes plans with its part of the model, and decides nothing."""
