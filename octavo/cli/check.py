"""``octavo check``: on this machine, does an artifact say what Hugging Face said?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An artifact directory.")],
) -> None:
    """Run the prompts that an artifact carries, and compare with Hugging Face's answers to them."""
    from octavo.runtime.artifact import Artifact, read_json_object
    from octavo.runtime.self_check import check_golden

    artifact = Artifact.open(directory)
    error = check_golden(artifact)
    path = artifact.file("tests/golden.json")
    assert path is not None, "check_golden has read it"
    tolerance = read_json_object(path)["tolerance"]
    print(f"{directory}: log-probabilities within {error:.3g} of Hugging Face's ({tolerance:.3g})")
