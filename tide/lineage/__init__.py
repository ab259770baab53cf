"""Where a draft comes from, and what served when.

Commit metadata, the ledger, views of both. Making a draft again is tide.reproduce.
"""
