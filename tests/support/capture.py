"""Traffic for capture tests, and the truth to compare its rows with: transformers in float32 on the same tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.sglang_server import SglangServer
from tide.sglang_plugin.admission import request_hash

KEY = "a key for capture tests"
LAYERS = (1, 14, 26)
MESSAGES = [{"role": "user", "content": "Which metals rust, and why?"}]
_LONG = "In the beginning the engineers wrote a small compiler and then rewrote it in itself many times over. "
PROMPTS: dict[str, str] = {
    "short": "Tell me about the history of numbers: one two three four",
    "medium": "A story. " + _LONG * 2,
    "long": "Another story. " + _LONG * 6,
    "again": "Tell me about the history of numbers: one two three four",
    "turn": "A story. " + _LONG * 2 + "And then they",
    "one": "Say a single thing now please because I asked",
    "stop": "Count: one two three four five six seven",
    "json": "Give a JSON object with a name: ",
}
TOKENS = {"short": 33, "medium": 42, "long": 39, "again": 34, "turn": 41, "one": 1, "stop": 40, "json": 40}
SAMPLING: dict[str, dict[str, Any]] = {
    "stop": {"stop": [" the", ",", "."]},
    "json": {"json_schema": '{"type":"object","properties":{"name":{"type":"string"}},"required":["name"]}'},
}


@dataclass(frozen=True)
class Captured:
    """What the plugin handed to the spool for one request."""

    ids: list[int]
    """From the first row's through the last token."""
    first: int
    prompt_len: int
    aux: torch.Tensor
    last: torch.Tensor


class Truth:
    """The target in transformers, float32, one thread."""

    def __init__(self, model: Path) -> None:
        self._folder = model

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._folder)

    @cached_property
    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32).eval()

    @cached_property
    def head(self) -> torch.Tensor:
        weight: torch.Tensor = self.model.lm_head.weight.detach()
        return weight

    def states(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """aux [n, 3H] and last [n, H] of all positions."""
        with torch.no_grad():
            out = self.model.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        aux = torch.cat([out.hidden_states[layer + 1][0] for layer in LAYERS], dim=-1)
        return aux, out.last_hidden_state[0]

    def errors(self, prompt: list[int], found: Captured) -> torch.Tensor:
        """[rows] relative error of each row, the larger of aux and last."""
        ids = [*prompt[: found.first], *found.ids]
        rows = slice(found.first, found.first + found.aux.shape[0])
        aux, last = (states[rows] for states in self.states(ids))
        return torch.maximum(_relative(found.aux, aux), _relative(found.last, last))

    def agreement(self, found: Captured) -> float:
        """Share of generated tokens that lm_head reproduces from the row before."""
        start = max(0, found.prompt_len - 1 - found.first)
        predicted = (found.last[start:] @ self.head.T).argmax(-1)
        return float((predicted == torch.tensor(found.ids[start + 1 :])).float().mean())


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)


class Client:
    """Sends requests to a server that captures, and reads what was dumped for each."""

    def __init__(self, server: SglangServer, spool: Path, dump: Path) -> None:
        self.server, self.spool, self.dump = server, spool, dump

    def mixed(self, tag: str) -> dict[str, dict[str, Any]]:
        """All PROMPTS, at once but for the one with a grammar; answers by name. The rid of each is ``tag-name``.

        In the overlap loop SGLang now and then samples past a grammar whose prefill is followed by another's, and
        answers 500 ("Grammar accept_token failed", its issues 12461 and 25388): the engine's fault, not the tap's.
        """
        together = [name for name in PROMPTS if name != "json"]
        with ThreadPoolExecutor(len(together)) as pool:
            answers = pool.map(lambda name: self.generate(f"{tag}-{name}", PROMPTS[name], name), together)
            found = dict(zip(together, answers, strict=True))
        return {**found, "json": self.generate(f"{tag}-json", PROMPTS["json"], "json")}

    def generate(self, rid: str, prompt: str, name: str = "", **body: Any) -> dict[str, Any]:
        """One greedy answer."""
        params = {"temperature": 0, "max_new_tokens": TOKENS.get(name, 24), "ignore_eos": True}
        params |= SAMPLING.get(name, {}) | body.pop("params", {})
        answer: dict[str, Any] = self.server.post(
            "/generate", {"rid": rid, "text": prompt, "sampling_params": params, **body}
        )
        return answer

    def chat(self, rid: str, **body: Any) -> dict[str, Any]:
        """One chat answer."""
        usual = {"model": "m", "messages": MESSAGES, "max_tokens": 20, "temperature": 0, "rid": rid}
        answer: dict[str, Any] = self.server.post("/v1/chat/completions", {**usual, **body})
        return answer

    def abort_midway(self, rid: str, prompt: str) -> int:
        """Stream an answer, abort it after some tokens; returns the tokens that came."""
        body = {"rid": rid, "text": prompt, "stream": True}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
        tokens, asked = 0, False
        with httpx.stream("POST", f"{self.server.url}/generate", json=body, timeout=300, trust_env=False) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                tokens = int(json.loads(line[6:])["meta_info"]["completion_tokens"])
                if tokens > 8 and not asked:
                    asked = True
                    httpx.post(f"{self.server.url}/abort_request", json={"rid": rid}, timeout=60, trust_env=False)
        return tokens

    def state(self) -> dict[str, Any]:
        """The plugin's own state."""
        info = httpx.get(f"{self.server.url}/server_info", timeout=60, trust_env=False).json()
        state: dict[str, Any] = info["internal_states"][0]["tide"]
        return state

    def captured(self, rid: str) -> Captured:
        """What was handed to the spool; waits for it."""
        path = self.path(rid)
        wait_for(path.exists, f"rows of {rid}")
        with safe_open(str(path), "pt") as file:
            return Captured(
                ids=file.get_tensor("ids").tolist(),
                first=int(file.get_tensor("first_row")),
                prompt_len=int(file.get_tensor("prompt_len")),
                aux=file.get_tensor("aux"),
                last=file.get_tensor("last"),
            )

    def path(self, rid: str) -> Path:
        """Where the rows of a request are dumped."""
        return self.dump / f"{request_hash(KEY.encode(), rid)}.safetensors"


def plugin_env(dump: Path, **settings: str) -> Mapping[str, str]:
    """Variables of a server whose draft accepts and whose rows are dumped."""
    usual = {"TIDE_HASH_KEY": KEY, "TIDE_SHARD_AGE_S": "2", "TIDE_TEST_DUMP": str(dump), "TIDE_TEST_ORACLE": "1"}
    return {**usual, **settings}


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Wait until a condition is true; AssertionError when it is not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:.0f} s"
        time.sleep(0.05)
