"""The RL loop of the reference pair: rollouts, a reward, a policy-gradient step, and the adapter back to the engine.

    with LearningPair(LoopSettings(seed=0), peak_device="gpu") as pair:
        pair.run(20)                      # the driver's order: rollout, hand-off, step, hand-off with adapter-only sync
        pair.iterations                   # an `Iteration` each: reward, loss, gap, version, a sample

A step at a time, as a profile of live rules or a debugger would take it (each leaves a sample in `pair.samples`):

    pair.driver.run(0)                                       start both, first sync; ready for a rollout
    pair.tokens(prompts=["ab"], seed=3)                      what the engine samples for a fixed seed
    pair.generate(); pair.to_training(); pair.train()        a rollout; the hand-off; one step on it
    pair.to_rollout()                                        the hand-off back, with the sync
    pair.device.held_by(pair.trainer, pair.engine)           device bytes, by side; `pair.trainer.held` says by tag

The reward is a fact about the sampled bytes alone (`reward_of`): the share of them that are lower-case letters. The
base is drawn from the seed and frozen, so the reward can rise only if what was trained arrives in the engine.

Each step also compares the two models: what the trainer says of the sampled tokens must be what the engine sampled them
with, within `LoopSettings.tolerance`; else `Disagreement`. This process imports neither torch nor the saver. It does
not know the order of a hand-off (`colocert_reference.driver`), nor what either process does.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from colocert_reference.driver import Driver
from colocert_reference.real.pair import ENGINE, MIB, TRAINER, Pair, Sizes
from colocert_reference.real.processes import PairError

LEARNER = "colocert_reference.real.learner_process:main"
LLAMA = "colocert_reference.real.engine_process:main"
STATE = "loop.json"
PROMPTS = (
    "once upon ",
    "the driver",
    "a hand-off",
    "release it",
    "wake up at",
    "sync again",
    "two cores ",
    "no GPU yet",
)
MODEL: Mapping[str, Any] = {
    "layers": 2,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 512,
    "vocabulary": 256,
    "rope_theta": 10000,
    "rms_eps": 1e-5,
    "lora_rank": 256,
    "lora_alpha": 256.0,
}
"""What both sides build: the arguments that `model.Shape` and `llama_engine.LlamaShape` share."""
LOWER = frozenset(b"abcdefghijklmnopqrstuvwxyz")


class Disagreement(PairError):
    """Trainer and engine do not compute with the same adapter. `gap`: between log-probabilities of one token."""

    def __init__(self, iteration: int, gap: float, tolerance: float) -> None:
        super().__init__(
            f"trainer and engine must agree on the log-probability of every sampled token within {tolerance:g} (got "
            f"{gap:.3g} in iteration {iteration}): the engine samples from another adapter, base or cache than was "
            "trained"
        )
        self.iteration, self.gap, self.tolerance = iteration, gap, tolerance


class NoCheckpoint(PairError):
    """A folder to resume from must hold a checkpoint of this loop."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Sizes of model, memory and rollouts. `model` is both sides': `model.Shape` there, `llama_engine.LlamaShape` here.

    `capacity` lies in the middle of the wall of gpu-peak: it fits because the gradients go early. The LoRA rank is that
    of the hidden size, so that the gradients of a small model are some granules.
    """

    seed: int = 0
    model: Mapping[str, Any] = field(default_factory=lambda: dict(MODEL))
    prompts: int = 4
    samples: int = 24
    tokens: int = 12
    temperature: float = 1.0
    learning_rate: float = 5e-3
    tolerance: float = 1e-3
    mirror: bool = True
    capacity: int = 184 * MIB
    graphs: int = 6 * MIB
    communicators: int = 8 * MIB

    @property
    def length(self) -> int:
        """Tokens of a prompt and its completion."""
        return max(map(len, PROMPTS)) + self.tokens

    def learner(self) -> dict[str, Any]:
        return {**self.model, "sequence": self.length}

    def engine(self) -> dict[str, Any]:
        return {**self.model, "slots": self.prompts, "length": self.length, "samples": self.samples}


@dataclass(frozen=True)
class Iteration:
    """What one iteration did. `spread` is the standard deviation of the rewards over its `rollouts` samples.

    `version` is the adapter's that the rollout was sampled from; `sample` its best completion.
    """

    number: int
    reward: float
    spread: float
    rollouts: int
    loss: float
    gradient_norm: float
    gap: float
    version: int
    sample: str


def reward_of(completion: Sequence[int]) -> float:
    """The share of bytes that are lower-case letters."""
    return sum(token in LOWER for token in completion) / len(completion)


class LearningPair(Pair):
    """A pair that learns. `iterations` grows by one at each step; `on_iteration` is called with each.

    With `checkpoint` each iteration is kept in that folder; with `resume` the run goes on from what such a folder
    holds.
    `learner` and `engine` name what the processes run.
    """

    def __init__(
        self,
        settings: LoopSettings | None = None,
        *,
        peak_device: str,
        device: str = "host",
        checkpoint: Path | None = None,
        resume: Path | None = None,
        on_iteration: Callable[[Iteration], None] = lambda iteration: None,
        driver: Callable[..., Driver] = Driver,
        learner: str = LEARNER,
        engine: str = LLAMA,
        **more: Any,
    ) -> None:
        self.settings = settings or LoopSettings()
        self.checkpoint, self.on_iteration = checkpoint, on_iteration
        self.bodies = {TRAINER: learner, ENGINE: engine}
        self.iterations: list[Iteration] = []
        self.version = 0
        self.base_bytes: list[int] = []
        self._rollout: list[dict[str, Any]] = []
        self._to_load = resume
        self.first = 0
        if resume is not None:
            check_settings(resume, self.settings)
        if checkpoint is not None:
            keep_settings(checkpoint, self.settings)
        super().__init__(
            Sizes(capacity=self.settings.capacity), peak_device=peak_device, device=device, driver=driver, **more
        )

    @property
    def number(self) -> int:
        """The iteration under way, counted from the start of a run that was resumed."""
        return self.first + len(self.iterations)

    def _start(self) -> None:
        settings, common = self.settings, self._wire()
        llama = {"shape": settings.engine(), "mirror": settings.mirror, "graphs": settings.graphs}
        learner = {
            "shape": settings.learner(),
            "communicators": settings.communicators if self.device.name == "host" else 0,
            "learning_rate": settings.learning_rate,
        }
        with ThreadPoolExecutor(2) as both:  # each imports for seconds before it says that it is there
            begun = [
                both.submit(self._process, side, self.bodies[side], seed=settings.seed, **own, **common)
                for side, own in ((ENGINE, llama), (TRAINER, learner))
            ]
        self.engine, self.trainer = (side.result() for side in begun)
        self._sides = [self.engine, self.trainer]
        self._engine_sizes: dict[str, int] = self.step(self.engine, "start")

    # ---- what the driver asks

    def engine_needs(self, tag: str) -> int:
        return self._engine_sizes[tag]

    def init(self) -> None:
        self.step(self.trainer, "init")
        if self._to_load is not None:
            told = self.trainer.call("load", folder=str(self._to_load))
            self.first = int(told["iteration"])
            self.version = self.first  # the sync that follows is that of the next iteration's rollout
            self._to_load = None

    def generate(self) -> None:
        """A rollout: groups of samples, each for a prompt, with a reward for each sample."""
        drawing = random.Random(f"{self.settings.seed} {self.number}")
        prompts = drawing.sample(PROMPTS, self.settings.prompts)
        answers = self.step(self.engine, "generate", **self._asked(prompts, drawing.getrandbits(30)))
        self._rollout = [
            {
                "prompt": list(answer["prompt"].encode()),
                "completions": answer["tokens"],
                "logprobs": answer["logprobs"],
                "rewards": [reward_of(completion) for completion in answer["tokens"]],
                "version": answer["version"],
            }
            for answer in answers
        ]

    def train(self) -> None:
        """One step on the last rollout; raises `Disagreement` where the engine sampled from something else."""
        rollout = self._rollout
        self.trainer.call("feed", groups=[{k: v for k, v in g.items() if k != "version"} for g in rollout])
        told = self.step(self.trainer, "train")
        if not told["gap"] <= self.settings.tolerance:
            raise Disagreement(self.number, told["gap"], self.settings.tolerance)
        done = self._told(rollout, told)
        self.iterations.append(done)
        if self.checkpoint is not None:
            self.trainer.call("save", folder=str(self.checkpoint), iteration=self.number)
        self.on_iteration(done)

    def sync(self) -> None:
        """The base where the engine's is not valid, then the adapter."""
        self.version += 1
        if not self.engine.told.get("base_valid"):
            nbytes = self.transfer("send_base", version=self.version)
            assert nbytes is not None
            self.base_bytes.append(nbytes)
            self.facts["base"] = nbytes
        nbytes = self.transfer("update_weights", version=self.version)
        assert nbytes is not None
        self.adapter_bytes.append(nbytes)
        self.facts |= {"adapter": nbytes, "version": self.version}

    def sent_bytes(self) -> dict[str, list[int]]:
        """The bytes of each transfer, by what was sent."""
        return {"base": self.base_bytes, "adapter": self.adapter_bytes}

    # ---- a step at a time

    def to_training(self) -> None:
        """The hand-off after a rollout."""
        self.driver._to_train()

    def to_rollout(self) -> None:
        """The hand-off after a step, with the sync."""
        self.driver._to_rollout()

    def tokens(self, prompts: Sequence[str], seed: int, **how: Any) -> list[dict[str, Any]]:
        """What the engine samples for these prompts from this seed: `tokens`, `logprobs` and `version` for each."""
        answers: list[dict[str, Any]] = self.engine.call("generate", **{**self._asked(prompts, seed), **how})
        return answers

    def _asked(self, prompts: Sequence[str], seed: int) -> dict[str, Any]:
        s = self.settings
        how = {"tokens": s.tokens, "samples": s.samples, "temperature": s.temperature}
        return {"prompts": list(prompts), "seed": seed, **how}

    def _told(self, rollout: list[dict[str, Any]], told: Mapping[str, Any]) -> Iteration:
        pairs = [(r, c) for g in rollout for r, c in zip(g["rewards"], g["completions"], strict=True)]
        rewards = [reward for reward, _ in pairs]
        mean = math.fsum(rewards) / len(rewards)
        spread = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
        best = max(pairs, key=lambda pair: pair[0])[1]
        return Iteration(
            self.number,
            mean,
            spread,
            len(rewards),
            told["loss"],
            told["gradient_norm"],
            told["gap"],
            rollout[0]["version"],
            "".join(chr(t) if 32 <= t < 127 else "·" for t in best),
        )


