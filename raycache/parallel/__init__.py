"""Where a rank sits in the gang, what it owns, and how ranks talk to each other."""
