"""How model families set off their private reasoning from what they show: a row each, named in `format.think`."""

from __future__ import annotations

from dataclasses import dataclass

Markers = tuple[str, str]


@dataclass(frozen=True)
class Family:
    """`think` is what opens the reasoning and what closes it: all that is shown comes after the last closing marker.
    None for models that show everything they write. `turn` is what such a model writes just before it closes."""

    think: Markers | None
    turn: str = ""


FAMILIES: dict[str, Family] = {
    # Qwen3, DeepSeek-R1, SmolLM3 and most others; a template may have opened the block, or opened and closed it.
    "think": Family(("<think>", "</think>")),
    # Magistral.
    "mistral": Family(("[THINK]", "[/THINK]")),
    # Gemma 4: the name of the channel follows the marker that opens it.
    "gemma": Family(("<|channel>thought", "<channel|>")),
    # gpt-oss: messages on channels, of which the final one is shown; a tool call on `commentary` counts as private.
    "harmony": Family(
        ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"), "<|end|><|start|>assistant"
    ),
    "none": Family(None),
}  # fmt: skip


def left_open(prefill: str, think: Markers | None) -> str:
    """What opens a block of reasoning in `prefill` that nothing there closes and that the markers `think` would not see
    closed either; empty where there is none."""
    for family in FAMILIES.values():
        if family.think is None or family.think == think:
            continue
        opening, closing = family.think
        if prefill.rfind(opening) > prefill.rfind(closing):
            return opening
    return ""


def perfect(think: Markers | None, answer: Markers, prefill: str, gold: str) -> str:
    """A completion that does all that is asked of it, as a model with these markers writes it after `prefill`."""
    gap = "\n" if "\n" in gold else " "
    shown = f"a summary {answer[0]}{gap}{gold}{gap}{answer[1]}"
    if think is None or think[1] in prefill:
        return shown
    turn = next((family.turn for family in FAMILIES.values() if family.think == think), "")
    return f"{'' if think[0] in prefill else think[0]} thinking {turn}{think[1]} {shown}"
