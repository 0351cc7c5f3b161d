"""Decides what the ranks compute next: requests, admission, plans and results. Imports no torch."""
