"""A trainer that does nothing and claims nothing: quick to record, and incomplete."""

from __future__ import annotations

from colocert import Rig

_FLAGS = (
    "lora",
    "multi_lora",
    "full_parameter",
    "early_grad_release",
    "offload_train_optional",
    "rematerialize",
    "group_teardown",
    "gpu_peak_with_critic",
    "file_backed_frozen",
    "versions",
    "base_requests_in_lora_mode",
    "disaggregated",
    "replacement",
    "retained_backup",
    "gradients_traced",
)
_NO = dict.fromkeys(_FLAGS, False)
_NONE = dict.fromkeys(["peak_device", "engine_releases", "resident_while_released", "sync_strategies"], ())


class Trainer:
    def sleep(self) -> None: ...

    wake_up = train = update_weights = close = sleep


class Small:
    name, version = "small", "1"
    claims = {**_NO, **_NONE, "adapter_source": "resident"}  # noqa: RUF012

    def trainer(self, rig: Rig) -> Trainer:
        return Trainer()


implementation = Small()
