"""Models as files.

The draft and its format, the target's folder, a run's checkpoints, candidates on their branches, the old drafts.
"""
