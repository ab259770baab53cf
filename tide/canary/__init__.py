"""One replica first.

The trial of a candidate, its lease, what is watched, and the rule that ends it.
"""
