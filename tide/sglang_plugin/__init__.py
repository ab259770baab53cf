"""What runs inside the SGLang process: the tap of hidden states, the spool writer, the draft swap, the self-check.

Owns the entry point ``sglang.srt.plugins``. Imports nothing else of tide but domain, shards, requests and errors.
"""

from __future__ import annotations


def register() -> None:
    """Called by SGLang in each of its processes, before anything is loaded. Inert unless its settings ask for work."""
    from tide.sglang_plugin.settings import PluginSettings

    settings = PluginSettings.from_environment()
    if not settings.active:
        return
