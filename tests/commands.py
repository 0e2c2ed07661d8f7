"""Run a command of `agon` in this process."""

from agon_cli import cli


def agon(capsys, *words):
    """Its exit code, what it wrote to stdout, and what to stderr."""
    code = cli.main(list(words))
    out, err = capsys.readouterr()
    return code, out, err
