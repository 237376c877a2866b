"""The timer store: a disposable, local index of the pending timers of one log. Knows neither Kafka nor Spark.

`TimerStore` (store.py) is the one public class. The folders are layers; each imports only those above it in this list:

    rows        what a row is, the total order (at, offset), and what is committed of it
    disk        files: written durably, column files, the checkpoint
    memory      rows in memory: ready, memtable, overtaken; counts of what is pending
    cancels     tombstones, and where the timers of an id are
    log         segments (immutable, sorted Parquet files), and the TimerLog of all live ones
    operations  on the shared state: ingest, transaction, timer wheel, maintenance, compaction, recovery, stats
"""
