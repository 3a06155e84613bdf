"""Checks a wheel and a source distribution before they are published: `make dist`.

    python tests/distribution.py dist

What they hold: every module and asset, the licences, and nothing of the tests or the site. Then the
wheel is installed into a fresh environment, and runs there without a network. Installing needs
one, for the packages that fedsso needs; their versions are those of constraints.txt.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "fedsso"
LICENCES = ("LICENSE", "plotly-LICENSE.txt")
RUN = ("run", "--dataset", "digits", "--rounds", "3")


def main(folder: Path) -> None:
    """Check the one wheel and the one source distribution of a folder."""
    (wheel,) = folder.glob("*.whl")
    (source,) = folder.glob("*.tar.gz")
    check_wheel(wheel)
    check_source(source)
    print(run_without_network(wheel.resolve()))
    print(f"{wheel.name} and {source.name} are complete, and the wheel runs without a network")


def version() -> str:
    """The version as the package states it."""
    (found,) = re.findall(r'^__version__ = "(.+)"$', (SOURCE / "version.py").read_text(), re.M)
    return str(found)


def package_files() -> set[str]:
    """The files of the package, as a wheel names them."""
    return {
        path.relative_to(SOURCE.parent).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def check_wheel(path: Path) -> None:
    """Its files are those of the package, with the licences; its version is the package's."""
    with ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(about).decode())
    described = {name for name in names if ".dist-info/" in name}
    expect(names - described == package_files(), f"files: {names - described ^ package_files()}")
    expect(metadata["Version"] == version(), f"version {metadata['Version']} is not {version()}")
    for licence in LICENCES:
        kept = [name for name in described if name.endswith(f"/{licence}")]
        expect(len(kept) == 1, f"the wheel lacks {licence}")


def check_source(path: Path) -> None:
    """It holds what builds the wheel, and nothing of the tests, the results or the site."""
    with tarfile.open(path) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    needed = {f"src/{name}" for name in package_files()} | {
        "pyproject.toml",
        "README.md",
        "LICENSE",
    }
    expect(needed <= names, f"the source distribution lacks {needed - names}")
    folders = {name.partition("/")[0] for name in names if "/" in name}
    expect(folders == {"src"}, f"the source distribution has more: {folders - {'src'}}")


def run_without_network(wheel: Path) -> str:
    """What the command prints from the wheel, in an environment of its own, without a network."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        venv.create(home / "env", with_pip=True)
        python = str(home / "env" / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        constraints = ["--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, *constraints, f"{wheel}[cli]"], check=True)
        command = [*cut_off(), str(home / "env" / "bin" / "fedsso"), *RUN]
        clean = {"PATH": os.environ["PATH"], "HOME": folder}
        done = subprocess.run(
            command, cwd=home, env=clean, capture_output=True, text=True, check=False
        )
    expect(done.returncode == 0, f"{' '.join(RUN)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def cut_off() -> list[str]:
    """How to start a program that has no network; nothing where the system cannot do that."""
    command = ["unshare", "--map-root-user", "--net"]
    if shutil.which(command[0]) is not None:
        tried = subprocess.run([*command, "true"], capture_output=True, check=False)
        if tried.returncode == 0:
            return command
    print("this system cannot cut off a program's network: it runs with one", file=sys.stderr)
    return []


def expect(fact: bool, otherwise: str) -> None:
    """End with a sentence where something is not as it should be."""
    if not fact:
        sys.exit(otherwise)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
