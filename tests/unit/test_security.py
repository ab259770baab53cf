"""Rules of security for the whole code: what is read as pickle, unpacked, bound, and where a secret may show."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml

from tide import cli
from tide.trainer import export, vocabulary

ROOT = Path(__file__).parents[2]
PACKAGES = ("tide", "tasks", "flows", "infra")
READ_IN_THE_RUN_THAT_WROTE_IT = {
    ("tide/trainer/export.py", "_draft_tensors"): "a checkpoint that SpecForge wrote into this run's own new folder",
    ("tide/trainer/vocabulary.py", "check_mapping"): "the vocabulary map that this run wrote for SpecForge",
}
"""Every place that reads a file of pickle, and why it is ours. A new one gets its reason here, or is not made."""
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle"}
ARCHIVES = {"tarfile", "zipfile"}
"""Their members' names are paths that somebody else chose; nothing here unpacks one."""


@cache
def sources() -> list[tuple[str, ast.Module]]:
    """Every module of ours, by its path."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in paths]


def calls(tree: ast.Module) -> Iterator[tuple[str, str, ast.Call]]:
    """(function, dotted name of what is called, call)."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    yield function.name, ast.unparse(node.func), node


def imported(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_no_module_imports_a_pickle_or_an_archive_reader() -> None:
    found = {name: bad for name, tree in sources() if (bad := imported(tree) & (PICKLES | ARCHIVES))}
    assert found == {}


def test_torch_load_reads_tensors_alone_and_only_what_the_same_run_wrote() -> None:
    found = set()
    for name, tree in sources():
        for function, called, call in calls(tree):
            if called == "torch.load":
                found.add((name, function))
                options = {k.arg: ast.unparse(k.value) for k in call.keywords}
                assert options.get("weights_only") == "True", f"{name}:{call.lineno} runs what a file says"
    assert found == set(READ_IN_THE_RUN_THAT_WROTE_IT)


def test_nothing_else_unpickles_or_unpacks_in_disguise() -> None:
    refused = (
        "read_pickle",
        "unpack_archive",
        "extractall",
        "torch.jit.load",
        "yaml.load",
        "yaml.unsafe_load",
        "eval",
        "exec",
    )
    for name, tree in sources():
        for _, called, call in calls(tree):
            where = f"{name}:{call.lineno} calls {called}"
            assert not any(
                called == bad or (called.endswith(f".{bad}") and bad not in ("eval", "exec")) for bad in refused
            ), where
            options = {k.arg: ast.unparse(k.value) for k in call.keywords}
            assert options.get("allow_pickle", "False") == "False", where


class Payload:
    """Pickles into a call that writes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, (f"open({str(self.mark)!r}, 'w').close()",))


def test_a_planted_checkpoint_is_not_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    checkpoint = tmp_path / "out" / "run-step1"
    checkpoint.mkdir(parents=True)
    torch.save({"draft_state_dict": Payload(mark)}, checkpoint / "training_state.pt")
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        export.export_checkpoints(tmp_path / "out", "run", tmp_path / "drafts", config={}, mapping=tmp_path / "map")
    assert not mark.exists()
    torch.save(Payload(mark), tmp_path / "map")
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        vocabulary.check_mapping(tmp_path / "map", {}, 10)
    assert not mark.exists()
    torch.load(checkpoint / "training_state.pt", weights_only=False)
    assert mark.exists(), "the payload is a live one"


def test_a_secret_is_taken_out_of_settings_in_one_place_and_at_two_other_doors() -> None:
    found = {name for name, tree in sources() for _, called, _ in calls(tree) if called.endswith("get_secret_value")}
    assert found == {"tide/wiring.py", "tide/sglang_plugin/settings.py", "infra/lakefs/existing.py"}


def test_a_traceback_of_the_command_shows_no_local_variable() -> None:
    assert cli.app.pretty_exceptions_show_locals is False


def test_no_deployment_refers_to_a_secret_block() -> None:
    """`prefect deploy` would resolve it and store the value in the open; a work pool's template may refer to one."""
    text = (ROOT / "prefect.yaml").read_text()
    assert "prefect.blocks" not in text
    content = yaml.safe_load(text)
    names = {name for d in content["deployments"] for name in d["work_pool"].get("job_variables", {}).get("env", {})}
    assert not {name for name in names if name.endswith(("_KEY", "_SECRET", "_PASSWORD", "_TOKEN"))}


def test_nothing_listens_beyond_loopback_but_what_is_asked_for_by_name() -> None:
    found = {
        name
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::")
    }
    assert found == {"infra/prefect_access.py"}
