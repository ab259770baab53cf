"""The swap without an engine: a small draft module with fused parameters that shares its embedding with a target."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.drafts import draft_config, draft_tensors
from tide.domain import DraftModel, TargetContract
from tide.errors import ConfigError, DraftError, TideError
from tide.models.draft_files import DraftFiles, load_draft, write_draft, write_record
from tide.sglang_plugin import swap as hooks
from tide.sglang_plugin.drafts import DraftShelf
from tide.sglang_plugin.served import ServedDraft
from tide.sglang_plugin.settings import PluginSettings
from tide.sglang_plugin.weights import LiveDraft, changed, fingerprint

TARGET = TargetContract(
    weights="a" * 64, tokenizer="b" * 64, dtype="bfloat16", hidden_size=16, vocab_size=50, aux_layers=(1, 2, 3)
)


class Draft(nn.Module):
    """Parameters as SGLang names and fuses them, and its loader: unknown names are skipped without a word."""

    FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))

    def __init__(self, tensors: dict[str, torch.Tensor], target: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.quant_config: Any = None
        self.fail_at: str | None = None
        self.starts: dict[str, int] = {}
        for whole, parts in self.FUSED:
            names = [n for p in parts for n in tensors if f".{p}." in n]
            name, start = names[0].replace(parts[0], whole), 0
            for part in names:
                self.starts[part], start = start, start + tensors[part].shape[0]
            self._put(name, torch.cat([tensors[n] for n in names]).to(dtype))
        for name, tensor in tensors.items():
            if name not in ("d2t", "t2d") and not any(f".{p}." in name for _, parts in self.FUSED for p in parts):
                self._put(name, tensor.to(dtype))
        self.model.register_module("embed_tokens", target.get_submodule("model.embed_tokens"))

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        *path, leaf = self._live(name).split(".")
        module: nn.Module = self
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(tensor.clone(), requires_grad=False))

    @staticmethod
    def _live(name: str) -> str:
        inner = name.replace("midlayer", "layers.0")
        return inner if inner.startswith("lm_head") else f"model.{inner}"

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, tensor in weights:
            if self.fail_at and self.fail_at in name:
                raise RuntimeError("copy failed")
            live = self._live(name)
            for whole, parts in self.FUSED:
                for part in parts:
                    live = live.replace(f".{part}.", f".{whole}.")
            if live in own:
                start = self.starts.get(name, 0)
                own[live].data[start : start + tensor.shape[0]].copy_(tensor)


class Rig:
    """An engine's worth of draft: target, draft, map, and the folder of drafts."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16, **served: Any) -> None:
        self.folder, self.first = folder, self.publish(folder, seed=0)
        start = load_draft(folder / self.first)
        self.target = nn.Module()
        self.target.add_module("model", nn.Module())
        embedding = nn.Embedding(50, 16, dtype=dtype).requires_grad_(False)
        self.target.get_submodule("model").add_module("embed_tokens", embedding)
        self.draft = Draft(start.tensors, self.target, dtype)
        self.worker = SimpleNamespace(hot_token_id=start.target_ids.clone())
        self.live = LiveDraft(self.draft, self.worker, self.target)
        self.served = ServedDraft(DraftShelf(folder), **served)
        self.waits = 0
        self.served.adopt(start, self.live, agree=lambda reason: reason, quiesce=self.quiesce)

    def quiesce(self) -> None:
        self.waits += 1

    @staticmethod
    def publish(folder: Path, seed: int, **config: Any) -> str:
        values = draft_config(**config)
        tensors = draft_tensors(values, seed)
        if seed:  # another map: the same ids in another order
            order = torch.randperm(20, generator=torch.Generator().manual_seed(seed))
            ids = (tensors["d2t"] + torch.arange(20))[order]
            tensors["d2t"] = ids - torch.arange(20)
        return write_draft(folder, values, tensors)[1]

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: p.clone() for n, p in self.draft.named_parameters()} | {"map": self.worker.hot_token_id.clone()}

    def serves(self, digest: str) -> bool:
        """True when every weight and the map are those of the draft."""
        wanted = Draft(load_draft(self.folder / digest).tensors, self.target, torch.bfloat16)
        named = dict(wanted.named_parameters())
        same = [torch.equal(parameter, named[name]) for name, parameter in self.draft.named_parameters()]
        return all(same) and torch.equal(self.worker.hot_token_id, load_draft(self.folder / digest).target_ids)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_swap_loads_weights_and_map_at_the_same_addresses(rig: Rig) -> None:
    second = rig.publish(rig.folder, seed=2)
    pointers = [p.data_ptr() for p in rig.draft.parameters()] + [rig.worker.hot_token_id.data_ptr()]
    result = rig.served.swap(second)
    assert (result["before"], result["after"]) == (rig.first, second)
    assert rig.serves(second)
    assert pointers == [p.data_ptr() for p in rig.draft.parameters()] + [rig.worker.hot_token_id.data_ptr()]
    assert (rig.served.digest, rig.served.count, rig.waits) == (second, 1, 1)


