"""Pages of the documentation name what exists, and their snippets and generated lists follow the source."""

from __future__ import annotations

import inspect
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


def test_the_api_page_has_every_public_name() -> None:
    """And of what is below, integrations alone: their names are imported from there."""
    targets = [target.rpartition(".") for target in re.findall(r"^::: (\S+)$", page("api"), re.M)]
    public = {name for name in seqtile.__all__ if not name.startswith("__")}
    assert public <= {name for _, _, name in targets}, "names that docs/api.md lacks"
    for module, _, name in targets:
        assert hasattr(import_module(module), name), f"docs/api.md shows {module}.{name}, which does not exist"
        if name in public:
            assert getattr(seqtile, name).__module__ == module
        else:
            assert module.startswith("seqtile.integrations."), f"{module}.{name} is not public"


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
def test_files_that_a_page_names_exist(path: Path) -> None:
    """Tests, examples, benchmarks and modules in code quotes."""
    folders = "|".join(("tests", "examples", "benchmarks", "src", "constraints"))
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", path.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), f"{path.name} names {name}, which does not exist"
    for name in re.findall(r"`(test_\w+\.py)`", path.read_text(encoding="utf-8")):
        assert list((ROOT / "tests").rglob(name)), f"{path.name} names {name}, which does not exist"


def test_the_page_of_names_has_them_all() -> None:
    """It is made when the site is built; here by the same hook, and compared with the package that is imported."""
    assert [line for line in page("names").splitlines() if "<!--" in line] == [site_hooks.NAMES]
    shown = site_hooks.on_page_markdown(page("names"))
    public, *sections = re.split(r"\n## (?!Public)", shown)
    tables = {section.partition("\n")[0]: section for section in sections}
    rows = dict(re.findall(r"^\| `seqtile\.(\w+)` \| (.+) \|$", public, re.M))
    assert rows.keys() == {name for name in seqtile.__all__ if not name.startswith("__")}
    for name, line in rows.items():
        first = (inspect.getdoc(getattr(seqtile, name)) or "").split("\n\n")[0].replace("\n", " ")
        assert line.replace("`", "") == re.sub(r":\w+:(?=`)", "", first).replace("`", "")
    for module in ("ops.mlp", "tiling", "train.recipe"):
        listed = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", tables[module], re.M))
        home = import_module(f"seqtile.{module}")
        own = {name for name, value in vars(home).items() if getattr(value, "__module__", "") == home.__name__}
        assert listed.keys() == {name for name in own if name[0] != "_" and callable(getattr(home, name))}


def test_the_rule_that_contributing_shows() -> None:
    (text,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M | re.S)
    exec(compile(text, "CONTRIBUTING.md", "exec"), {})
    broken = text.replace("    got = step()", "    model.lm_head.weight.data.mul_(1.001)\n    got = step()")
    assert broken != text
    with pytest.raises(AssertionError, match="not close"):
        exec(compile(broken, "CONTRIBUTING.md", "exec"), {})


def test_the_first_use_of_a_word_links_to_the_glossary() -> None:
    words = site_hooks.glossary(DOCS / "glossary.md")
    assert words["tile"] == "tile" and words["LoRA"] == "adapter" and "keep" not in words
    linked = site_hooks.with_glossary_links(
        "<h2>A tile</h2><p><code>tile</code> Tiles: two tiles, a tile rule</p>", words
    )
    tile, rule = (f'<a class="term" href="glossary.html#{word}">' for word in ("tile", "tile-rule"))
    assert linked == f"<h2>A tile</h2><p><code>tile</code> Tiles: two {tile}tiles</a>, a {rule}tile rule</a></p>"


def test_no_page_fetches_from_elsewhere() -> None:
    shim = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
    assert site_hooks.without_the_network(shim) == '<script src="javascripts/worker.js"></script>'
    assert (DOCS / "javascripts" / "worker.js").exists()
    with pytest.raises(ValueError, match="put a copy beside"):
        site_hooks.without_the_network('<img alt="a" src="https://example.com/a.png">')
