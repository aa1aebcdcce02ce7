"""Helpers that several test files share: worker processes, jobs, endpoints, events, checks of run logs."""
