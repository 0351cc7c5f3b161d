"""The host tier of a node: its arena, the owner of that, and where its files lie."""
