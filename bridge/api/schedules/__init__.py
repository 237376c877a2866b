"""Recurring messages: their schedules, and when their next ticks are due."""
