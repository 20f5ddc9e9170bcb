"""What the documentation's pages say about the source: messages, public names, tests, modules."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

import seqtile
from seqtile.options import DEFAULTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "seqtile"

if not DOCS.exists():
    pytest.skip("no docs here: the tests run from an installed package", allow_module_level=True)

site_hooks = import_module("site_hooks")


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def literals() -> list[str]:
    """Every string in the package's source, with "\\0" where a value is filled in."""
    found = []
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def says(literal: str, quote: str) -> bool:
    """Whether ``literal`` has the words of ``quote`` in their order; ``...`` stands for values that are filled in."""
    pieces = [re.escape(piece.strip()) for piece in quote.split("...") if piece.strip()]
    return re.search(r"[\s\S]*".join(pieces), literal) is not None


def test_every_message_on_the_troubleshooting_page_is_in_the_source() -> None:
    quotes = re.findall(r"^\| `([^`]+)`", page("troubleshooting"), re.M)
    assert len(quotes) > 60
    all_of_them = literals()
    gone = [quote for quote in quotes if not any(says(literal, quote) for literal in all_of_them)]
    assert not gone, f"no such message in the source any more: {gone}"
    assert not any(says(literal, "nothing to tile in ...: lacked for") for literal in all_of_them)


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


def test_axolotls_page_has_every_option() -> None:
    assert [name for name in DEFAULTS if f"`{name}`" not in page("axolotl")] == []


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda path: path.stem)
def test_a_page_is_whole(path: Path) -> None:
    """What the site would show as plain text: an include that a formatter took for code, rows of a table behind a
    blank line or with other columns than its head; what it would not show: braces outside code, which are attributes.
    """
    text = path.read_text(encoding="utf-8")
    for line in text.splitlines():
        if re.match(r"\s*-+ ?8", line):
            included = re.fullmatch(r'\s*--8<-- "([^":]+)(?::(\d+):(\d+))?"', line)
            assert included, line
            lines = (ROOT / included[1]).read_text(encoding="utf-8").splitlines()
            first, last = int(included[2] or 1), int(included[3] or len(lines))
            assert lines[first - 1].strip() and lines[last - 1].strip(), f"{line} begins or ends with an empty line"
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    bare = re.sub(r"`[^`]*`", "", text)
    assert "{" not in bare, re.findall(r".*\{.*", bare)
    for table in re.findall(r"(?:^\|.*\n?)+", bare, re.M):
        head, *rows = (re.split(r"(?<!\\)\|", line.strip()) for line in table.splitlines())
        assert rows and all(re.fullmatch(r" *:?-+:? *", cell) for cell in rows[0][1:-1]), f"{head}: no table's head"
        assert all(len(row) == len(head) for row in rows), head


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
    public, _, below = shown.partition("\n## _errors\n")
    rows = dict(re.findall(r"^\| `seqtile\.(\w+)` \| (.+) \|$", public, re.M))
    assert rows.keys() == {name for name in seqtile.__all__ if not name.startswith("__")}
    for name, line in rows.items():
        first = (inspect.getdoc(getattr(seqtile, name)) or "").split("\n\n")[0].replace("\n", " ")
        assert line.replace("`", "") == re.sub(r":\w+:(?=`)", "", first).replace("`", "")
    for module in ("ops.mlp", "planner.techniques", "train.recipe"):
        table = below.partition(f"\n## {module}\n")[2].partition("\n## ")[0]
        listed = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.M))
        home = import_module(f"seqtile.{module}")
        own = {name for name, value in vars(home).items() if getattr(value, "__module__", "") == home.__name__}
        assert listed.keys() == {name for name in own if name[0] != "_" and callable(getattr(home, name))}


@pytest.mark.parametrize("made", [site_hooks.names, site_hooks.tree])
def test_every_module_and_public_name_has_a_line(made: Callable[[Path], str]) -> None:
    shown = made(ROOT / "src" / "seqtile")
    rows = re.findall(r"^\| `([\w.]+)` \| ?(.*?) ?\|$", shown, re.M)
    headings = re.findall(r"^## (\S+)\n\n(.*)$", shown, re.M)
    assert len(rows) > 100
    assert [name for name, line in (*rows, *headings) if not line] == []
    if made is site_hooks.names:
        files = [file.relative_to(ROOT / "src" / "seqtile") for file in (ROOT / "src" / "seqtile").rglob("*.py")]
        modules = {".".join(file.with_suffix("").parts) for file in files if not file.stem.startswith("__")}
        assert modules <= {name for name, _ in headings}


def test_the_page_of_names_follows_the_source(tmp_path: Path) -> None:
    package = tmp_path / "seqtile"
    package.mkdir()
    (package / "__init__.py").write_text('"""P."""\nfrom seqtile.one import new as new\n')
    code = '"""One."""\ndef new():\n    """First ``a | b``.\n\n    More."""\n\ndef _own(): ...\n'
    (package / "one.py").write_text(code)
    (package / "two.py").write_text('"""Two."""\n\ndef _own(): ...\n')
    shown = site_hooks.names(package)
    assert shown.endswith("\n## two\n\nTwo.")
    assert "| `seqtile.new` | First `a \\| b`. |" in shown and "## one\n\nOne.\n" in shown and "_own" not in shown


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


