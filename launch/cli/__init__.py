"""The `raycache` command."""
