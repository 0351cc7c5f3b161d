"""Messages between the decider and the ranks."""
