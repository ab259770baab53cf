"""What integration tests share: the packaged target model, a draft nobody trained, a free port."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra import models, ports

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def target_model() -> Path:
    """Folder of SmolLM2-135M-Instruct; $TIDE_TARGET_MODEL names another. Converted once, kept in the home folder."""
    if named := os.environ.get("TIDE_TARGET_MODEL"):
        return Path(named)
    return models.ensure_target_model(Path(os.environ.get("TIDE_HOME", REPOSITORY / ".tide")))


@pytest.fixture(scope="session")
def random_draft(target_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE3 draft of the target, with random weights: it accepts next to nothing."""
    return models.untrained_draft(target_model, tmp_path_factory.mktemp("drafts"))


@pytest.fixture
def free_port() -> int:
    """A loopback port that was free a moment ago."""
    return ports.free_port()
