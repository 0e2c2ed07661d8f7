"""math-verify, imported and made to read a few formulas: its parser is a second slower the first time.

Imported by the process that grading workers are forked from, and by nothing else.
"""

from __future__ import annotations

from agon_cli.verifiers.math import compare

for _gold, _answer in (
    (r"\log 2", r"\log 3"),
    (r"\frac{x}{2}+\sqrt{3}", r"\frac{x+2\sqrt{3}}{2}"),
    (r"\sin^2 x", r"1-\cos^2 x"),
    (r"\begin{pmatrix} 1 & x \end{pmatrix}", r"\begin{pmatrix} 1 & y \end{pmatrix}"),
    (r"\{1, x\} \cup (2, \infty)", r"x \ge 2"),
    (r"\int_0^1 x\,dx", r"\sum_{k=1}^{3} k"),
):
    compare(_gold, _answer)
