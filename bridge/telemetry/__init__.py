"""Logs, metrics, health and the management port."""
