"""A real SGLang server on the CPU for a test: started as `tide up` starts it, on a free port, ended as a group.

Knows nothing of what is tested with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from infra import ports, sglang
from infra.processes import ManagedProcess

PLUGIN = Path(__file__).parent / "engine_plugin"
START_S = 400.0  # 20 s on an idle machine; ten times that beside a build


class SglangServer:
    """Context manager: ready on entry, gone on exit; its log is kept in `home`/logs/sglang.log.

        with SglangServer(tmp_path, target_model, draft=random_draft, dtype="float32", env={...}) as server:
            server.generate(["Hello"], tokens=8)

    Args:
        home: a folder for the log and the process record.
        model: the target model's folder.
        draft: the draft's folder; None: plain serving.
        env: variables beside the usual ones. With any TIDE_TEST_* among them the test plugin
            in `engine_plugin` beside this file is loaded too.
        start_s: how long it is waited for.
        options: further fields of `infra.sglang.SglangOptions` (dtype, steps, topk, draft_tokens, admin_key, spool,
            draft_dir, extra_args, ...).

    Raises on entry:
        ServiceError: it ended or was not ready in time; the message has the end of its log.
    """

    def __init__(
        self,
        home: Path,
        model: Path,
        *,
        draft: Path | None = None,
        env: Mapping[str, str] | None = None,
        start_s: float = START_S,
        **options: Any,
    ) -> None:
        self.home, self.start_s = home, start_s
        self.options = sglang.SglangOptions(
            model=model.absolute(),
            port=ports.free_port(),
            draft=draft.absolute() if draft else None,
            speculative=draft is not None,
            plugin_env=_with_test_plugin(dict(env or {})),
            **options,
        )
        self.process: ManagedProcess | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return self.options.url

    def __enter__(self) -> Self:
        self.process = sglang.launch(self.home, self.options)
        try:
            sglang.wait_ready(self.process, self.options, timeout_s=self.start_s)
        except BaseException:
            self.process.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.stop()

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 600.0) -> Any:
        """The JSON answer to a POST; raises httpx.HTTPStatusError for one that is not 2xx."""
        answer = httpx.post(self.url + path, json=body, timeout=timeout_s, trust_env=False)
        answer.raise_for_status()
        return answer.json()

    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], tokens: int, **sampling: Any
    ) -> list[dict[str, Any]]:
        """Answers of /generate to all prompts (texts or token ids) at once, greedy and of exactly `tokens` tokens.

        Each has `text`, `output_ids` and `meta_info` (`spec_verify_ct` and the rest, when speculative).
        """
        kind = "text" if isinstance(prompts[0], str) else "input_ids"
        wanted = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
        answers: list[dict[str, Any]] = self.post("/generate", {kind: list(prompts), "sampling_params": wanted})
        return answers


def _with_test_plugin(env: dict[str, str]) -> dict[str, str]:
    if any(name.startswith("TIDE_TEST_") for name in env):
        env["PYTHONPATH"] = os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])
    return env
