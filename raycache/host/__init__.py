"""The host tier of a node: its arena, the process that owns it, and its files."""
