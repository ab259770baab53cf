"""The engine computes in what the CPU has instructions for."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.cpu import serving_dtype


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("fpu avx2", "float32"), ("fpu avx512f avx512_bf16", "bfloat16"), ("amx_bf16 avx2", "bfloat16")],
)
def test_bfloat16_is_used_only_where_the_cpu_has_it(tmp_path: Path, flags: str, dtype: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: X\nflags\t\t: {flags}\n")
    assert serving_dtype(cpuinfo) == dtype


def test_an_unknown_cpu_computes_in_float32(tmp_path: Path) -> None:
    assert serving_dtype(tmp_path / "missing") == "float32"
