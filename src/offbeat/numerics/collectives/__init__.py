"""Schedules of collectives, their costs, and what travels together."""
