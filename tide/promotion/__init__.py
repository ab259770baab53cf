"""Whether a candidate is better.

The rule, its slices and families of verdicts, the throughput guard, and a verdict in words and plots.
"""
