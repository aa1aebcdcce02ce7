"""One short file a published method: it reads like its paper and binds policy and numerics to the runtime."""

from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.partial import DPAR, PartialAllReduce
from offbeat.strategies.spelling import STRATEGIES, parse_strategy

__all__ = ["DPAR", "STRATEGIES", "AllReduce", "PartialAllReduce", "parse_strategy"]
