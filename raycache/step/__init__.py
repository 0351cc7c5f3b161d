"""Turns a plan into arrays: what one rank computes, reads and writes in a step."""
