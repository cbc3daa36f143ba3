"""The rig: contract, claims, doubles, faults. What an adapter sees of colocert; no rule and no report."""

from colocert.rig.contract import Claims, Config, ContractError, Implementation, Region, Trainer
from colocert.rig.faults import Faults, InjectedFault, SaverRefused
from colocert.rig.groups import GroupGone, ProcessGroups
from colocert.rig.rig import Rig
from colocert.rig.saver import Allocation, SaverFatal, StrictSaver

__all__ = [
    "Allocation",
    "Claims",
    "Config",
    "ContractError",
    "Faults",
    "GroupGone",
    "Implementation",
    "InjectedFault",
    "ProcessGroups",
    "Region",
    "Rig",
    "SaverFatal",
    "SaverRefused",
    "StrictSaver",
    "Trainer",
]
