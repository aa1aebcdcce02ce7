"""The published methods, one short file each that follows its paper and binds policies to the runtime."""

from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.hybrid import Hybrid
from offbeat.strategies.model_averaging import ADPSGD, Choco, DiLoCo, LocalSGD, Prague, PReduce
from offbeat.strategies.partial import DPAR, PartialAllReduce
from offbeat.strategies.registry import STRATEGIES, parse_strategy
from offbeat.strategies.staleness import ASP, DTSSP, SSP, Downpour, ServerBSP

__all__ = [
    "ADPSGD",
    "ASP",
    "DPAR",
    "DTSSP",
    "SSP",
    "STRATEGIES",
    "AllReduce",
    "Choco",
    "DiLoCo",
    "Downpour",
    "Hybrid",
    "LocalSGD",
    "PReduce",
    "PartialAllReduce",
    "Prague",
    "ServerBSP",
    "parse_strategy",
]
