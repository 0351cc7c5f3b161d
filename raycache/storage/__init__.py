"""Storage media, and the workers that move rows between them and the host tier."""
