"""Render what a player reads, through its model's own chat template. Text from data and models stays text."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from agon_cli.errors import UsageError
from agon_cli.recipe.schema import Prompts
from agon_cli.types import Problem, Prompt

_SLOT = re.compile(r"\{(problem|summary)\}")


class Renderer:
    """Turns problems and summaries into prompts for one tokenizer."""

    def __init__(self, tokenizer: Any, prompts: Prompts, summary_tokens: int) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                f"the model at {tokenizer.name_or_path} has no chat template",
                "use an instruction-tuned model, or put a chat_template.jinja into its folder",
            )
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.summary_tokens = summary_tokens
        self._opening: str | None = None
        contents = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        # Runs of white space that some tokenizers list as tokens control nothing, and code needs them as they are.
        control = [text for text in contents if len(text) > 1 and text.strip("\u2581 \t\r\n")]
        ordered = sorted(control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def plain(self, problem: Problem) -> Prompt:
        """The prompt of a draft."""
        return self._render(self.prompts.plain, {"problem": problem.question})

    def rival(self, problem: Problem, summary: str) -> Prompt:
        """The prompt of a challenge that reads this summary, as `shown` gives it."""
        return self._render(self.prompts.rival, {"problem": problem.question, "summary": summary})

    def shown(self, summary: str) -> str:
        """A summary as a challenge reads it: control tokens broken up; longer than its reserved room, it loses its
        end."""
        return self._cut(self._inert(summary))

    def widest(self, problem: Problem) -> int:
        """Most tokens any prompt of this problem can have: its challenge with a full summary."""
        empty = self._render(self.prompts.rival, {"problem": problem.question, "summary": ""})
        return max(len(empty.ids) + self.summary_tokens, len(self.plain(problem).ids))

    def keeps(self, marker: str) -> bool:
        """Whether the tokenizer can write a marker that is read in decoded text, white space aside."""
        decoded = str(self.tokenizer.decode(self.tokenizer(marker, add_special_tokens=False)["input_ids"]))
        return "".join(decoded.split()) == "".join(marker.split())

    def unknown(self, text: str) -> list[str]:
        """The words of a text, at white space, that do not reach the model as they are: read back from their tokens
        they are other than in case or in kind of character, or one token stands for all that is unknown."""
        return [word for word in text.split() if self._lost(word)] if self._lost(text) else []

    def _lost(self, text: str) -> bool:
        text = self._inert(text)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        unk = self.tokenizer.unk_token_id
        if unk is not None and unk in ids and self.tokenizer.unk_token not in text:
            return True
        return _bare(str(self.tokenizer.decode(ids))) != _bare(text)

    def _cut(self, summary: str) -> str:
        ids = self.tokenizer(summary, add_special_tokens=False)["input_ids"]
        if len(ids) <= self.summary_tokens:
            return summary
        return str(self.tokenizer.decode(ids[: self.summary_tokens])).rstrip("\ufffd")

    def _inert(self, text: str) -> str:
        """Break up every control token's spelling, so that no text can end a turn or open another; and replace what is
        no character (a lone surrogate), which no tokenizer takes."""
        text = text.encode("utf-8", "replace").decode()
        if self._control is None:
            return text
        return self._control.sub(lambda match: match.group()[0] + " " + match.group()[1:], text)

    def _render(self, template: str, slots: dict[str, str]) -> Prompt:
        filled = _SLOT.sub(lambda match: self._inert(slots[match.group(1)]), template)
        turns = [{"role": "user", "content": filled}]
        if self.prompts.system:
            turns.insert(0, {"role": "system", "content": self.prompts.system})
        try:
            opened = self._templated(turns, opening=True)
            # The words of a user's turn do not change how the answer's turn opens: it is looked for once.
            if self._opening is None or not opened.endswith(self._opening):
                closed = self._templated(turns, opening=False)
                self._opening = opened[len(closed) :] if opened.startswith(closed) else ""
        except Exception as error:  # a template is a program that came with the model
            system = "prompts.system, which some templates refuse, " if self.prompts.system else ""
            raise UsageError(
                f"the chat template of {self.tokenizer.name_or_path} fails: {type(error).__name__}: {error}",
                f"check {system}prompts.template_args and the model's chat template",
            ) from error
        if filled.strip() not in opened:
            raise UsageError(
                f"the chat template of {self.tokenizer.name_or_path} leaves out the user's turn",
                "check the model's chat template and prompts.template_args",
            )
        ids = self.tokenizer(opened, add_special_tokens=False)["input_ids"]
        if not ids:
            raise UsageError(
                f"a prompt has no token that {self.tokenizer.name_or_path} knows: {opened[:80]!r}",
                "check the prompts of the recipe and the model",
            )
        return Prompt(opened, tuple(ids), self._opening)

    def _templated(self, turns: list[dict[str, str]], opening: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=opening, **self.prompts.template_args
        )
        return text


def _bare(text: str) -> str:
    """A text without white space, in lower case and with plain forms of characters, as some tokenizers write it."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())
