"""Devices that hold a model: the CPU, or an accelerator whose work is queued on streams."""
