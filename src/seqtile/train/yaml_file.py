"""YAML as a recipe needs it: plain values, each given once. Whatever else YAML can do is refused before it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from seqtile._errors import UserError

MAX_BYTES = 1 << 20
"""Far beyond any recipe; a device or a data set given by mistake is not read to its end."""


class _PlainLoader(yaml.SafeLoader):
    """``yaml.SafeLoader`` without tags, without aliases (of which a few lines can mean terabytes) and without a key
    given twice, of which YAML would silently drop one."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        problem = ""
        if type(event) is yaml.AliasEvent:
            problem = f"*{event.anchor} repeats another value"
        elif event.tag:
            problem = f"it has a tag ({event.tag})"
        if problem:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key.value, str) else key
            if name in seen or key.tag.endswith(":merge"):
                problem = f"key {key.value!r} is given twice" if name in seen else "'<<' repeats other keys"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The keys and values of a YAML file.

    Raises:
        UserError: no such file, larger than 1 MiB, not YAML, a tag, an alias, a key given twice, or not a mapping.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content[:MAX_BYTES].decode("utf-8") if len(content) <= MAX_BYTES else ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or ("not UTF-8 text" if isinstance(error, UnicodeError) else error)
        raise UserError(f"cannot read recipe {str(path)!r} ({reason}); give the path of a YAML file") from None
    if len(content) > MAX_BYTES:
        raise UserError(f"recipe {str(path)!r} is larger than {MAX_BYTES:,} bytes; give the path of a YAML file")
    try:
        values = yaml.load(text, Loader=_PlainLoader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "syntax error"
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UserError(
            f"recipe {str(path)!r}{where} is not plain YAML: {problem}; write 'key: value' lines, no tags, no aliases"
        ) from None
    except (ValueError, RecursionError) as error:
        # A date that is none, a number of thousands of digits, brackets nested thousands deep.
        problem = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise UserError(f"recipe {str(path)!r} holds a value that cannot be read ({problem}); fix it") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"recipe {str(path)!r} holds a {type(values).__name__}, expected 'key: value' lines")
    return values
