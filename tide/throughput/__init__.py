"""What acceptance is worth in tokens a second.

An engine's profile, the service's load, the prediction from both, and when a training pays.
"""