def test_going_back_needs_no_file(rig: Rig) -> None:
    second = rig.publish(rig.folder, seed=2)
    rig.served.swap(second)
    (rig.folder / rig.first).rename(rig.folder / "gone")
    assert rig.served.swap(rig.first)["after"] == rig.first
    (rig.folder / "gone").rename(rig.folder / rig.first)
    assert rig.serves(rig.first)


def test_a_draft_two_swaps_back_is_read_and_checked_again(rig: Rig) -> None:
    rig.served.swap(rig.publish(rig.folder, seed=2))
    rig.served.swap(rig.publish(rig.folder, seed=3))
    (rig.folder / rig.first / "model.safetensors").write_bytes(b"changed since")
    with pytest.raises(DraftError, match="sha256"):
        rig.served.swap(rig.first)


@pytest.mark.parametrize("name", ["", "../secret", "/etc", "a" * 63, "A" * 64, "a" * 64 + "/..", "a" * 64 + "\n"])
def test_what_is_no_digest_is_never_looked_up(rig: Rig, name: str) -> None:
    with pytest.raises(DraftError, match="is no draft digest"):
        rig.served.swap(name)


def test_an_unknown_digest_and_a_link_are_refused(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    digest = rig.publish(elsewhere, seed=4)
    with pytest.raises(DraftError, match="is not in"):
        rig.served.swap(digest)
    (rig.folder / digest).symlink_to(elsewhere / digest)
    with pytest.raises(DraftError, match="is not in"):
        rig.served.swap(digest)


def test_a_draft_under_another_name_than_its_digest_is_refused(rig: Rig) -> None:
    (rig.folder / rig.publish(rig.folder, seed=2)).rename(rig.folder / ("f" * 64))
    with pytest.raises(DraftError, match="was asked for"):
        rig.served.swap("f" * 64)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"rope_theta": 5.0}, "rope_theta"),
        ({"draft_vocab_size": 10}, "draft_vocab_size"),
        ({"intermediate_size": 32}, "intermediate_size"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, "aux_layers"),
    ],
)
def test_another_draft_contract_needs_a_restart_and_says_what_differs(
    rig: Rig, config: dict[str, Any], part: str
) -> None:
    digest = write_draft(rig.folder, draft_config(**config), draft_tensors(draft_config(**config), 9))[1]
    before = rig.weights()
    with pytest.raises(TideError, match=rf"restart.*{part}"):
        rig.served.swap(digest)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), rig.weights().values(), strict=True))


def recorded(folder: Path, digest: str, target: TargetContract) -> None:
    draft: DraftFiles = load_draft(folder / digest)
    write_record(folder / digest, DraftModel(digest=digest, contract=draft.contract, target=target))


def test_a_draft_made_for_another_target_is_refused_by_its_record(rig: Rig) -> None:
    second = rig.publish(rig.folder, seed=2)
    rig.served.target = TARGET
    recorded(rig.folder, second, TARGET.model_copy(update={"tokenizer": "c" * 64}))
    with pytest.raises(TideError, match=r"target .*contract differs: tokenizer"):
        rig.served.swap(second)
    recorded(rig.folder, second, TARGET)
    assert rig.served.swap(second)["after"] == second


def test_a_parameter_shared_with_the_target_is_never_loaded(rig: Rig) -> None:
    rig.draft.lm_head.weight = rig.target.get_submodule("model.embed_tokens").weight
    with pytest.raises(TideError, match="shared with the target"):
        rig.served.swap(rig.publish(rig.folder, seed=2))


