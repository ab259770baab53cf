"""The service as people and monitors see it.

Status, metrics, names of events, doctor. Reads only.
"""
