"""Hooks of the site's build: the table of architectures, docstrings' roles as plain code, tables that a phone can show.

The pages are written as plain text too, for tools (``llms.txt``, ``llms-full.txt``).
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any, TypeGuard

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = "<!-- architectures: {} -->"
NUMBER = re.compile(r"[(-]?\d[\d,. %x()/+-]*( to \d[\d,.]*)?$")
"""What a cell of a table of numbers holds."""
SHORT = 28
"""Code of at most this many characters stays on one line."""
PHONE = 44
"""Characters that fit on one line of a table on a phone, in two columns."""
WITH_MINUS = re.compile(r"\d(?:\.\d+)?e-\d+|\d{4}-\d\d-\d\d")
"""Numbers and dates that a browser would break at a minus."""


_texts: dict[str, tuple[str, str]] = {}


def on_nav(nav: Any, **_: Any) -> None:
    """The pages in the order of the menu."""
    _texts.update({page.url: ("", "") for page in nav.pages})


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Fill in the counts of the architectures."""
    if (marker := ARCHITECTURES.format("summary")) in markdown:
        markdown = markdown.replace(marker, architectures_summary(*read_architectures()))
    if page is not None:
        _texts[page.url] = page.title, as_text(markdown)
        if page.url == "changes.html":
            page.meta["search"] = {"boost": 0.2}  # what explains a word comes first
    return markdown


def on_post_build(config: Any, **_: Any) -> None:
    """Write the list of pages and their text, in the form of https://llmstxt.org."""
    site = Path(config["site_dir"])
    pages = [f"- [{title}]({url}): {opening(markdown)}" for url, (title, markdown) in _texts.items()]
    head = f"# {config['site_name']}\n\n> {config['site_description']}\n\n"
    every = "## Everything\n\n- [Every page](llms-full.txt): the text of all of them in one file"
    (site / "llms.txt").write_text("\n".join([f"{head}## Pages\n", *pages, "", every, ""]), encoding="utf-8")
    text = "\n\n".join(f"<!-- {url} -->\n\n{markdown.strip()}" for url, (_, markdown) in _texts.items())
    (site / "llms-full.txt").write_text(f"{text}\n", encoding="utf-8")
    for page in site.rglob("*.html"):
        page.write_text(without_the_network(page.read_text(encoding="utf-8")), encoding="utf-8")


def opening(markdown: str) -> str:
    """The first paragraph of a page, on one line."""
    paragraphs = (part for part in markdown.split("\n\n") if part.strip() and not part.startswith("#"))
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(next(paragraphs).split()))


def as_text(markdown: str) -> str:
    """A page with the files that it includes, and with signature and docstring of each name that it documents."""
    parts: list[str] = []
    for line in markdown.splitlines():
        if included := re.match(r'\s*--8<-- "([^":]+)(?::(\d+):(\d+))?"$', line):
            lines = (ROOT / included[1]).read_text(encoding="utf-8").rstrip().splitlines()
            parts += lines[int(included[2]) - 1 : int(included[3])] if included[2] else lines
        elif documented := re.match(r"::: (\S+)$", line):
            parts.append(described(documented[1]))
        else:
            parts.append(line)
    return "\n".join(parts)


def described(target: str) -> str:
    """Signature and docstring of a class or function of the package, by its dotted name; a class's methods' too."""
    module, _, name = target.rpartition(".")
    file = ROOT.joinpath("src", *module.split(".")).with_suffix(".py")
    body = ast.parse(file.read_text(encoding="utf-8")).body
    [node] = [node for node in body if _is_definition(node) and node.name == name]
    parts = [f"### {target}", "", "```python", _signature(node), "```", "", ast.get_docstring(node) or ""]
    for method in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and ast.get_docstring(method):
            parts += ["", f"#### {name}.{method.name}", "", "```python", _signature(method), "```"]
            parts += ["", ast.get_docstring(method) or ""]
    return "\n".join(parts)


def _signature(node: ast.ClassDef | ast.FunctionDef) -> str:
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"def {node.name}({ast.unparse(node.args)}){returns}"
    fields = [f"    {ast.unparse(line)}" for line in node.body if isinstance(line, ast.AnnAssign)]
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    return "\n".join([f"class {node.name}{bases}:", *fields])


