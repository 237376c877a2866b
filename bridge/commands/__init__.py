"""The command line `delay-bridge`: commands that run the bridge, write into its topics, or ask a running one."""
