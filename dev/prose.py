"""Counts clauses in place of nouns: `what is due` for *due messages*, `so many at most` for *the limit*.

    python -m dev.prose [--list] [PATH ...]

With `--list` each sentence is printed. Without paths all files that git knows are counted, by tree, and compared with
the ceilings in pyproject.toml (`tool.prose.ceilings`): more than a ceiling is an error. Ceilings only go down.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent

_VERBS: Final = (
    "is are was were has have had comes? came becomes? became remains? can could would will does did do lies falls "
    "goes waits holds fits"
)
_OTHERS: Final = "it they there a the its that of"
CLAUSE: Final = re.compile(
    rf"\b(?:what|whatever|whichever) (?:{'|'.join([*_VERBS.split(), *_OTHERS.split()])})\b"
    r"|\bso (?:many|much|long|far|often|late|soon|few)\b(?! as possible)(?! that)"
    r"|\b(?:none|one|some|those|that|all) of (?:ours|its own|theirs|hers|his)\b"
    r"|\b(?:there is|there are) none\b|\bas (?:it|they) (?:is|are|was|were)\b|\bof no use\b"
    r"|\bit is (?:to|likely|as)\b|\b(?:is|are) to be\b",
    re.IGNORECASE,
)

_QUOTED: Final = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_SENTENCES: Final = re.compile(r"(?<=[.;:|])\s+|\n\n")
_TOKENS: Final = re.compile(
    r"(?P<comment>/\*.*?\*/|//[^\n]*)|(?P<text>\"\"\".*?\"\"\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)",
    re.DOTALL,
)
_MARGIN: Final = re.compile(r"^\s*(?:\*|//)\s?", re.MULTILINE)
_HASH: Final = re.compile(r"^[ \t]*#(?:[ \t]*--)?", re.MULTILINE)


def of_python(source: str) -> Iterator[str]:
    """Docstrings and other literals, adjacent ones joined; blocks of comments."""
    parts: set[ast.expr] = set()  # of f-strings, which `walk` visits after their whole
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts.update(node.values)
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            yield node.value
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            last = token.start[0]
    yield " ".join(block)


def of_braces(source: str) -> Iterator[str]:
    """Comments and literals of JavaScript, Java and CSS; comments on adjacent lines joined."""
    block: list[str] = []
    end = 0
    for token in _TOKENS.finditer(source):
        if token["text"]:
            yield token["text"].strip("\"'`")
            continue
        if source[end : token.start()].strip():
            yield " ".join(block)
            block = []
        block.append(_MARGIN.sub("", token["comment"].strip("/*")))
        end = token.end()
    yield " ".join(block)


def texts(name: str, source: str) -> list[str]:
    """The texts of a file, each once, without quoted code."""
    suffix = Path(name).suffix
    if suffix == ".py":
        found = of_python(source)
    elif suffix in {".js", ".java", ".css"}:
        found = of_braces(source)
    elif suffix == ".md":
        found = iter([re.sub(r"\([^()\s]*\)", " ", source)])  # without links' addresses
    else:
        found = iter([_HASH.sub("", source)])
    return [text for each in dict.fromkeys(found) if (text := _QUOTED.sub("``", each)).strip()]


def offences(text: str) -> list[str]:
    """The sentences of a text that have a clause, as often as they have one."""
    sentences = (" ".join(sentence.split()) for sentence in _SENTENCES.split(text))
    return [sentence for sentence in sentences for _ in CLAUSE.findall(sentence)]


SUFFIXES: Final = frozenset({".py", ".md", ".yaml", ".tpl", ".txt", ".js", ".java", ".css", ".html"})
LEFT_OUT: Final = re.compile(r"(?:.*/)?(?:testdata|snapshots?)/|.*\.lock$|helm/[^/]+/files/|CHANGELOG\.md$")


def tree_of(name: str) -> str:
    """The tree to whose ceiling a file counts: its folder at the top, or `.`."""
    return name.partition("/")[0] if "/" in name else "."


def judge(counts: Mapping[str, int], ceilings: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Trees above their ceilings, and trees whose ceilings can go down."""
    above = [f"{t}: {n} clauses, {ceilings.get(t, 0)} allowed" for t, n in counts.items() if n > ceilings.get(t, 0)]
    below = [f"{t} = {counts.get(t, 0)}" for t, n in ceilings.items() if counts.get(t, 0) < n]
    return above, below


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if Path(name).suffix in SUFFIXES and not LEFT_OUT.match(name)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dev.prose", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print each sentence")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files to count, without a comparison")
    options = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    words = 0
    for name in options.paths or tracked():
        path = Path(name) if options.paths else ROOT / name
        if not path.is_file():  # removed, and not yet committed
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        parts = texts(name, source)
        found = [sentence for text in parts for sentence in offences(text)]
        counts[tree_of(name)] += len(found)
        words += sum(len(text.split()) for text in parts)
        if options.list:
            print(*(f"{name}: {sentence[:220]}" for sentence in found), sep="\n", end="\n" if found else "")
    print(f"{counts.total()} clauses, {1000 * counts.total() / max(1, words):.1f} per 1,000 words")
    if options.paths:
        return 0
    ceilings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["prose"]["ceilings"]
    above, below = judge(counts, ceilings)
    if below:
        print("Lower these ceilings in pyproject.toml:", *below, sep="\n  ")
    if above:
        print("Use nouns for these clauses (--list PATH prints them):", *above, sep="\n  ", file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
