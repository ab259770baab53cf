"""Draft training: the port in base.py, SpecForge in specforge.py, which of a run's checkpoints in checkpoints.py."""
