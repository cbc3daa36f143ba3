"""The smallest adapter that conforms: a trainer that was written for the rig."""

from colocert import Claims, Rig

NO_SET: frozenset[str] = frozenset()


# --8<-- [start:trainer]
class Trainer:
    def __init__(self, rig: Rig) -> None:
        self.rig, self.released = rig, set[str]()

    def sleep(self) -> None:
        for tag in ("grad_buffer", "default"):
            if tag not in self.released:
                self.rig.saver.pause(tag)
                self.released.add(tag)  # after the call: it may be refused

    def wake_up(self) -> None:
        for tag in ("default", "grad_buffer"):
            if tag in self.released:
                self.rig.saver.resume(tag)
                self.released.discard(tag)
                if tag == "grad_buffer":
                    self.rig.data(tag, "zero")  # without a backup, anything may lie there

    def train(self) -> None:
        self.wake_up()
        with self.rig.point("train"):
            self.rig.data("default", "read")
            self.rig.data("grad_buffer", "accumulate")
            self.rig.data("grad_buffer", "consume")
            self.rig.data("default", "overwrite", only="adapter")

    def update_weights(self) -> None:
        source = "host" if "default" in self.released else "device"
        self.rig.send("adapter", "default", only="adapter", read_from=source)

    def believed(self) -> dict[str, bool]:
        return {tag: tag in self.released for tag in ("default", "grad_buffer")}

    def fingerprint(self) -> object:
        return frozenset(self.released)

    def close(self) -> None: ...


class Implementation:
    name, version = "mypkg", "1.0"
    trainer = Trainer
    # Each claim is stated; `colocert new` writes them with what they mean.
    claims = Claims(
        lora=True,
        gradients_traced=True,
        adapter_source="host",
        sync_strategies={"adapter"},
        peak_device={"cpu", "gpu"},
        multi_lora=False,
        full_parameter=False,
        rematerialize=False,
        early_grad_release=False,
        offload_train_optional=False,
        group_teardown=False,
        resident_while_released=NO_SET,
        retained_backup=False,
        gpu_peak_with_critic=False,
        engine_releases=NO_SET,
        file_backed_frozen=False,
        versions=False,
        base_requests_in_lora_mode=False,
        disaggregated=False,
        replacement=False,
    )


implementation = Implementation()
# --8<-- [end:trainer]