def without_the_network(html: str) -> str:
    """A page with our script for the search in the place of the one that the offline plugin fetches from elsewhere."""
    html = html.replace("https://unpkg.com/iframe-worker/shim", "javascripts/worker.js")
    elsewhere = r'<(?:script|img|iframe)\b[^>]* src="https?:[^"]+|<link rel="stylesheet" href="https?:[^"]+'
    if fetched := re.findall(elsewhere, html):
        raise ValueError(f"a page fetches {fetched[0]}: put a copy beside the pages")
    return html


def on_page_content(html: str, **_: Any) -> str:
    """``:func:`name``` is a role in docstrings; the site shows the name alone. Flags in a line of text stay whole."""
    html = re.sub(r":(?:func|class|data|meth|mod|attr):(?=<code>|<a )", "", html)
    html = re.sub(r"(?<!</span>)<code>([^<]+)</code>", _with_whole_flags, html)
    html = re.sub(
        r"<table>\n<thead>.*?</table>", lambda table: with_whole_numbers(with_labels(table[0])), html, flags=re.S
    )
    html = with_breaks(html)
    if (marker := ARCHITECTURES.format("table")) in html:
        html = html.replace(marker, architectures_table(read_architectures()[1]))
    return html


def read_architectures() -> tuple[dict[str, str], list[dict[str, Any]]]:
    """What ``benchmarks/architectures.py`` wrote: a line about the run, and one per architecture."""
    header, *records = map(json.loads, (ROOT / "docs" / "architectures.jsonl").read_text(encoding="utf-8").splitlines())
    return header, records


def architectures_summary(header: dict[str, str], records: list[dict[str, Any]]) -> str:
    """Counts of the table's rows, with versions, date and command."""
    states = Counter(record["state"] for record in records)
    operators = Counter[str]()
    for block in (block for record in records for block in record["tiled"]):
        operators[block["operator"]] += block["blocks"]
    return (
        f"**{len(records)} model types of transformers {header['transformers']}: {states['equal']} tiled with "
        f"gradients equal to the untiled model's, {states['WRONG']} with wrong ones.** {operators.total():,} blocks "
        f"ran in tiles, {operators['fused']:,} of them in the fused operator.\n\n"
        f"{header['date']}, torch {header['torch']}, {header['device'].upper()}, `{header['command']}`."
    )


def architectures_table(records: list[dict[str, Any]]) -> str:
    """A row per architecture, and the form by which ``javascripts/architectures.js`` filters them."""
    states = Counter(record["state"] for record in records)
    options = "".join(f'<option value="{state}">{state} ({number})</option>' for state, number in states.most_common())
    columns = ("architecture", "result", "runs in tiles", "left untiled", "at released sizes")
    rows = "".join(_architecture(record, columns) for record in records)
    return f"""<form id="architectures-filter" hidden>
<input type="search" name="words" aria-label="Search" placeholder="Model type, class or block">
<select name="state" aria-label="Result"><option value="">every result ({len(records)})</option>{options}</select>
<select name="operator" aria-label="Operator">
<option value="">fused or generic</option><option>fused</option><option>generic</option></select>
<output></output>
</form>
<div class="architectures" data-search-exclude>
<table data-stack>
<thead><tr>{"".join(f"<th>{column}</th>" for column in columns)}</tr></thead>
<tbody>
{rows}</tbody>
</table>
<button name="more" form="architectures-filter" class="md-button" type="button" hidden>Show more</button>
</div>
<script src="javascripts/architectures.js"></script>"""


def _architecture(record: dict[str, Any], columns: tuple[str, ...]) -> str:
    def where(block: dict[str, Any]) -> str:
        path = re.sub(r"(?<=[.])(?=[\w*])", "<wbr>", escape(block["where"]))
        return f"{block['blocks']} × <code>{path}</code> {escape(block['class_name'])}"

    tiled, left = [], []
    for block in record["tiled"]:
        members = f"; with {escape(block['together'])}" if " + " in block["together"] else ""
        why = f": {escape(block['why'])}" if block["why"] else ""
        tiled.append(f"<p>{where(block)}, {block['operator']}{why}{members}</p>")
    for block in record["left"]:
        left.append(f"<p>{where(block)}: {escape(block['why'])}</p>")
    detail = f"<p>{escape(record['detail'])}</p>" if record["detail"] else ""
    name = re.sub(r"(?<=[_-])", "<wbr>", escape(record["architecture"]))
    cells = (name, f"<p>{record['state']}</p>{detail}", "".join(tiled), "".join(left), escape(record["released"]))
    operators = " ".join(sorted({block["operator"] for block in record["tiled"]}))
    labelled = "".join(f'<td data-label="{column}">{cell}</td>' for column, cell in zip(columns, cells, strict=True))
    return f'<tr data-state="{record["state"]}" data-operators="{operators}">{labelled}</tr>\n'


