"""What was captured and how it is kept.

Spool, shards, request tables, their harvest onto main, snapshots for the stages, and what leaves again.
"""
