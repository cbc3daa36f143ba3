"""How colocert drives inventedtrainer: the one module of inventedtrainer that knows colocert."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from colocert import Claims, Rig

# --8<-- [start:claims]
CLAIMS = Claims(
    lora=True,
    multi_lora=False,
    full_parameter=False,
    rematerialize=False,
    early_grad_release=True,  # free_gradients()
    offload_train_optional=False,
    group_teardown=False,
    gradients_traced=True,  # RigPolicy below says what happens to gradients
    resident_while_released=frozenset(),
    retained_backup=False,
    peak_device={"gpu", "cpu"},
    gpu_peak_with_critic=False,
    engine_releases={"weights", "kv_cache"},
    adapter_source="host",
    sync_strategies={"adapter"},
    file_backed_frozen=False,
    versions=True,
    base_requests_in_lora_mode=False,
    disaggregated=False,
    replacement=False,
)
# --8<-- [end:claims]


# --8<-- [start:policy]
class RigPolicy:
    """Stands where `inventedtrainer.policy.Policy` is. Computes nothing; tells the rig what a step does to memory."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def backward(self, inputs: Any, targets: Any) -> float:
        with self.rig.point("train"):
            self.rig.data("default", "read")
            self.rig.data("grad_buffer", "accumulate")
        return 0.0

    def step(self) -> None:
        self.rig.data("grad_buffer", "consume")
        for changed in ("adapter", "optimizer"):
            self.rig.data("default", "overwrite", only=changed)

    def clear_gradients(self) -> None:
        self.rig.data("grad_buffer", "zero")

    def export(self, *, away: bool) -> None:
        self.rig.send("adapter", "default", only="adapter", read_from="host" if away else "device")


# --8<-- [end:policy]


# --8<-- [start:trainer]
class Trainer:
    """The real `Learner` over the rig's saver."""

    def __init__(self, rig: Rig) -> None:
        rig.stubs(["torch", "torch_memory_saver"])  # where they are absent
        from inventedtrainer import learner

        rig.patch("inventedtrainer.pools.torch_memory_saver", rig.saver)
        engine = SimpleNamespace(take_adapter=lambda adapter, version: None)
        self.side = learner.Side
        self.learner = learner.Learner(RigPolicy(rig), engine)
        self.publishes = rig.config.role == "actor"

    def sleep(self) -> None:
        self.learner.switch(self.side.GENERATE)

    def wake_up(self) -> None:
        self.learner.switch(self.side.LEARN)

    def offload_grad_buffer(self) -> None:
        self.learner.free_gradients()

    def train(self) -> None:
        self.learner.learn([(None, None)])

    def update_weights(self) -> None:
        if self.publishes:
            self.learner.publish()

    def believed(self) -> dict[str, bool]:
        """Its one flag speaks of the model's pool; of the gradients it keeps no record."""
        return {"default": self.learner.side is self.side.GENERATE}

    def fingerprint(self) -> object:
        """All that a later call depends on."""
        return self.learner.side

    def close(self) -> None: ...


# --8<-- [end:trainer]


class Implementation:
    name = "inventedtrainer"
    version = "0.3.0"
    claims = CLAIMS
    trainer = Trainer


implementation = Implementation()
