"""Engines: what samples completions. One contract test runs against each of them."""
