"""The lakeFS server as a Go module, at a pinned version: ``python -m infra.lakefs.build`` finds or builds it."""

from __future__ import annotations

from pathlib import Path

from infra.go_program import GoProgram

MODULE = Path(__file__).parent
LAKEFS = GoProgram(
    name="lakefs",
    title="lakeFS",
    folder=MODULE,
    module="github.com/treeverse/lakefs",
    package="github.com/treeverse/lakefs/cmd/lakefs",
    version_variable="github.com/treeverse/lakefs/pkg/version.Version",
    usual="about 3 minutes",
)

if __name__ == "__main__":
    print(LAKEFS.binary())
