"""Puts decider and ranks together: in this process, in processes, or behind a control group."""
