"""The recipe: every value a run depends on, with its unit and default. Unknown keys are refused."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from agon_cli.families import FAMILIES
from agon_cli.recipe.data import Data
from agon_cli.recipe.engine import HF, Engine
from agon_cli.recipe.presets import PRESETS
from agon_cli.recipe.section import Section


class Method(Section):
    """What the players do to each other. A preset fills every knob; a knob written out overrides it."""

    preset: str = "agon"
    """Named setting of the knobs below: zero_shot, moa, grpo, grpo_two_pass, self_refine, competition_only, coop, agon,
    margin, fixed_roles, agon_short or shuffled. `method: NAME` is short for this key alone."""
    players: Literal["all", "one", "base"] = "all"
    """Who takes part: every player of the recipe, only the first, or the untrained base (evaluation only)."""
    exchange: Literal["none", "own", "rival", "shuffled"] = "rival"
    """Whose summary a challenge reads: nobody's, the player's own draft's, the rival's, or the rival's draft of another
    problem (a control)."""
    opponent: Literal["none", "per_rollout", "shared"] = "per_rollout"
    """Challenge i faces draft i; all N challenges face one draft, drawn per problem; or there are no challenges and
    each problem gets 2N drafts (GRPO)."""
    reward: Literal["cooperative", "competitive", "margin"] = "competitive"
    """Challenger's reward: 2c(b), 2c(b) + bonus·c(b)(1 - c(a)), or 2c(b) + bonus·(c(b) - c(a)); each plus the format
    term."""
    bonus: float = Field(1.0, ge=0)
    """Weight of the rival term."""
    bonus_needs_summary: bool = True
    """No rival term where the challenger had no summary to read (where the method shows one at all)."""
    tie_break: float = Field(0.0, ge=0)
    """Extra reward for a right challenge shorter, in tokens, than its right draft."""
    format_weight: float = Field(0.5, ge=0)
    """Weight of the format term, for every completion."""
    roles: Literal["rotate", "fixed"] = "rotate"
    """Swap drafter and challenger every step, or keep the first player drafting."""
    deploy: Literal["single", "cascade"] = "cascade"
    """How the result is used and judged: one pass, or one player drafts and another answers."""

    @model_validator(mode="before")
    @classmethod
    def fill_from_preset(cls, given: Any) -> Any:
        """Put the preset's values under the knobs that were written out."""
        if isinstance(given, str):
            given = {"preset": given}
        if not isinstance(given, dict):
            return given
        name = given.get("preset", "agon")
        if not isinstance(name, str):
            return given
        if name not in PRESETS:
            raise PydanticCustomError(
                "unknown_preset", "no method is called {name}", {"name": repr(name), "known": sorted(PRESETS)}
            )
        return {"preset": name} | PRESETS[name] | given

    @model_validator(mode="after")
    def knobs_agree(self) -> Method:
        """Refuse combinations in which a knob would silently do nothing."""
        if self.opponent == "none" and self.reward != "cooperative":
            raise ValueError(f"reward {self.reward!r} needs an opponent: set opponent to per_rollout or shared")
        if self.players != "all" and self.exchange in ("rival", "shuffled"):
            raise ValueError(f"exchange {self.exchange!r} needs a rival: set players to all")
        if self.players == "all" and self.opponent == "none":
            raise ValueError("players all with opponent none would train each player alone: set players to one")
        return self


class Model(Section):
    """The frozen base model."""

    id: str = Field(min_length=1)
    """Folder, Hub id (`NAME@REVISION` pins it), or `package:NAME[/SUB/FOLDER]` for weights shipped in an installed
    Python package. A path that ends in `.gguf` is converted once to an ordinary checkpoint in the cache."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the base's weights and of its arithmetic; adapters are always float32."""
    quantization: Literal["nf4"] | None = None
    """nf4 keeps the base in 4 bits (QLoRA); needs the `qlora` extra. null keeps it as `dtype`."""


class Lora(Section):
    """The shape of every player's adapter."""

    rank: int = Field(16, ge=1, le=1024)
    """Rank of the update."""
    alpha: float = Field(32.0, gt=0)
    """Scale: the update is multiplied by alpha / rank."""
    targets: str | list[str] = "all-linear"
    """`all-linear`, a list of module names, or a regular expression over full module names."""

    @field_validator("targets")
    @classmethod
    def name_something(cls, targets: str | list[str]) -> str | list[str]:
        """Refuse a broken regular expression, and a choice of no module at all."""
        if not targets:
            raise ValueError("names no module: write all-linear for every linear layer")
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ValueError(f"is no regular expression: {error}") from error
        return targets


