"""The SDK's validators are made at the first call, and check what they always did."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pydantic.v1
import pytest

from tide.store.late_validators import late_validators, validated_at_first_call


def test_a_late_validator_refuses_what_the_usual_one_does_and_passes_the_rest() -> None:
    def double(number: pydantic.v1.StrictInt) -> int:
        return 2 * number

    late = validated_at_first_call(double)
    assert late(4) == 8
    for wrong in ("4", 4.5, None):
        with pytest.raises(pydantic.v1.ValidationError):
            late(wrong)
    with pytest.raises(pydantic.v1.ValidationError, match="unexpected"):
        late(4, other=1)


def test_after_the_import_pydantic_is_as_it_was_also_when_the_import_failed() -> None:
    usual = pydantic.v1.validate_arguments
    with late_validators():
        assert pydantic.v1.validate_arguments is validated_at_first_call
    assert pydantic.v1.validate_arguments is usual
    with pytest.raises(ModuleNotFoundError), late_validators():
        importlib.import_module("no_such_module")
    assert pydantic.v1.validate_arguments is usual


def test_the_store_of_a_command_has_late_validators_that_still_refuse() -> None:
    code = """
from pydantic.v1 import ValidationError
from tide import wiring
from tide.config import Settings
wiring.store(Settings())
from lakefs_sdk import ApiClient, Configuration, CommitsApi
assert not hasattr(CommitsApi.get_commit, "vd"), "made at import"
try:
    CommitsApi(ApiClient(Configuration(host="http://127.0.0.1:9"))).get_commit(3, "main")
except ValidationError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "refused"
