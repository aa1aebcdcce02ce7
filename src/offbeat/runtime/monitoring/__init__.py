"""Figures of a running job for monitoring systems: Prometheus, TensorBoard, OpenTelemetry."""
