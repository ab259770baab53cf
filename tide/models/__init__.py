"""Models as files.

The draft and its format, the target's folder, candidates on their branches, the old drafts.
"""
