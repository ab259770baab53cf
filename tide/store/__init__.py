"""Versioned object storage: the port in base.py, lakeFS in lakefs.py."""
