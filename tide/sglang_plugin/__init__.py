"""What runs inside the SGLang process: the tap of hidden states, the spool writer, the draft swap, the self-check.

Owns the entry point ``sglang.srt.plugins``. Imports nothing else of tide but domain, shards, requests, draft_files
and errors.
"""

from __future__ import annotations

from tide.errors import ConfigError


def register() -> None:
    """Called by SGLang in each of its processes, before anything is loaded. Inert unless its settings ask for work.

    Raises:
        SystemExit: the settings are wrong, or this SGLang is not one that we know. SGLang only logs an exception of a
            plugin and serves without it; a service that asked for capture must not start without capture.
    """
    # Imported here: SGLang loads this module in every process, also where the plugin is inert.
    from tide.sglang_plugin.settings import PluginSettings

    try:
        settings = PluginSettings.from_environment()
        if settings.active:
            _install(settings)
    except ConfigError as error:
        raise SystemExit(f"tide: {error}") from error


def _install(settings: object) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from tide.sglang_plugin import hooks, swap
    from tide.sglang_plugin.selfcheck import require_resolvable
    from tide.sglang_plugin.settings import PluginSettings

    assert isinstance(settings, PluginSettings)
    settings.prepare()
    require_resolvable(hooks.targets(settings))
    swap.install(HookRegistry, settings)
    hooks.Hooks(settings, HookRegistry).install()
