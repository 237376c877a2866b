"""Which timers are cancelled."""
