"""Pages of the documentation name what exists, and their snippets and generated lists follow the source."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import seqtile

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

if not DOCS.exists():
    pytest.skip("no docs here: the tests run from an installed package", allow_module_level=True)

site_hooks = import_module("site_hooks")


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_the_reference_has_every_public_name() -> None:
    """And of what is below, integrations alone: their names are imported from there."""
    targets = [target.rpartition(".") for target in re.findall(r"^::: (\S+)$", page("reference"), re.M)]
    public = {name for name in seqtile.__all__ if not name.startswith("__")}
    assert public <= {name for _, _, name in targets}, "names that docs/reference.md lacks"
    for module, _, name in targets:
        assert hasattr(import_module(module), name), f"docs/reference.md shows {module}.{name}, which does not exist"
        if name in public:
            assert getattr(seqtile, name).__module__ == module
        else:
            assert module.startswith("seqtile.integrations."), f"{module}.{name} is not public"


@pytest.mark.parametrize("path", [ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))], ids=lambda path: path.stem)
def test_files_that_a_page_names_exist(path: Path) -> None:
    """Tests, examples, benchmarks and modules in code quotes."""
    folders = "|".join(("tests", "examples", "benchmarks", "src", "constraints"))
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", path.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), f"{path.name} names {name}, which does not exist"
    for name in re.findall(r"`(test_\w+\.py)`", path.read_text(encoding="utf-8")):
        assert list((ROOT / "tests").rglob(name)), f"{path.name} names {name}, which does not exist"


def test_contributing_names_every_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"^```\n(src/seqtile/.*?)^```", text, re.M | re.S)
    packages = {file.parent.name for file in (ROOT / "src" / "seqtile").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"(\w+)/", tree)), "the tree lacks a package"
    for name in re.findall(r"\w+\.py", tree):
        assert (ROOT / "src" / "seqtile" / name).exists(), f"the tree names {name}"


def test_the_rule_that_contributing_shows() -> None:
    (text,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M | re.S)
    exec(compile(text, "CONTRIBUTING.md", "exec"), {})
    broken = text.replace("    got = step()", "    model.lm_head.weight.data.mul_(1.001)\n    got = step()")
    assert broken != text
    with pytest.raises(AssertionError, match="not close"):
        exec(compile(broken, "CONTRIBUTING.md", "exec"), {})


def test_no_page_fetches_from_elsewhere() -> None:
    shim = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
    assert site_hooks.without_the_network(shim) == '<script src="javascripts/worker.js"></script>'
    assert (DOCS / "javascripts" / "worker.js").exists()
    with pytest.raises(ValueError, match="put a copy beside"):
        site_hooks.without_the_network('<img alt="a" src="https://example.com/a.png">')
