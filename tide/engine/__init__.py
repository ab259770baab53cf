"""The serving engine: the port in base.py, SGLang over HTTP in sglang.py."""
