"""The parts of a start: facts from Kafka and the directory, the plan, and conditions that are also checked later.

The order of a start is elsewhere: runtime/app.py has that of the process, runtime/pipeline.py that of the partitions.
"""
