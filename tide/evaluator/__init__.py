"""Offline acceptance: the port in base.py, EAGLE3 drafts in eagle3.py."""