class Player(Section):
    """How one player starts, and its own base where it has one."""

    noise: float = Field(0.0, ge=0)
    """Standard deviation of the Gaussian its LoRA B matrices start from; 0 starts exactly at the base."""
    model: Model | None = None
    """A base of its own (a cross-family pair); the recipe's `model` when absent."""


class Prompts(Section):
    """What the models read. `{problem}` and `{summary}` are replaced; the model's own chat template does the rest."""

    system: str | None = None
    """System turn; null for none."""
    plain: str = (
        "{problem}\n\nThink it through, then write a short summary of your reasoning, "
        "and end with the final answer as <answer>...</answer>."
    )
    """User turn of a draft."""
    rival: str = (
        "{problem}\n\nAnother solver's summary of an attempt, which may be right or wrong:\n"
        "<attempt>\n{summary}\n</attempt>\n\nSolve the problem yourself, using the attempt where it holds up. Then "
        "write a short summary of your reasoning, and end with the final answer as <answer>...</answer>."
    )
    """User turn of a challenge."""
    template_args: dict[str, str | bool | int | float] = {}
    """Extra arguments for the chat template, such as enable_thinking."""

    @field_validator("plain", "rival")
    @classmethod
    def shows_what_it_must(cls, text: str, info: ValidationInfo) -> str:
        """A draft reads the problem alone; a challenge reads the problem and a summary."""
        if "{problem}" not in text:
            raise ValueError("never shows the problem: write {problem} where it goes")
        if info.field_name == "rival" and "{summary}" not in text:
            raise ValueError("never shows the rival's summary: write {summary} where it goes")
        if info.field_name == "plain" and "{summary}" in text:
            raise ValueError("a draft has no summary to read: take {summary} out")
        return text


Marker = Annotated[str, Field(min_length=1)]


class Format(Section):
    """How a completion is read."""

    think: Annotated[tuple[Marker, Marker], Field(strict=False)] | None = ("<think>", "</think>")
    """Markers around the private reasoning, or the family of models that has them: think, mistral, gemma or harmony
    (gpt-oss). null, or the family none, for models that write no reasoning."""
    answer: Annotated[tuple[Marker, str], Field(strict=False)] = ("<answer>", "</answer>")
    """Markers around the final answer. An empty second marker means the end of the line, as in ["####", ""]."""

    @field_validator("think", mode="before")
    @classmethod
    def markers_of_the_family(cls, given: Any) -> Any:
        """A family's name stands for its markers."""
        if not isinstance(given, str):
            return given
        if given not in FAMILIES:
            raise ValueError(f"no family of models is called {given[:40]!r}: take one of {', '.join(FAMILIES)}")
        return FAMILIES[given].think


class Summary(Section):
    """What of a draft the rival gets to read."""

    withhold: Literal["tag", "boxed", "strict", "plan", "plan+code"] = "boxed"
    """Drop the answer tag; also mask \\boxed{}; also mask every span equal to the final answer. Where programs are the
    answers: plan (there the default) keeps the prose and removes all code, plan+code shows both."""
    max_tokens: int = Field(1024, ge=1)
    """Room reserved for it in the challenger's prompt; a longer summary is cut at its end."""


class Rollout(Section):
    """How completions are sampled, in training and evaluation alike."""

    problems: int = Field(8, ge=1, le=65536)
    """Problems per step."""
    group_size: int = Field(8, ge=2, le=4096)
    """N: drafts per problem, and challenges per problem. A method without challenges samples 2N drafts."""
    temperature: float = Field(0.6, gt=0)
    """Divides the logits; the policy that is trained is the one at this temperature."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Nucleus sampling; 1 keeps everything."""
    max_tokens: int = Field(4096, ge=1)
    """Completion cap, in tokens, for drafts and challenges alike."""
    max_prompt_tokens: int = Field(2048, ge=1)
    """Problems whose plain prompt, or whose challenge prompt with a full summary, is longer are dropped at the
    start."""


class Optim(Section):
    """AdamW, one optimiser per player, one update per player and step."""

    lr: float = Field(5e-5, gt=0)
    """Peak learning rate."""
    warmup: float = Field(0.1, ge=0, lt=1)
    """Share of the steps over which the rate rises; then it falls linearly to 0."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    clip_norm: float = Field(1.0, gt=0)
    """Gradients of one player are scaled to at most this norm."""
    kl: float = Field(0.0, ge=0)
    """Weight of the KL penalty against the frozen base (nats per token)."""
    denominator: Literal["token", "sequence"] = "token"
    """The loss divides by the completion tokens of the player's whole step, or averages each completion first."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Rows x longest row that one backward pass holds; changes memory, never a gradient."""
    checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: far less memory, about a third
    more arithmetic, the same gradients. A prompt that completions share is then computed for each of them."""


class Split(Section):
    """How many problems each split gets. Splits are disjoint by content hash."""

    train: int | None = Field(None, ge=1)
    """Cap on training problems; null takes all that are left."""
    dev: int = Field(300, ge=1)
    """Problems for evaluation during training, and for choosing the cascade's direction."""
    test: int = Field(300, ge=1)
    """Held-out problems; looked at only before and after training."""


