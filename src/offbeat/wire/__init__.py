"""Events and actions as bytes: on the wire, and in run logs that can be replayed."""
