"""The storage tier: objects by content key, behind one small interface (base.py)."""
