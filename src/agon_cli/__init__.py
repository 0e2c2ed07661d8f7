"""agon: competitive cross-model reinforcement learning on problems a program can grade."""

__version__ = "0.1.0"
