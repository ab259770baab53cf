"""The demo: real traffic against the real service, and the story that `tide demo` tells about it.

Owns prompts, load, measuring and the report. Imported by the command alone; starts no process itself (see ``Stack``).
"""
