"""The HTTP ports: their listeners, their protection, and the management port."""
