"""A plan as arrays: what one rank computes, reads and writes in a step."""
