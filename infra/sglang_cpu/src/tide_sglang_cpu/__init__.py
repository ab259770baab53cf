"""EAGLE3 on a plain CPU for unmodified SGLang 0.5.23: the plugin's entry point.

Owns: `register`, which SGLang calls once in each of its processes. Imports SGLang only when it acts, so that the pure
parts (`slots`, `tree`, `layout`) are usable without it.
"""

import os


def register() -> None:
    """Entry point `sglang.srt.plugins: tide_cpu`. Does nothing unless SGLANG_USE_CPU_ENGINE=1.

    Raises SystemExit where SGLang does not look as expected: SGLang's plugin loader logs and forgets every ordinary
    exception, and a server that lost its attention backend on the way must not come up.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from tide_sglang_cpu import install  # imports SGLang

    try:
        install.install(overlap=os.environ.get("TIDE_CPU_OVERLAP") == "1")
    except install.IncompatibleSGLangError as e:
        raise SystemExit(f"tide-sglang-cpu: {e}") from e
