"""The training image's definition: what can be said of it without a container engine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.container_file import instructions

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "infra" / "images" / "train-rocm"
FILE = instructions(FOLDER / "Dockerfile")
ENV = dict(pair.split("=", 1) for i in FILE if i.name == "ENV" for pair in i.words)
ARGS = dict(i.text.split("=", 1) for i in FILE if i.name == "ARG")
LOCK = (FOLDER / "requirements.lock").read_text()
PINNED = dict(re.findall(r"^([a-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", LOCK, re.M))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def named(name: str) -> list[str]:
    return [i.text for i in FILE if i.name == name]


@pytest.mark.parametrize("source", [word for i in FILE if i.name == "COPY" for word in i.words[:-1]])
def test_what_is_copied_exists_and_the_build_may_see_it(source: str) -> None:
    assert (REPOSITORY / source).exists()
    seen = {line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert Path(source).parts[0] in seen


@pytest.mark.parametrize("name", ARGS)
def test_every_argument_is_used_and_nothing_else_is_asked_for(name: str) -> None:
    used = set(re.findall(r"\$\{(\w+)\}", " ".join(i.text for i in FILE if i.name != "ARG")))
    assert name in used
    assert used <= ARGS.keys()


def test_base_and_torch_are_pinned_and_torch_is_specforges_own_for_rocm() -> None:
    assert re.fullmatch(r"[a-z/]+-ubuntu-24\.04:\d+\.\d+(\.\d+)?", ARGS["BASE"])
    version, _, build = ARGS["TORCH"].partition("+")
    assert f"torch=={version}" in (FOLDER / "constraints.txt").read_text().split()
    assert ARGS["BASE"].endswith(f":{build.removeprefix('rocm')}"), "wheels and base are of one ROCm"
    assert ARGS["TORCH_INDEX"].endswith(build)


def test_it_does_not_run_as_root_and_passes_signals_on() -> None:
    assert FILE[-1].name == "CMD"
    assert named("USER") == ["10001:10001"]
    assert named("ENTRYPOINT") == ['["tini", "--"]']
    assert " tini" in named("RUN")[0]


def test_it_has_no_secret_no_model_and_insists_on_a_gpu() -> None:
    assert not [name for name in ENV if re.search(r"SECRET|ACCESS_KEY|PASSWORD|TOKEN|SIGNING", name)]
    assert not [source for source in named("COPY") if re.search(r"safetensors|models?/|\.env", source)]
    assert ENV["TIDE_TRAIN_DEVICE"] == "gpu"


def test_caches_of_compiled_kernels_lie_where_the_run_may_write() -> None:
    caches = {name: value for name, value in ENV.items() if "CACHE" in name or name.startswith("MIOPEN")}
    assert len(caches) == 4
    assert all(value.startswith("/scratch/") for value in caches.values())


def test_the_lock_has_hashes_and_neither_torch_nor_anything_of_cuda() -> None:
    assert PINNED
    assert LOCK.count("--hash=sha256:") >= len(PINNED)
    assert not {name for name in PINNED if name == "torch" or name.startswith(("nvidia", "cuda", "triton", "sglang"))}
    assert "://" not in "\n".join(line for line in LOCK.splitlines() if not line.lstrip().startswith("#"))


def test_the_lock_has_specforges_own_transformers() -> None:
    constraints = dict(
        line.split("==") for line in (FOLDER / "constraints.txt").read_text().splitlines() if "==" in line
    )
    assert PINNED["transformers"] == constraints["transformers"]


@pytest.mark.parametrize(
    "requirement",
    [*PROJECT["dependencies"], *EXTRAS["pipeline"], *EXTRAS["train"]],
)
def test_the_lock_has_what_the_project_asks_for(requirement: str) -> None:
    name, exact = re.match(r"([A-Za-z0-9_-]+)", requirement)[1].lower(), re.search(r"==([\w.]+)", requirement)  # type: ignore[index]
    if name == "torch":
        return
    assert name in PINNED
    assert exact is None or PINNED[name] == exact[1]


def test_it_runs_the_command_of_the_deployments() -> None:
    deployment = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["definitions"]["mi250"]
    assert named("CMD") == ['["' + '", "'.join(deployment["job_variables"]["command"].split()) + '"]']


def test_the_readme_says_what_was_not_run() -> None:
    for readme in (
        FOLDER / "README.md",
        REPOSITORY / "infra/pools/README.md",
        REPOSITORY / "infra/pools/gpt-oss-120b/README.md",
    ):
        assert re.search(r"not run[^.]*MI250 hardware", " ".join(readme.read_text().split()), re.I), readme