def same_run(settings: LoopSettings) -> dict[str, Any]:
    """What a run must have in common with the one it goes on from."""
    free = ("tolerance", "capacity", "communicators", "graphs", "mirror")
    fields: dict[str, Any] = json.loads(json.dumps({k: v for k, v in asdict(settings).items() if k not in free}))
    return fields


def keep_settings(folder: Path, settings: LoopSettings) -> None:
    """Puts beside the trainer's checkpoints what the loop must be the same in. Refuses another run's folder."""
    path = folder / STATE
    if path.exists():
        check_settings(folder, settings)
        return
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{STATE}.part"
    part.write_text(json.dumps(same_run(settings), indent=1))
    part.replace(path)


def check_settings(folder: Path, settings: LoopSettings) -> None:
    """Raises `NoCheckpoint` unless the folder is of a run with these settings."""
    try:
        then = dict(json.loads((folder / STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise NoCheckpoint(
            f"{folder / STATE} must be readable (got {type(error).__name__}): name the folder of a --checkpoint"
        ) from None
    now = same_run(settings)
    if other := sorted(name for name in now if then.get(name) != now[name]):
        told = ", ".join(f"{name} {then.get(name)} there, {now[name]} here" for name in other)
        raise NoCheckpoint(f"{folder} must be of a run with the same settings (got {told})")
