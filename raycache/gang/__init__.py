"""Connects the decider with its ranks: in this process, in other processes, or over a control group."""
