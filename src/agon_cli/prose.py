"""What of a text is prose: code is taken out, so that a rival reads a plan and has to write the program itself.

Code is fenced blocks, `<code>` and `<pre>`, inline code that does something, and every line that is a Python statement
or looks like one of C, C++ or Java. Text is parsed, never run. What is told in words stays, and so does a disguise; the
leak rate counts programs that can still be read off.
"""

from __future__ import annotations

import ast
import re
import warnings

LONGEST_LINE = 300
"""Characters of a line that is parsed; a longer one is judged by its signs alone, so that no text costs much."""
DEEPEST = 8
"""Brackets within brackets of a line that is parsed; no prose has more. With brackets left open the parser's search for
the mistake takes thousands of times as long."""
SHORT_INLINE = 40
"""Characters of inline code that may call a function and still counts as a word of prose, such as `gcd(a, b)`."""

_FENCE = re.compile(r"(`{3,}|~{3,})([^\n]*)")
_ELEMENTS = re.compile(r"<(code|pre)\b[^>\n]{0,100}>.*?(?:</\1\s{0,9}>|\Z)", re.DOTALL | re.IGNORECASE)
_INLINE = re.compile(r"(?<!`)(`{1,2})(?!`)([^`\n]+)\1(?!`)")
_MARKS = re.compile(r"\s*(?:(?:>|[*+\u2022-](?=\s)|\d{1,3}[.):](?=\s))\s*)*")
_PERHAPS = re.compile(r"[=(\[:;@{}<>]|(?:import|from|pass|break|continue|return|raise|del|global|nonlocal|assert)\b")
_SIGNS = re.compile(
    r"#\s*include\b|using\s+namespace\b|std::|@\w+|c(?:in|out)\s*(?:>>|<<)|"
    r"(?:(?:public|private|static|const|unsigned|long|short)\s+){0,4}"
    r"(?:int|long|void|double|float|char|bool|string|auto|vector|map|set|pair|queue)(?:\s*<[\w<>:, ]{1,60}>)?"
    r"[\s*&]{1,3}\w{1,60}\s*[(=;,{\[]|"
    r"(?:else|try|finally)\s*[:{]?$|(?:elif|except|case)\b.*:$|"
    r"(?:[\w.\[\]]+\s*(?:[-+*/%|&^]|//|<<|>>)?=\s*)?[\w.]*[(\[{]$|"
    r"[\s()\[\]{},;:]+$|[\w.\[\]]+\s*[-+*/%]?=[^=].*;$|(?:for|while|if)\s*\(.*[;{]"
)
_CALL = re.compile(r"\w\(")
_ACTS = re.compile(r"\b(?:print|input|open|exec|eval|lambda|sys|os|cin|cout|printf|scanf)\b")
_DOES = (ast.Call, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Yield)


def prose(text: str, mask: str) -> str:
    """The text without its code; `mask` stands where inline code was."""
    text = _ELEMENTS.sub("\n", text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the parser thinks of a model's backslashes
        cores = ((line, _core(line)) for line in _unfenced(text))
        kept = [
            _without_inline(line, mask) for line, core in cores if not line.strip() or (core and not _is_code(core))
        ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept))


def _unfenced(text: str) -> list[str]:
    """Lines outside fenced blocks. A fence that is never closed runs to the end; a marker with a word behind it opens
    and never closes."""
    kept: list[str] = []
    fence = ""
    for line in text.split("\n"):
        found = _FENCE.search(line)
        if fence:
            if found and found[1].startswith(fence) and not found[2].strip():
                fence = ""
        elif found is None:
            kept.append(line)
        elif found[1] in found[2]:  # opened and closed in one line
            kept.append(line[: found.start()] + found[2].rpartition(found[1])[2])
        else:
            fence = found[1]
            kept.append(line[: found.start()])
    return kept


def _core(line: str) -> str:
    """A line without the marks of lists and quotes before it, and the back quotes around all of it."""
    core = line[_MARKS.match(line).end() :].strip()  # type: ignore[union-attr]  # it matches nothing at least
    inner = core.strip("`")
    return inner.strip() if "`" not in inner else core


def _without_inline(line: str, mask: str) -> str:
    def judged(match: re.Match[str]) -> str:
        inside = match[2].strip()
        short_call = len(inside) <= SHORT_INLINE and not _ACTS.search(inside) and _parses_as_expression(inside)
        return match[0] if short_call or not _is_code(inside) else mask

    return _INLINE.sub(judged, line)


def _is_code(line: str) -> bool:
    """Whether a line does something: a statement, or an expression that calls, but no formula and no heading."""
    if not line or not _PERHAPS.search(line[:LONGEST_LINE]):
        return False
    if _SIGNS.match(line[:LONGEST_LINE]) or (line[-1] in ";{" and _CALL.search(line)):
        return True
    if _brackets(line[:LONGEST_LINE])[1] > DEEPEST:
        return True
    if len(line) > LONGEST_LINE:
        return line.count(";") + line.count("=") + line.count("(") > len(line) // 20
    tree = _parsed(line + " pass" if line.endswith(":") else line)
    return tree is not None and any(_does(statement) for statement in tree.body)


def _does(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.AnnAssign):
        return statement.value is not None  # without one it is a heading: "Complexity: O(n)"
    if isinstance(statement, ast.Expr):
        return any(isinstance(node, _DOES) for node in ast.walk(statement))
    return True


def _parsed(line: str) -> ast.Module | None:
    if _brackets(line)[0] != 0:
        return None
    try:
        return ast.parse(line)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _brackets(line: str) -> tuple[int, int]:
    """How many brackets are left open, and the most within one another."""
    depth = deepest = 0
    for sign in line:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    return depth, deepest


def _parses_as_expression(text: str) -> bool:
    tree = _parsed(text)
    return tree is not None and all(isinstance(statement, ast.Expr) for statement in tree.body)
