"""Draft training: the port in base.py, SpecForge in specforge.py."""
