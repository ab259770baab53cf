"""The service as people and monitors see it.

Status, what waits for a person, metrics, names of events, doctor. Reads only.
"""