def test_an_engine_with_a_parameter_that_no_draft_has_is_refused(rig: Rig) -> None:
    rig.draft.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    with pytest.raises(TideError, match="not in the file"):
        rig.served.swap(rig.publish(rig.folder, seed=2))


def test_weights_may_be_widened_but_never_rounded(tmp_path: Path) -> None:
    wide = Rig(tmp_path / "wide", torch.float32)
    assert wide.served.swap(wide.publish(wide.folder, seed=2))["after"] != wide.first
    narrow = Rig(tmp_path / "narrow")
    digest = write_draft(narrow.folder, draft_config(), draft_tensors(draft_config(), 1, torch.float32))[1]
    with pytest.raises(TideError, match="would be rounded"):
        narrow.served.swap(digest)


def test_quantised_and_repacked_engines_are_refused(rig: Rig) -> None:
    second = rig.publish(rig.folder, seed=2)
    rig.draft.quant_config = object()
    with pytest.raises(TideError, match="quantised"):
        rig.served.swap(second)
    rig.draft.quant_config = None
    rig.draft.model.fc.use_intel_amx_backend = True
    with pytest.raises(TideError, match="repacked"):
        rig.served.swap(second)


@pytest.mark.parametrize("held", [None, torch.zeros(7, dtype=torch.int64)])
def test_a_map_never_appears_vanishes_or_changes_its_length(rig: Rig, held: torch.Tensor | None) -> None:
    rig.worker.hot_token_id = held
    with pytest.raises(TideError, match="vocabulary map"):
        rig.served.swap(rig.publish(rig.folder, seed=2))


