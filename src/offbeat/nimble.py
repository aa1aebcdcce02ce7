"""Forward passes scheduled ahead of time on several streams, where that is measured to be faster."""

from __future__ import annotations

from offbeat.numerics.nimble.stream_assignment import Launch, StreamAssignment, assign_streams
from offbeat.runtime.nimble.compiling import CompiledModule
from offbeat.runtime.nimble.compiling import compile_module as compile

__all__ = ["CompiledModule", "Launch", "StreamAssignment", "assign_streams", "compile"]
