"""The site of `make docs`: built strictly, complete, and readable without a network."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]

pytest.importorskip("mkdocs", reason="needs mkdocs: pip install 'qat[docs]'")
griffe = pytest.importorskip("griffe", reason="needs mkdocstrings: pip install 'qat[docs]'")


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """The hooks that make the reference."""
    spec = importlib.util.spec_from_file_location("docs_pages", ROOT / "docs" / "_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def test_every_public_name_is_in_the_reference(site: Path, pages: ModuleType) -> None:
    modules = pages.public_modules()
    assert {"qat", "qat.nn", "qat.calib", "qat.onnx", "qat.tensorrt", "qat.training", "qat.errors"} <= modules.keys()
    assert "fine_tune" in modules["qat.training"]
    for module, names in modules.items():
        html = (site / "reference" / f"{module}.html").read_text()
        anchors = set(re.findall(r'id="([\w.]+)"', html))
        assert {f"{module}.{name}" for name in names} <= anchors, module


def test_every_public_name_has_a_docstring(pages: ModuleType) -> None:
    package = griffe.load("qat", search_paths=[ROOT], allow_inspection=False)
    without = []
    for path, names in pages.public_modules().items():
        module = package if path == "qat" else package[path.removeprefix("qat.")]
        without += [f"{path}.{name}" for name in names if not module[name].has_docstring]
    assert without == []


def test_readme_guides_and_results_are_pages(site: Path) -> None:
    home = (site / "index.html").read_text()
    assert "quantization-aware training that ships" in home
    assert 'href="from_pytorch_quantization.html"' in home and 'src="digits.png"' in home
    assert 'href="results/digits_efficientnet_b0.json"' in home
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").exists(), page
    assert (site / "results" / "sweep.json").read_bytes() == (ROOT / "results" / "sweep.json").read_bytes()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    elsewhere = []
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text())
        elsewhere += [tag for tag in tags if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag)]
    for style in site.rglob("*.css"):
        elsewhere += re.findall(r"""url\(["']?(?:https?:)?//[^)]*\)|@import[^;]*;""", style.read_text())
    assert elsewhere == []


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("qat", "results", "mkdocs.yml", "CHANGELOG.md"):
        (copy / name).symlink_to(ROOT / name)
    (copy / "docs").mkdir()
    for path in (ROOT / "docs").iterdir():
        if path.is_file():
            (copy / "docs" / path.name).write_bytes(path.read_bytes())
    (copy / "README.md").write_text((ROOT / "README.md").read_text() + "\n[gone](docs/gone.md)\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    run = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode != 0
    assert "gone.md" in run.stderr
