"""A world small enough to train in about a minute on one CPU core: its problems, tokenizer and base model.

The base is an ordinary model folder, addressed as `package:agon_cli/tiny/base` and loaded like any other.
"""
