"""What the decider and the ranks say to each other."""
