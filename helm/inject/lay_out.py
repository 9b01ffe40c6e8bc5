"""Make the folder that an injected pod gets: the package with all it needs, and the hook.

    python helm/inject/lay_out.py FOLDER REQUIREMENT...

REQUIREMENT is anything that pip takes: a checkout, a wheel, gpumem-otel==0.1.0. Run it with the
oldest Python that jobs have: what pip chooses for that one works on newer ones too. Afterwards:

    FOLDER/hook/sitecustomize.py    on PYTHONPATH
    FOLDER/hook/needs.txt           `ours theirs oldest` a line: our package `ours` needs `theirs`
    FOLDER/packages/                put last on the path by the hook
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent


def canonical(name: str) -> str:
    """A project's name as folders of metadata have it."""
    return re.sub(r"[-_.]+", "_", name).lower()


def needs(found: Distribution) -> list[str]:
    """What one package needs, where it says how old that may be: lines of needs.txt."""
    lines = []
    for text in found.requires or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        lines += [
            f"{canonical(found.name)} {canonical(requirement.name)} {limit.version}"
            for limit in requirement.specifier
            if limit.operator in {">=", "==", "~="} and not limit.version.endswith(".*")
        ]
    return lines


def lay_out(folder: Path, requirements: list[str]) -> None:
    """Fill the folder, which must not hold anything yet."""
    packages = folder / "packages"
    hook = folder / "hook"
    hook.mkdir(parents=True)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"),
            *("--no-compile", "--constraint", str(HERE / "constraints.txt")),
            *("--target", str(packages), *requirements),
        ],
        check=True,
    )
    shutil.copy(HERE / "sitecustomize.py", hook)
    lines = {line for one in distributions(path=[str(packages)]) for line in needs(one)}
    (hook / "needs.txt").write_text("".join(f"{line}\n" for line in sorted(lines)))


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]), sys.argv[2:])
