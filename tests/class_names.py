"""Check that no public class of Paceline has the name of another one: `python -m tests.class_names`.

One name for one thing: a reader who searches a class finds one. Names with an underscore belong to their file.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "paceline"


def duplicates() -> dict[str, list[str]]:
    """Return the files of each public class name that several files define. Generated files do not count."""
    files: dict[str, list[str]] = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        if "_pb2" not in file.name:
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    files[node.name].append(str(file.relative_to(PACKAGE.parent)))
    return {name: found for name, found in files.items() if len(found) > 1}


if __name__ == "__main__":
    found = duplicates()
    for name, where in found.items():
        print(f"class {name} is defined in {' and in '.join(where)}: give one of them another name", file=sys.stderr)
    sys.exit(bool(found))
