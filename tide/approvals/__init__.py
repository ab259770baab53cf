"""People's decisions.

When they are needed, what counts as an answer, what waits, and how it is told.
"""
