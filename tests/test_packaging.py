"""The wheel holds the whole tree, and every way of importing finds the same modules."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "setuptools"
]


def folders_with(pattern: str) -> set[str]:
    """Dotted names of the mapped folders, and those below, that hold such a file."""
    names = set()
    for package, folder in SETUPTOOLS["package-dir"].items():
        for path in (ROOT / folder).rglob(pattern):
            below = path.parent.relative_to(ROOT / folder).parts
            names.add(".".join((package, *below)))
    return names


def test_packages_lists_every_folder_with_python_in_it() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(folders_with("*.py"))


def test_every_package_has_an_init() -> None:
    assert folders_with("*.py") == folders_with("__init__.py")


def test_every_package_is_typed_or_below_one_that_is() -> None:
    assert (ROOT / "octavo" / "py.typed").is_file()
    assert "py.typed" in SETUPTOOLS["package-data"]["octavo"]


def python(*arguments: str, cwd: Path) -> str:
    """Run this interpreter without installed packages of ours in the way; return its output."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_checkout_needs_no_install(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
        "import octavo.ir.errors as errors; print(errors.__file__)"
    )
    assert python("-c", code, cwd=tmp_path) == str(ROOT / "ir" / "errors.py")


def test_importing_octavo_imports_nothing_slow(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import octavo, octavo.cli.main; "
        "print({'torch', 'transformers', 'numpy', 'jinja2'} & set(sys.modules))"
    )
    assert python("-c", code, cwd=tmp_path) == "set()"


def test_an_unknown_name_is_an_attribute_error() -> None:
    import octavo

    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        octavo.nope  # noqa: B018


@pytest.mark.slow
def test_the_wheel_holds_every_module_template_and_page(tmp_path: Path) -> None:
    python(
        *("-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(ROOT)),
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("octavo-*.whl")
    names = python("-m", "zipfile", "-l", str(wheel), cwd=tmp_path)
    for package, folder in SETUPTOOLS["package-dir"].items():
        for pattern in ("*.py", "*.j2", "*.html"):
            for path in (ROOT / folder).rglob(pattern):
                inside = Path(package.replace(".", "/")) / path.relative_to(ROOT / folder)
                assert inside.as_posix() in names
