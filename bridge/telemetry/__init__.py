"""What the bridge tells: logs, metrics, health, the management port."""
