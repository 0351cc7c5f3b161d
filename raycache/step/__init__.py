"""Arrays of a step on one rank, made from its plan."""