def test_tables_of_words_have_their_columns_beside_each_cell() -> None:
    """For the style, which stacks them on a phone; numbers, two columns or a matrix stay."""
    head = '<table>\n<thead>\n<tr>\n<th>a</th>\n<th>b "c"</th>\n<th>d</th>\n</tr>\n</thead>\n<tbody>\n<tr>\n'
    words = site_hooks.with_labels(f"{head}<td>x</td>\n<td>y</td>\n<td><code>z</code></td>\n</tr>\n</tbody>\n</table>")
    assert words.startswith("<table data-stack>")
    cells = re.findall(r"<td[^>]*>", words)
    assert cells == ['<td data-label="a">', '<td data-label="b &quot;c&quot;">', '<td data-label="d">']
    numbers = f"{head}<td>x</td>\n<td>1,024</td>\n<td>9.5</td>\n</tr>\n</tbody>\n</table>"
    assert site_hooks.with_labels(numbers) == numbers
    two = (
        "<table>\n<thead>\n<tr>\n<th>a</th>\n<th>b</th>\n</tr>\n</thead>\n<tr>\n<td>x</td>\n<td>y</td>\n</tr>\n</table>"
    )
    assert site_hooks.with_labels(two) == two
    wide = two.replace("<td>y<", f'<td><code class="whole">{"y " * 22}</code><')
    assert site_hooks.with_labels(wide).startswith("<table data-stack>")
    matrix = words.replace(" data-stack", "").replace("<th>a</th>", "<th></th>")
    matrix = re.sub(r' data-label="[^"]*"', "", matrix)
    assert site_hooks.with_labels(matrix) == matrix
    assert site_hooks.with_labels(matrix.replace("<td>y</td>", "<td>y y</td>")) != matrix
    style = (DOCS / "stylesheets" / "site.css").read_text(encoding="utf-8")
    assert "table[data-stack]" in style and "content: attr(data-label)" in style


def test_long_names_may_be_broken_between_their_words_alone() -> None:
    """On a phone; short ones, flags, blocks of code and text stay as they are."""
    name = "seqtile.integrations.axolotl.SeqtilePlugin"
    shown = site_hooks.with_breaks(f"<p>{name} <code>{name}</code></p><pre><code>{name}</code></pre>", everywhere=False)
    broken = '<wbr class="narrow">'.join(("seqtile.", "integrations.", "axolotl.", "Seqtile", "Plugin"))
    assert shown == f"<p>{name} <code>{broken}</code></p><pre><code>{name}</code></pre>"
    short = "<td>model.layers.mlp</td>"
    assert site_hooks.with_breaks(short, everywhere=False) == short
    assert site_hooks.with_breaks(short, everywhere=True) == "<td>model.<wbr>layers.<wbr>mlp</td>"


def test_numbers_of_tables_are_not_broken_at_their_minus() -> None:
    shown = site_hooks.with_whole_numbers('<td data-label="1e-5">5e-06, text-6</td>')
    assert shown == '<td data-label="1e-5"><span class="whole">5e-06</span>, text-6</td>'


TERMS = (
    "autocast", "hidden state", "logits", "micro-batch", "reduce-scatter", "fake tensor", "meta device",
    "live bytes", "SDPA", "FlashAttention", "key-value head", "key-value cache", "log-sum-exp", "pinned",
    "collective", "rank", "hook", "trace", "quantised", "DoRA", "PEFT", "MoE", "router", "rotary", "sliding window",
    "rollout", "completion", "teacher", "reference model", "entropy", "GRPO", "DPO", "JSD", "KL", "soft-cap",
    "z-loss", "label smoothing", "optimiser state", "gradient accumulation", "launch", "Triton",
    "upstream gradient", "high estimate", "working set", "rung", "hybrid", "fragmentation", "padding",
    "ignore_index", "autograd", "intermediate size", "bf16", "FSDP2", "ZeRO-3", "DDP",
)  # fmt: skip
"""Standard terms that more than one kind of reader will not know."""


def test_terms_of_the_pages_are_in_the_glossary() -> None:
    glossary = page("glossary")
    texts = "\n".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md") if path.stem != "glossary")
    assert [term for term in TERMS if term not in texts] == [], "terms that no page uses"
    assert [term for term in TERMS if term not in glossary] == []
    rows = re.findall(r"^\| ([^|]+?) \| ", glossary, re.M)[1:]
    words = [word.strip("`") for row in rows for word in row.split(", ")]
    assert len(words) == len(set(words)), "a word stands in the glossary twice"
    assert rows == sorted(rows, key=lambda row: row.lower().lstrip("`"))
