"""Whether retraining pays.

The rule, what it looks at, the frozen baseline that it compares with, and the check of the engine.
"""
