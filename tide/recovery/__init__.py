"""What a process that died leaves behind.

Whose it is, when it is taken for dead, and what of it may be mended.
"""
