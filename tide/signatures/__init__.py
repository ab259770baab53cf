"""Who decided, provable without the decider.

Keys, signed records, and what a replica must see before it serves a draft.
"""
