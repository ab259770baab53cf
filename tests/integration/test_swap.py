"""The draft swap in a real SGLang server, in float32: under load, refused without a trace, found after a restart.

One server for all tests but the last two. Its drafts are told apart by acceptance: ``echo`` is accepted in full where
the target repeats a token, ``shuffled`` is echo with head and map in another order, ``dull`` has random weights.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save_file

from tests.support.drafts import ECHO_PROMPT, draft_tensors, echo_tensors, for_model
from tests.support.sglang_server import SglangServer
from tests.support.signed import KEY as SIGNER
from tests.support.signed import STRANGER, attest, attestation, verdict_on
from tide.domain import DraftModel
from tide.engine.sglang import SglangEngine
from tide.errors import EngineError, EngineUnavailable, ServiceError, SwapRefused
from tide.models.draft_files import load_draft, write_draft, write_record

KEY = "swap-test"
TOKENS = 32
LOAD = ["Tell me about the sea.", "Write a poem about bread.", "List three old bridges:", "Once upon a time, a town"]

pytestmark = pytest.mark.timeout(1200)


@dataclass
class Rig:
    """The running server, its client, and the drafts in its folder."""

    server: SglangServer
    engine: SglangEngine
    folder: Path
    config: dict[str, Any]
    dull: str
    echo: str
    shuffled: str
    first: str
    """The draft in serving when the server was ready."""

    def echoed(self) -> tuple[list[int], float]:
        """Greedy ids and acceptance length where echo is accepted in full; no prefix of another draft is reused."""
        self.engine.flush_cache()
        sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        answer = self.server.post("/generate", {"input_ids": ECHO_PROMPT, "sampling_params": sampling})
        return answer["output_ids"], answer["meta_info"]["spec_accept_length"]

    def smuggle(self, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> str:
        """Put a draft in the folder past every check, under its right digest."""
        scratch = self.folder / "scratch"
        scratch.mkdir()
        save_file(tensors, scratch / "model.safetensors")
        (scratch / "config.json").write_text(json.dumps(config or self.config))
        digest = hashlib.sha256((scratch / "model.safetensors").read_bytes()).hexdigest()
        scratch.rename(self.folder / digest)
        attest(self.folder, digest)
        return digest

    def write(self, config: dict[str, Any], seed: int) -> str:
        """A valid draft that was promoted, as far as its attestation goes."""
        digest = write_draft(self.folder, config, draft_tensors(config, seed))[1]
        attest(self.folder, digest)
        return digest


@pytest.fixture(scope="module")
def rig(target_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    home = tmp_path_factory.mktemp("swap")
    folder, config = home / "drafts", for_model(target_model)
    dull = write_draft(folder, config, draft_tensors(config, 1))[1]
    echo = write_draft(folder, config, echo_tensors(target_model, config))[1]
    shuffled = write_draft(folder, config, echo_tensors(target_model, config, seed=5))[1]
    for digest in (dull, echo, shuffled):
        attest(folder, digest)
    (folder / "serving").write_text(echo)
    with SglangServer(
        home,
        target_model,
        draft=folder / dull,
        draft_dir=folder,
        spool=home / "spool",
        admin_key=KEY,
        dtype="float32",
        env={"TIDE_CPU_OVERLAP": "1", "TIDE_PUBLIC_KEYS": SIGNER.public},
    ) as server:
        engine = SglangEngine(server.url, admin_key=KEY, control_timeout_s=120, health_timeout_s=60)
        yield Rig(server, engine, folder, config, dull, echo, shuffled, engine.active_draft())
        engine.close()


def test_a_server_starts_with_the_draft_that_serving_names(rig: Rig) -> None:
    assert rig.first == rig.echo
    rig.engine.swap_draft(rig.echo)
    assert rig.echoed()[1] == 4.0


def test_the_capture_rate_of_a_running_server_changes_and_only_for_who_has_the_admin_key(rig: Rig) -> None:
    with pytest.raises(EngineError, match="admin key was refused"):
        SglangEngine(rig.server.url, control_timeout_s=120).set_capture_rate(0.5)
    assert rig.engine.facts().capture["sample_rate"] == 1.0
    rig.engine.set_capture_rate(0.0)
    before = rig.engine.facts().capture
    rig.engine.generate([{"role": "user", "content": "Nothing of this is kept."}], max_new_tokens=8)
    after = rig.engine.facts().capture
    assert (after["sample_rate"], after.get("rows", 0)) == (0.0, before.get("rows", 0))
    assert after["excluded"]["sampled_out"] == before["excluded"].get("sampled_out", 0) + 1
    with pytest.raises(EngineError, match=r"capture rate of 1\.5 was refused"):
        rig.engine.set_capture_rate(1.5)
    rig.engine.set_capture_rate(1.0)
    assert rig.engine.facts().capture["sample_rate"] == 1.0


def test_a_swap_exchanges_weights_and_map_together(rig: Rig) -> None:
    rig.engine.swap_draft(rig.dull)
    plain, low = rig.echoed()
    rig.engine.swap_draft(rig.echo)
    ids, high = rig.echoed()
    rig.engine.swap_draft(rig.shuffled)
    again, shuffled = rig.echoed()
    assert plain == ids == again
    assert low < 1.3
    assert shuffled == high == 4.0


def test_a_swap_under_load_changes_no_answer_and_fails_no_request(rig: Rig) -> None:
    def answer(prompt: str) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": sampling}
        ids: list[int] = rig.server.post("/generate", body)["output_ids"]
        return ids

    with ThreadPoolExecutor(len(LOAD)) as pool:
        rig.engine.swap_draft(rig.echo)
        expected = list(pool.map(answer, LOAD))
        rig.engine.flush_cache()
        running = [pool.submit(answer, prompt) for prompt in LOAD]
        time.sleep(1.0)
        swaps = [rig.engine.swap_draft(digest) for digest in (rig.dull, rig.shuffled, rig.echo)]
        in_flight = sum(not future.done() for future in running)
        answers = [future.result() for future in running]
    assert answers == expected
    assert in_flight == len(LOAD), "the requests were over before the swaps, so that this has shown nothing"
    assert rig.engine.active_draft() == rig.echo
    print("seconds from pause to continue:", [round(swap.seconds, 4) for swap in swaps])


def test_going_back_to_the_previous_draft_reads_no_file(rig: Rig) -> None:
    rig.engine.swap_draft(rig.echo)
    rig.engine.swap_draft(rig.dull)
    shutil.move(rig.folder / rig.echo, rig.folder / "away")
    try:
        assert rig.engine.swap_draft(rig.echo).after == rig.echo
        assert rig.echoed()[1] == 4.0
    finally:
        shutil.move(rig.folder / "away", rig.folder / rig.echo)


def refusals(rig: Rig) -> Iterator[tuple[str, str]]:
    """Digest (or what stands for one) and what the refusal must say."""
    tensors = draft_tensors(rig.config, 7)
    q_proj, fc = "midlayer.self_attn.q_proj.weight", "fc.weight"
    nan = tensors[fc].clone()
    nan[5, 5] = float("nan")
    embedding = torch.zeros(rig.config["vocab_size"], rig.config["hidden_size"], dtype=torch.bfloat16)
    yield rig.smuggle({**tensors, "embed_tokens.weight": embedding}), "belongs to the target"
    yield rig.smuggle({k: v for k, v in tensors.items() if k != q_proj}), "q_proj"
    yield rig.smuggle({**tensors, fc: tensors[fc][:, :-3].contiguous()}), "fc.weight: shape"
    yield rig.smuggle({**tensors, fc: nan}), "not finite"
    yield rig.smuggle({k: v for k, v in tensors.items() if k != "lm_head.weight"}), "lm_head"
    yield rig.smuggle({k: v for k, v in tensors.items() if k != "d2t"}), "no d2t"
    yield rig.smuggle({**tensors, "d2t": tensors["d2t"] + 1}), "d2t"
    small = {**rig.config, "draft_vocab_size": 4096}
    yield rig.write(small, 8), "restart.*draft_vocab_size"
    other = rig.write(rig.config, 9)
    shutil.move(rig.folder / other, rig.folder / ("e" * 64))
    attest(rig.folder, "e" * 64)
    yield "e" * 64, "was asked for"
    yield "f" * 64, "is not in"
    yield "../" + rig.dull, "no draft digest"
    yield str(rig.folder / rig.dull), "no draft digest"
    foreign = rig.write(rig.config, 10)
    draft, target = load_draft(rig.folder / foreign), rig.engine.facts().target
    assert target is not None
    target = target.model_copy(update={"weights": "0" * 64})
    write_record(rig.folder / foreign, DraftModel(digest=foreign, contract=draft.contract, target=target))
    yield foreign, "target .*weights"


def unsigned(rig: Rig) -> Iterator[tuple[str, str]]:
    """Valid drafts whose attestation is missing, a stranger's, another draft's, or on a forged verdict."""
    yield write_draft(rig.folder, rig.config, draft_tensors(rig.config, 20))[1], "was not promoted"
    attest(rig.folder, strangers := rig.write(rig.config, 21), STRANGER)
    yield strangers, "not trusted here"
    path = attest(rig.folder, borrowed := rig.write(rig.config, 22))
    path.write_bytes((rig.folder / f"{rig.dull}.attestation.json").read_bytes())
    yield borrowed, "is for draft"
    path = attest(rig.folder, forged := rig.write(rig.config, 23))
    reject = SIGNER.sign("verdict", verdict_on(forged, outcome="reject"))
    promote = reject.model_copy(update={"payload": reject.payload.replace("reject", "promote")})
    path.write_text(SIGNER.sign("attestation", attestation(forged, promote)).to_json())
    yield forged, "verdict: the signature .* is not over this content"
    path.write_text("{")
    yield forged, "cannot be read"


def test_a_draft_without_a_true_attestation_is_refused_and_serving_is_as_it_was(rig: Rig) -> None:
    rig.engine.swap_draft(rig.echo)
    before = rig.echoed()
    for digest, message in unsigned(rig):
        with pytest.raises(SwapRefused, match=message):
            rig.engine.swap_draft(digest)
        assert rig.engine.active_draft() == rig.echo
    assert rig.echoed() == before


def test_every_refused_draft_leaves_serving_as_it_was(rig: Rig) -> None:
    rig.engine.swap_draft(rig.echo)
    before, swaps = rig.echoed(), rig.engine.facts()
    for digest, message in refusals(rig):
        with pytest.raises(SwapRefused, match=message):
            rig.engine.swap_draft(digest)
        assert rig.engine.active_draft() == rig.echo
    assert rig.echoed() == before
    assert rig.engine.facts().draft_contract == swaps.draft_contract


def test_the_served_model_keeps_its_name(rig: Rig) -> None:
    def names() -> tuple[Any, Any]:
        listed = httpx.get(rig.server.url + "/v1/models", trust_env=False).json()["data"][0]["id"]
        return listed, httpx.get(rig.server.url + "/model_info", trust_env=False).json()["model_path"]

    before = names()
    rig.engine.swap_draft(rig.dull)
    rig.engine.swap_draft(rig.echo)
    assert names() == before


def test_an_unknown_selector_never_reaches_the_stock_update(rig: Rig) -> None:
    body = {"model_path": rig.dull, "manifest": {"selector": "drafts"}, "flush_cache": False}
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(rig.server.url + "/update_weights_from_disk", json=body, headers=headers, trust_env=False)
    assert (answer.status_code, "only 'draft'" in answer.text) == (400, True)


def test_another_admin_key_is_refused(rig: Rig) -> None:
    engine = SglangEngine(rig.server.url, admin_key="guess")
    with pytest.raises(SwapRefused, match="admin key"):
        engine.swap_draft(rig.dull)
    engine.close()


def test_a_chat_comes_back_with_its_own_counters(rig: Rig) -> None:
    answer = rig.engine.generate(
        [{"role": "user", "content": "Name three colours."}], max_new_tokens=12, request="chat-1", conversation="c"
    )
    assert (answer.request, answer.completion_tokens, len(answer.output_ids)) == ("chat-1", 12, 12)
    assert answer.verify_steps is not None
    assert answer.proposed == 3 * answer.verify_steps
    assert answer.text


def test_facts_name_engine_target_and_draft(rig: Rig) -> None:
    rig.engine.swap_draft(rig.shuffled)
    facts = rig.engine.facts()
    assert facts.engine.startswith("sglang 0.5")
    assert facts.draft == rig.shuffled
    assert facts.draft_contract == load_draft(rig.folder / rig.shuffled).contract
    assert (facts.speculative_steps, facts.speculative_topk, facts.draft_tokens) == (3, 1, 4)
    assert facts.target is not None
    assert facts.target.aux_layers == facts.draft_contract.aux_layers


def test_a_stopped_scheduler_is_found_although_the_web_server_answers(rig: Rig) -> None:
    assert rig.server.process is not None
    parent = psutil.Process(rig.server.process.record.pid)
    (scheduler,) = [p for p in parent.children(recursive=True) if "scheduler" in " ".join(p.cmdline())]
    impatient = SglangEngine(rig.server.url, health_timeout_s=4.0)
    scheduler.suspend()
    try:
        assert httpx.get(rig.server.url + "/v1/models", trust_env=False).status_code == 200
        with pytest.raises(EngineUnavailable):
            impatient.check_health()
    finally:
        scheduler.resume()
        impatient.close()
    rig.engine.check_health()


def test_without_an_admin_key_there_is_no_swap_and_an_untrained_draft_counts_as_none(
    target_model: Path, tmp_path: Path
) -> None:
    config = for_model(target_model)
    dull = write_draft(tmp_path / "drafts", config, draft_tensors(config, 1))[1]
    env = {"TIDE_DRAFT_UNTRAINED": "1"}
    folder = tmp_path / "drafts"
    with SglangServer(
        tmp_path, target_model, draft=folder / dull, draft_dir=folder, dtype="float32", env=env
    ) as server:
        engine = SglangEngine(server.url)
        assert engine.active_draft() == "none"
        with pytest.raises(SwapRefused, match="admin-api-key"):
            engine.swap_draft(dull)
        engine.close()


def test_a_server_whose_serving_draft_is_missing_does_not_start(target_model: Path, tmp_path: Path) -> None:
    config = for_model(target_model)
    folder = tmp_path / "drafts"
    dull = write_draft(folder, config, draft_tensors(config, 1))[1]
    (folder / "serving").write_text("d" * 64)
    server = SglangServer(tmp_path, target_model, draft=folder / dull, draft_dir=folder, dtype="float32")
    with pytest.raises(ServiceError), server:
        pass
    log = next(tmp_path.rglob("*.log")).read_text()
    assert f"draft {'d' * 12} is not in {folder}" in log
