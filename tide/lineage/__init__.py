"""Where a draft comes from, and what served when.

Commit metadata, the ledger, views of both, and making a draft again.
"""
