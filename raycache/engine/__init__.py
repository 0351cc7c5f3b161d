"""The decider (scheduler, plans) and the executors (ranks)."""
