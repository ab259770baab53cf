"""People's decisions.

When they are needed, what counts as an answer, and how it is told.
"""
