"""Taking a conversation or a request out of everything that was stored.

Found in all of the history, written again without it, old copies deleted.
"""
