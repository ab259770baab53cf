"""The S3 gateway as a Go module, at a pinned version: ``python -m infra.versitygw.build`` finds or builds it."""

from __future__ import annotations

from pathlib import Path

from infra.go_program import GoProgram

VERSITYGW = GoProgram(
    name="versitygw",
    title="versitygw",
    folder=Path(__file__).parent,
    module="github.com/versity/versitygw",
    package="github.com/versity/versitygw/cmd/versitygw",
    version_variable="main.Version",
    usual="about a minute",
)

if __name__ == "__main__":
    print(VERSITYGW.binary())