def with_whole_numbers(table: str) -> str:
    """A table whose dates and numbers with an exponent stay on one line."""
    return re.sub(r"(?<=>)[^<]+", lambda text: WITH_MINUS.sub(r'<span class="whole">\g<0></span>', text[0]), table)


def with_breaks(html: str) -> str:
    """Names longer than a phone is wide may be broken there at dots, underscores, brackets and capitals."""
    parts, code, inside, whole = [], 0, 0, False
    for part in re.split(r"(<[^>]+>)", html):
        if tag := re.match(r"<(/?)(pre|code|td|h[23])\b", part):
            step = -1 if tag[1] else 1
            inside += step * (tag[2] == "pre")
            code += step * (tag[2] != "pre")
        elif code and not inside and not part.startswith("<"):
            length = PHONE if whole else SHORT - 4
            part = re.sub(rf"[^\s<>&;]{{{length},}}", lambda word: _with_breaks(word[0]), part)
        whole = 'class="whole"' in part
        parts.append(part)
    return "".join(parts)


def _with_breaks(word: str) -> str:
    return re.sub(r"(?<=[._(,=/])(?=[A-Za-z_*])|(?<=[a-z0-9])(?=[A-Z])", '<wbr class="narrow">', word)


def with_labels(table: str) -> str:
    """A table of words with each cell's column name beside it: on a phone the style stacks it, row by row.

    A table of numbers stays as it is, and so do one of two columns that fit beside each other, and a matrix of single
    words.
    """
    labels = [re.sub(r"<[^>]+>", "", label).strip() for label in re.findall(r"<th[^>]*>(.*?)</th>", table, re.S)]
    cells = [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", table, re.S)]
    numbers = sum(bool(NUMBER.match(cell)) for cell in cells)
    others = [cell for number, cell in enumerate(cells) if number % max(1, len(labels))]
    is_matrix = labels[:1] == [""] and all(" " not in cell for cell in others)
    if (len(labels) < 3 and _fits(table)) or 3 * numbers > len(cells) or is_matrix:
        return table

    def labelled(row: re.Match[str]) -> str:
        names = iter(labels)

        def cell(opening: re.Match[str]) -> str:
            label = next(names, "").replace('"', "&quot;")
            return f'<td data-label="{label}"{opening[1]}>' if label else opening[0]

        return re.sub(r"<td([^>]*)>", cell, row[0])

    return re.sub(r"<tr.*?</tr>", labelled, table.replace("<table>", "<table data-stack>", 1), flags=re.S)


def _fits(table: str) -> bool:
    """Whether the longest words of two columns, short code taken whole, fit beside each other on a phone."""
    table = re.sub(r'(?<=class="whole">)[^<]*', lambda code: code[0].replace(" ", "_"), table)
    columns: dict[int, int] = {}
    for row in re.findall(r"<tr.*?</tr>", table, re.S):
        for column, cell in enumerate(re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S)):
            longest = max((len(word) for word in re.sub(r"<[^>]*>", "", cell).split()), default=0)
            columns[column] = max(columns.get(column, 0), longest)
    return sum(columns.values()) <= PHONE


def _with_whole_flags(code: re.Match[str]) -> str:
    """A browser breaks a line at every space, hyphen and slash: flags stay whole, and what is short as it is."""
    if len(code[1]) <= SHORT:
        return f'<code class="whole">{code[1]}</code>'
    words = re.sub(r"[^\s<>]*[-/][^\s<>]*", r'<span class="whole">\g<0></span>', code[1])
    return f"<code>{words}</code>"


def _is_definition(node: ast.stmt) -> TypeGuard[ast.ClassDef | ast.FunctionDef]:
    """A class or a function, but not one of the signatures that an overloaded function has besides."""
    if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return False
    return not any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list)