class Verifier(Section):
    """How an answer is graded."""

    type: Literal["exact", "number", "math", "choice", "reasoning_gym", "code"] = "math"
    """Same text, same number, equivalent mathematics, same option of a multiple choice, the reasoning-gym task's own
    scorer, or unit tests in a sandbox."""
    timeout: float = Field(5.0, gt=0, le=3600)
    """CPU seconds for one answer, or for one test of a program; a formula gets 1 at most."""


class Eval(Section):
    """Evaluation on held-out problems."""

    every: int = Field(50, ge=0)
    """Steps between evaluations on the dev split; 0 evaluates only before and after."""


class Save(Section):
    """Checkpoints."""

    every: int = Field(25, ge=1)
    """Steps between checkpoints."""


class Hardware(Section):
    """Where the work runs."""

    threads: int | None = Field(None, ge=1)
    """CPU threads; null leaves it to torch. Part of what makes CPU runs repeatable bit for bit."""


def _disagreement(at: str, message: str) -> PydanticCustomError:
    """An error between keys, put to the one at the dotted path `at`."""
    return PydanticCustomError("disagreement", "{message}", {"at": at, "message": message})


class Recipe(Section):
    """Everything a run depends on."""

    method: Method = Method()
    model: Model
    players: dict[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")], Player] = Field(
        {"A": Player(), "B": Player(noise=0.005)}, min_length=1
    )
    """Names and starts of the players, in drafting order."""
    lora: Lora = Lora()
    data: Data
    split: Split = Split()
    verifier: Verifier = Verifier()
    prompts: Prompts = Prompts()
    format: Format = Format()
    summary: Summary = Summary()
    rollout: Rollout = Rollout()
    engine: Engine = HF(type="hf")
    optim: Optim = Optim()
    eval: Eval = Eval()
    save: Save = Save()
    hardware: Hardware = Hardware()
    steps: int = Field(200, ge=1)
    """Optimiser steps."""
    seed: int = Field(0, ge=0)
    """Every random draw of the run is derived from it."""

    @field_validator("engine", mode="before")
    @classmethod
    def engine_without_a_type(cls, given: Any) -> Any:
        """`engine.batch_tokens=N` alone means the default engine's."""
        return {"type": "hf"} | given if isinstance(given, dict) else given

    @model_validator(mode="before")
    @classmethod
    def a_program_is_not_shown_unasked(cls, given: Any) -> Any:
        """Where programs are graded, a summary is the plan alone unless the recipe says otherwise."""
        if not isinstance(given, dict) or not isinstance(given.get("verifier"), dict):
            return given
        summary = given.get("summary", {})
        if given["verifier"].get("type") != "code" or not isinstance(summary, dict):
            return given
        return given | {"summary": {"withhold": "plan"} | summary}

    @model_validator(mode="after")
    def parts_agree(self) -> Recipe:
        """A method with a rival needs one, another problem's draft another problem, a task's own scorer that task."""
        if self.method.players == "all" and len(self.players) < 2:
            raise _disagreement("players", f"method {self.method.preset!r} trains rivals: name at least two players")
        if self.method.exchange == "shuffled" and self.rollout.problems < 2:
            raise _disagreement("rollout.problems", "exchange 'shuffled' reads another problem's draft: take 2 or more")
        if self.verifier.type == "reasoning_gym" and self.data.type != "reasoning_gym":
            raise _disagreement("verifier.type", "reasoning_gym scores only problems of data.type reasoning_gym")
        if (self.verifier.type == "code") != self.summary.withhold.startswith("plan"):
            wanted = "plan or plan+code" if self.verifier.type == "code" else "tag, boxed or strict"
            message = f"{self.summary.withhold!r} does not fit verifier.type {self.verifier.type}: take {wanted}"
            raise _disagreement("summary.withhold", message)
        return self

    @property
    def cast(self) -> tuple[str, ...]:
        """Names of the players that take part, in drafting order."""
        names = tuple(self.players)
        return names if self.method.players == "all" else names[:1]

    @property
    def training_steps(self) -> int:
        """Optimiser steps that a run takes; none where the method leaves the base as it is."""
        return 0 if self.method.players == "base" else self.steps

    def model_of(self, player: str) -> Model:
        """The base that a player's adapter sits on."""
        return self.players[player].model or self.model