def test_a_copy_that_fails_half_way_is_undone(rig: Rig) -> None:
    second = rig.publish(rig.folder, seed=2)
    original, rig.draft.fail_at = rig.draft.load_weights, "lm_head"

    def once(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        try:
            original(weights)
        finally:
            rig.draft.fail_at = None

    rig.draft.load_weights = once  # type: ignore[method-assign]
    with pytest.raises(DraftError, match="copy failed"):
        rig.served.swap(second)
    assert rig.serves(rig.first)
    assert (rig.served.digest, rig.served.count) == (rig.first, 0)


def test_a_copy_that_cannot_be_undone_is_no_known_draft(rig: Rig) -> None:
    second, rig.draft.fail_at = rig.publish(rig.folder, seed=2), "lm_head"
    with pytest.raises(DraftError, match="copy failed"):
        rig.served.swap(second)
    assert rig.served.digest == "none"
    assert "could not be undone" in (rig.served.stale or "")


def test_a_loader_that_moves_a_parameter_is_found_out(rig: Rig) -> None:
    original = rig.draft.load_weights

    def moving(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        original(weights)
        rig.draft.model.fc.weight.data = rig.draft.model.fc.weight.data.clone()

    rig.draft.load_weights = moving  # type: ignore[method-assign]
    with pytest.raises(DraftError, match=r"moved model\.fc\.weight"):
        rig.served.swap(rig.publish(rig.folder, seed=2))


def test_a_swap_that_reached_the_target_is_an_alarm(rig: Rig) -> None:
    original, told = rig.draft.load_weights, []
    rig.served.on_target_update = told.append

    def leaking(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        original(weights)
        rig.target.get_submodule("model.embed_tokens").weight.data[3, 5] += 1

    rig.draft.load_weights = leaking  # type: ignore[method-assign]
    with pytest.raises(DraftError, match="TARGET changed"):
        rig.served.swap(rig.publish(rig.folder, seed=2))
    assert rig.served.digest == "none"
    assert told == ["target_update"]


def test_one_refusing_rank_stops_the_swap_on_all(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    other: list[Callable[[], str | None]] = [lambda: "rank 1: disk is full"]
    rig.served.adopt(load_draft(tmp_path / rig.first), rig.live, agree=lambda r: r or other[0](), quiesce=rig.quiesce)
    second = rig.publish(rig.folder, seed=2)
    with pytest.raises(DraftError, match="disk is full"):
        rig.served.swap(second)
    answers = iter([None, "rank 1: copy failed"])
    other[0] = lambda: next(answers)
    with pytest.raises(DraftError, match="rank 1: copy failed"):
        rig.served.swap(second)
    assert rig.serves(rig.first)
    assert rig.served.digest == rig.first


def test_an_untrained_first_draft_counts_as_none(tmp_path: Path) -> None:
    rig = Rig(tmp_path, untrained=True)
    assert rig.served.digest == "none"
    assert rig.served.state()["draft_file"] == rig.first
    second = rig.publish(rig.folder, seed=2)
    assert rig.served.swap(second)["before"] == "none"
    assert rig.served.swap(rig.first)["after"] == "none"


@pytest.mark.parametrize(("value", "untrained"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_whether_the_first_draft_counts_is_a_setting_like_any_other(
    value: str, untrained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = SimpleNamespace(BEFORE="before", AFTER="after", AROUND="around")
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", SimpleNamespace(HookType=kinds))
    monkeypatch.setattr(hooks, "_served", ServedDraft(DraftShelf(None)))
    settings = PluginSettings.from_environment({"TIDE_DRAFT_DIR": str(tmp_path), "TIDE_DRAFT_UNTRAINED": value})
    registered: list[str] = []
    hooks.install(SimpleNamespace(register=lambda name, *_: registered.append(name)), settings)
    assert registered == list(hooks.HOOKED)
    assert hooks._served.untrained is untrained


def test_a_foreign_update_makes_the_draft_unknown_until_the_next_swap(rig: Rig) -> None:
    told: list[str] = []
    rig.served.on_target_update = told.append
    rig.served.mark_foreign("draft", "UpdateWeightsFromTensorReqInput")
    assert (rig.served.digest, rig.served.count, told) == ("none", 1, [])
    rig.served.mark_foreign("target", "UpdateWeightFromDiskReqInput")
    assert (rig.served.count, told) == (1, ["target_update"])
    assert rig.served.swap(rig.first)["after"] == rig.served.digest == rig.first


def test_an_engine_without_a_draft_refuses(tmp_path: Path) -> None:
    with pytest.raises(DraftError, match="without an EAGLE3 draft"):
        ServedDraft(DraftShelf(tmp_path)).swap("a" * 64)


def test_an_engine_that_serves_other_weights_shapes_than_its_files_is_not_adopted(rig: Rig) -> None:
    rig.worker.hot_token_id = None
    with pytest.raises(DraftError, match="vocabulary map"):
        rig.served.adopt(load_draft(rig.folder / rig.first), rig.live, agree=lambda reason: reason, quiesce=rig.quiesce)


def test_a_fingerprint_sees_any_change_of_embedding_and_head(rig: Rig) -> None:
    before = fingerprint(rig.target)
    weight = rig.target.get_submodule("model.embed_tokens").weight
    for at in ((0, 0), (49, 15), (7, 3)):
        weight.data[at] = -weight.data[at]
        assert changed(before, fingerprint(rig.target)) == ["model.embed_tokens.weight"]
        weight.data[at] = -weight.data[at]
    assert changed(before, fingerprint(rig.target)) == []


def test_the_serving_pointer_is_a_digest_or_an_error(tmp_path: Path) -> None:
    shelf = DraftShelf(tmp_path)
    assert shelf.serving() is None
    (tmp_path / "serving").write_text("a" * 64 + "\n")
    assert shelf.serving() == "a" * 64
    for content in ("", "../x", "a" * 63):
        (tmp_path / "serving").write_text(content)
        with pytest.raises(DraftError, match="not a draft digest"):
            shelf.serving()


@pytest.mark.parametrize(
    ("algorithm", "config", "message"),
    [
        ("EAGLE", draft_config(), "nothing it proposes"),
        ("STANDALONE", draft_config(), "nothing it proposes"),
        ("EAGLE3", None, "draft model path"),
        (None, None, "draft model path"),
    ],
)
def test_a_start_that_would_serve_at_acceptance_one_is_refused(
    algorithm: str | None, config: dict[str, Any] | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = None
    if config is not None:
        path = str(tmp_path / write_draft(tmp_path, config, draft_tensors(config))[1])
    monkeypatch.setattr(hooks, "_speculation", lambda: (algorithm, path))
    monkeypatch.setattr(hooks, "_served", ServedDraft(DraftShelf(tmp_path)))
    with pytest.raises(ConfigError, match=message):
        hooks.check_start(None)


@pytest.mark.parametrize("missing", ["lm_head.weight", "d2t"])
def test_a_start_with_half_a_draft_is_refused(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    folder, _ = write_draft(tmp_path, draft_config(), draft_tensors(draft_config()))
    tensors = draft_tensors(draft_config())
    del tensors[missing]
    save_file(tensors, folder / "model.safetensors")
    monkeypatch.setattr(hooks, "_speculation", lambda: ("EAGLE3", str(folder)))
    monkeypatch.setattr(hooks, "_served", ServedDraft(DraftShelf(tmp_path)))
    hooks.check_start(None)
    with pytest.raises(DraftError, match=missing):
        hooks.adopt_start(None, None)


class Manager:
    """SGLang's weight updater as far as the hooks read it."""

    def __init__(self, key: str | None = "key", session: Any = None) -> None:
        self._session = session
        self.scheduler = SimpleNamespace(server_args=SimpleNamespace(admin_api_key=key))


def update(digest: str = "a" * 64, manifest: Any = None, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(model_path=digest, manifest=manifest, flush_cache=False, **fields)


@pytest.fixture
def hooked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(hooks, "_served", rig.served)
    monkeypatch.setattr(hooks, "_reply", lambda success, message: SimpleNamespace(success=success, message=message))
    return rig


def never(*_args: Any) -> Any:
    raise AssertionError("the stock update must not run")


DRAFT = {"selector": "draft"}


@pytest.mark.parametrize(
    ("manager", "request_", "message"),
    [
        (Manager(None), update(manifest=DRAFT), "admin-api-key"),
        (Manager(""), update(manifest=DRAFT), "admin-api-key"),
        (Manager(session=object()), update(manifest=DRAFT), "session is open"),
        (Manager(), update(manifest={"selector": "drafts"}), "only 'draft'"),
        (Manager(), update(manifest={"selector": "all"}), "only 'draft'"),
        (Manager(), SimpleNamespace(model_path="a" * 64, manifest=DRAFT, flush_cache=True), "flush_cache"),
        (Manager(), update("../x", manifest=DRAFT), "no draft digest"),
    ],
)
def test_a_request_that_may_not_swap_is_answered_not_raised(
    hooked: Rig, manager: Manager, request_: Any, message: str
) -> None:
    reply = hooks.around_update_from_disk(never, manager, request_)
    assert not reply.success
    assert message in reply.message
    assert hooked.serves(hooked.first)


def test_the_hook_swaps_and_reports(hooked: Rig) -> None:
    second = hooked.publish(hooked.folder, seed=2)
    assert hooks.around_update_from_disk(never, Manager(), update(second, manifest=DRAFT)).success
    assert (hooks.active_digest(), hooks.swap_count()) == (second, 1)
    assert hooks.draft_contract() == load_draft(hooked.folder / second).contract


def test_an_unexpected_failure_is_a_refusal_and_never_leaves_the_hook(
    hooked: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_digest: str) -> None:
        raise MemoryError("host is full")

    monkeypatch.setattr(hooked.served.shelf, "find", broken)
    reply = hooks.around_update_from_disk(never, Manager(), update(manifest=DRAFT))
    assert not reply.success
    assert "host is full" in reply.message


@pytest.mark.parametrize(
    ("success", "touches", "selector", "draft", "told"),
    [
        (True, False, "all", "none", ["target_update"]),
        (True, False, "target", "known", ["target_update"]),
        (True, False, "draft", "none", []),
        (False, False, "all", "known", []),
        (False, True, "all", "none", ["target_update"]),
    ],
)
def test_a_stock_update_is_recorded_by_what_it_may_have_changed(
    hooked: Rig, success: bool, touches: bool, selector: str, draft: str, told: list[str]
) -> None:
    heard: list[str] = []
    hooked.served.on_target_update = heard.append

    def stock(_manager: Any, _request: Any) -> SimpleNamespace:
        if touches:
            hooked.draft.model.fc.weight.data.zero_()
        return SimpleNamespace(success=success)

    hooks.around_foreign_update(stock, Manager(), SimpleNamespace(selector=selector))
    assert hooks.active_digest() == (hooked.first if draft == "known" else "none")
    assert heard == told


def test_only_a_digest_is_kept_from_renaming_the_served_model() -> None:
    renamed: list[str] = []

    def stock(_manager: Any, path: str, _format: str) -> None:
        renamed.append(path)

    hooks.around_update_model_path(stock, None, "a" * 64, "auto")
    hooks.around_update_model_path(stock, None, "/models/new-target", "auto")
    assert renamed == ["/models/new-target"]
